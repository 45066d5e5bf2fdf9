"""The closing table, summary.json and the plot, read back."""

import io
import json
import math

import matplotlib.image
import numpy as np
import pytest
from rich.console import Console

from jaxtrain.observe.files import write_summary
from jaxtrain.report.training import draw_curve, eval_points, print_summary, smooth


def write_rows(folder, rows):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_rows(n):
    rows = []
    for step in range(1, n + 1):
        rows.append({"step": step, "loss": 2 + 6 / step**0.5, "learning_rate": 1e-3 * min(1, step / 20)})
        if step % 50 == 0:
            rows[-1]["eval_loss"] = 2.1 + 6 / step**0.5
    rows[0]["eval_loss_before"] = 8.5
    return rows


def test_the_plot_has_both_curves(tmp_path):
    write_rows(tmp_path, run_rows(200))
    path = draw_curve(tmp_path)
    assert path == tmp_path / "loss.png"
    pixels = matplotlib.image.imread(path)
    assert pixels.shape[0] >= 600 and pixels.shape[1] >= 1000
    for color in ("2f6db5", "d1603d"):
        wanted = np.array([int(color[i : i + 2], 16) / 255 for i in (0, 2, 4)])
        assert (np.abs(pixels[..., :3] - wanted).max(axis=-1) < 0.02).sum() > 100
    assert sorted(p.name for p in tmp_path.iterdir()) == ["loss.png", "metrics.jsonl"]


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"step": 1, "loss": None, "nonfinite": ["loss"]}],
        [{"step": 0, "eval_loss": 3.0}],
        [{"step": 1, "loss": 2.0}],
    ],
)
def test_a_plot_of_little(tmp_path, rows):
    write_rows(tmp_path, rows)
    assert draw_curve(tmp_path).stat().st_size > 0


def test_evaluations_by_step():
    rows = [{"step": 1, "eval_loss_before": 9.0}, {"step": 5, "eval_loss": 4.0}, {"step": 6, "eval_loss": None}]
    assert eval_points(rows) == [(0, 9.0), (5, 4.0)]


def test_smoothing_keeps_lines_straight_and_gaps_open():
    line = [(i, 3.0 * i) for i in range(200)]
    np.testing.assert_allclose(smooth(line)[:-3], line[:-3], rtol=1e-12)
    assert smooth(line)[-1][1] == pytest.approx(3 * (196 + 199) / 2), "the last step alone is noise"
    line[100] = (100, math.nan)
    smoothed = smooth(line)
    assert math.isnan(smoothed[100][1]) and not math.isnan(smoothed[99][1])


RESULT = {
    "steps": 400, "parameters": 5_123_456, "tokens_total": 1_600_000, "skipped_steps": 2, "loss_first": 8.31,
    "loss_last": 2.5, "eval_loss_first": 8.3, "eval_loss_last": 2.75, "resumed_from": None, "compile_s": 6.25,
    "wall_s": 301.5, "checkpoint": 400, "tokens_per_s_median": 9876.5, "step_s_p50": 0.4, "step_s_p90": 0.5,
    "step_s_p99": 0.75, "data_wait_share": 0.0123, "tflops_per_device_causal": 0.25, "tflops_per_device_full": 0.26,
    "mfu_causal": None, "mfu_full": None, "sample": "def f(x):\n    [bold]return[/bold] x",
}  # fmt: skip


def printed(result):
    screen = io.StringIO()
    print_summary("runs/x", result, Console(file=screen, width=120))
    return screen.getvalue()


def test_the_closing_table():
    text = printed(RESULT)
    for words in ("8.3100 -> 2.5000", "8.3000 -> 2.7500", "5,123,456", "1,600,000", "9,876", "1.2%", "unknown chip"):
        assert words in text
    assert "400.0 / 500.0 / 750.0 ms" in text
    assert "[bold]return[/bold]" in text, "generated text is no markup"
    assert "resumed from" not in text


def test_a_known_chip_and_an_empty_result():
    assert "38.0% causal, 40.0% full" in printed(RESULT | {"mfu_causal": 0.38, "mfu_full": 0.4})
    assert "runs/x" in printed({})


def test_summary_is_written_whole_and_printed(tmp_path, capsys):
    write_summary(tmp_path, RESULT)
    print_summary(tmp_path, RESULT)
    assert json.loads((tmp_path / "summary.json").read_text()) == RESULT
    assert "held-out loss" in capsys.readouterr().out
    write_summary(tmp_path, {"steps": 1})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 1}
    assert capsys.readouterr().out == ""
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]
