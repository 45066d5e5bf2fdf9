"""The end of a training run: the plot of its losses and the table of its summary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from jaxtrain.observe.files import read_metrics
from jaxtrain.report.tables import FittedTable

Point = tuple[int, float]

TRAIN_COLOR, EVAL_COLOR, RATE_COLOR, INK = "#2f6db5", "#d1603d", "#9aa5b1", "#333a42"


def draw_curve(run_dir: Path) -> Path:
    """Draw RUN/loss.png from RUN/metrics.jsonl: loss, held-out loss, learning rate on a second axis; its path.

    Steps without a finite loss leave a gap.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_metrics(run_dir)
    losses = [(row["step"], _number(row.get("loss"))) for row in rows if "loss" in row]
    rates = [(row["step"], _number(row.get("learning_rate"))) for row in rows if "learning_rate" in row]
    evals = eval_points(rows)

    figure = Figure(figsize=(9, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    right = axes.twinx()
    axes.set_zorder(right.get_zorder() + 1)
    axes.patch.set_visible(False)
    right.fill_between(*_columns(rates), color=RATE_COLOR, alpha=0.12, linewidth=0)
    right.plot(*_columns(rates), color=RATE_COLOR, linewidth=1, linestyle="--", label="learning rate")
    right.set_ylim(bottom=0)
    right.set_ylabel("learning rate", color=RATE_COLOR)
    right.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2), useMathText=True)
    axes.plot(*_columns(losses), color=TRAIN_COLOR, linewidth=0.8, alpha=0.35)
    axes.plot(*_columns(smooth(losses)), color=TRAIN_COLOR, linewidth=1.8, label="training loss")
    axes.plot(*_columns(evals), color=EVAL_COLOR, linewidth=1.2, marker="o", markersize=5, label="held-out loss")
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("cross entropy, nats per token")
    axes.set_title(_title(run_dir, losses, evals), loc="left", color=INK, fontsize=11)
    axes.grid(True, color=RATE_COLOR, alpha=0.25, linewidth=0.6)
    handles = [line for line in (*axes.get_lines()[1:], *right.get_lines()) if len(line.get_xdata())]  # type: ignore[arg-type]
    if handles:
        axes.legend(handles=handles, frameon=False, loc="upper right")
    for side in (axes, right):
        side.spines["top"].set_visible(False)
        side.tick_params(colors=INK, labelsize=9)

    path, draft = run_dir / "loss.png", run_dir / ".loss.draft.png"
    figure.savefig(draft)
    draft.replace(path)
    return path


def eval_points(rows: Sequence[Mapping[str, Any]]) -> list[Point]:
    """Held-out losses by step; `eval_loss_before` of step 1 is that of step 0."""
    points: list[Point] = []
    for row in rows:
        for key, shift in (("eval_loss_before", 1), ("eval_loss", 0)):
            if row.get(key) is not None:
                points.append((row["step"] - shift, row[key]))
    return points


def smooth(points: Sequence[Point], share: float = 0.03) -> list[Point]:
    """Centred mean over a window of `share` of the points, narrower at the steep start; NaN stays out."""
    reach = int(len(points) * share / 2)
    out = []
    for i, (step, value) in enumerate(points):
        near = min(reach, i)
        window = [v for _, v in points[i - near : i + near + 1] if v == v]
        out.append((step, sum(window) / len(window) if window and value == value else float("nan")))
    return out


def print_summary(run_dir: Path, result: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the closing table and the generated sample; numbers that are absent or None are left out."""
    console = console or Console()
    rows = [(label, text) for label, show in SUMMARY_LINES if (text := show(result)) is not None]
    console.print(FittedTable(("", ""), rows, f"{run_dir}", show_heads=False))
    if result.get("sample"):
        console.print(Panel(Text(str(result["sample"])), title="sample", title_align="left", box=box.ROUNDED))


def _pattern(key: str, pattern: str) -> Callable[[Mapping[str, Any]], str | None]:
    return lambda result: None if result.get(key) is None else pattern.format(result[key])


def _from_to(first: str, last: str) -> Callable[[Mapping[str, Any]], str | None]:
    def show(result: Mapping[str, Any]) -> str | None:
        numbers = [result.get(key) for key in (first, last)]
        return " -> ".join("-" if n is None else f"{n:.4f}" for n in numbers) if numbers != [None, None] else None

    return show


def _step_times(result: Mapping[str, Any]) -> str | None:
    times = [result.get(f"step_s_{p}") for p in ("p50", "p90", "p99")]
    return None if None in times else " / ".join(f"{1e3 * t:,.1f}" for t in times if t is not None) + " ms"


def _mfu(result: Mapping[str, Any]) -> str | None:
    if result.get("tflops_per_device_causal") is None:
        return None
    causal, full = (
        "unknown chip" if result.get(f"mfu_{kind}") is None else f"{result[f'mfu_{kind}']:.1%}"
        for kind in ("causal", "full")
    )
    tera = [f"{result[f'tflops_per_device_{kind}']:.3g}" for kind in ("causal", "full")]
    mfu = causal if causal == full else f"{causal} causal, {full} full"
    return f"{mfu} ({tera[0]} causal, {tera[1]} full model TFLOP/s a device)"


SUMMARY_LINES: tuple[tuple[str, Callable[[Mapping[str, Any]], str | None]], ...] = (
    ("training loss", _from_to("loss_first", "loss_last")),
    ("held-out loss", _from_to("eval_loss_first", "eval_loss_last")),
    ("parameters", _pattern("parameters", "{:,}")),
    ("steps", _pattern("steps", "{:,}")),
    ("skipped steps", _pattern("skipped_steps", "{:,}")),
    ("scored tokens", _pattern("tokens_total", "{:,}")),
    ("tokens/s, median", _pattern("tokens_per_s_median", "{:,.0f}")),
    ("step p50 / p90 / p99", _step_times),
    ("data wait", _pattern("data_wait_share", "{:.1%} of the time")),
    ("MFU", _mfu),
    ("compile", _pattern("compile_s", "{:.1f} s")),
    ("wall time", _pattern("wall_s", "{:,.1f} s")),
    ("resumed from", _pattern("resumed_from", "step {:,}")),
    ("checkpoint", _pattern("checkpoint", "{}")),
    ("loss plot", _pattern("picture", "{}")),
    ("expert plot", _pattern("experts_picture", "{}")),
)


def _title(run_dir: Path, losses: Sequence[Point], evals: Sequence[Point]) -> str:
    words = [Path(run_dir).resolve().name]
    if losses:
        words.append(f"{losses[-1][0]:,} steps")
        words.append(f"training loss {losses[-1][1]:.3f}")
    if evals:
        words.append(
            "held-out loss " + " -> ".join(f"{value:.3f}" for _, value in dict.fromkeys((evals[0], evals[-1])))
        )
    return "   ".join(words)


def _columns(points: Sequence[Point]) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [value for _, value in points]


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)
