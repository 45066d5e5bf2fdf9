"""metrics.jsonl survives kills and resumes; the other sinks follow."""

import io
import json
import os
import signal
import struct
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from jaxtrain.config import ConfigError, ObserveConfig
from jaxtrain.observe.events import read_events
from jaxtrain.observe.files import read_metrics, to_json
from jaxtrain.observe.log import Log

QUIET = ObserveConfig(tensorboard=False, progress=False)


def rows(first, last):
    return [{"step": s, "loss": 10.0 / s, "learning_rate": 1e-3, "tokens_per_s": 100.0 * s} for s in range(first, last)]


def write(folder, resume, first, last, observe=QUIET):
    log = Log(folder, observe, primary=True)
    log.resume_at(resume)
    for row in rows(first, last):
        log.record(row)
    log.close()


@pytest.mark.parametrize("checkpoint", [0, 3, 6, 9])
@pytest.mark.parametrize("torn", ["", '{"step": 10, "lo', "\x00\x00"])
def test_a_resumed_file_equals_an_unbroken_one(tmp_path, checkpoint, torn):
    write(tmp_path / "whole", 0, 1, 13)
    write(tmp_path / "broken", 0, 1, 10)
    with (tmp_path / "broken/metrics.jsonl").open("a") as file:
        file.write(torn)
    write(tmp_path / "broken", checkpoint, checkpoint + 1, 13)
    names = ("whole/metrics.jsonl", "broken/metrics.jsonl")
    whole, broken = ((tmp_path / name).read_bytes() for name in names)
    assert whole == broken
    assert {p.name for p in (tmp_path / "broken").iterdir()} - {"events.jsonl"} == {"metrics.jsonl"}
    lost = [event["steps"] for event in read_events(tmp_path / "broken")]
    assert lost == ([9 - checkpoint] if checkpoint < 9 else [])


def test_the_first_step_resumes_by_itself(tmp_path):
    write(tmp_path, 0, 1, 10)
    log = Log(tmp_path, QUIET, primary=True)
    log.record(rows(5, 6)[0])
    assert [row["step"] for row in log.rows()] == [1, 2, 3, 4, 5]


def test_lost_rows_are_said(tmp_path, caplog):
    write(tmp_path, 0, 1, 4)
    write(tmp_path, 7, 8, 9)
    assert "rows up to step 3" in caplog.text and "step 7" in caplog.text


def test_kill_9_loses_no_finished_line(tmp_path):
    script = textwrap.dedent(f"""
        import os, signal
        from pathlib import Path
        from jaxtrain.config import ObserveConfig
        from jaxtrain.observe.log import Log
        log = Log(Path({str(tmp_path)!r}), ObserveConfig(progress=False), primary=True)
        for step in range(1, 8):
            log.record({{"step": step, "loss": 1.0}})
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    assert subprocess.run([sys.executable, "-c", script]).returncode == -signal.SIGKILL
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(1, 8))


def test_a_mangled_line_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ConfigError, match=r"metrics.jsonl line 2"):
        read_metrics(tmp_path)


@given(
    st.dictionaries(st.text(min_size=1, max_size=5), st.one_of(st.floats(), st.integers(), st.none(), st.booleans()))
)
def test_rows_are_valid_json_whatever_the_numbers(row):
    row.pop("nonfinite", None)

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    read = json.loads(to_json(row), parse_constant=refuse)
    bad = {name for name, value in row.items() if isinstance(value, float) and not np.isfinite(value)}
    assert set(read.pop("nonfinite", [])) == bad
    assert read == {name: None if name in bad else value for name, value in row.items()}


def test_scalars_of_numpy_and_jax_are_numbers():
    import jax.numpy as jnp

    row = {"a": np.float32(0.1), "b": np.int64(3), "c": jnp.float32(jnp.inf), "d": jnp.bfloat16(2)}
    assert json.loads(to_json(row)) == {"a": float(np.float32(0.1)), "b": 3, "c": None, "d": 2.0, "nonfinite": ["c"]}


def test_other_processes_write_nothing(tmp_path, capsys):
    log = Log(tmp_path / "run", ObserveConfig(), primary=False)
    log.resume_at(0)
    with log.progress(3) as advance:
        log.record({"step": 1, "loss": 1.0})
        advance({"step": 1, "loss": 1.0})
    log.info("hello")
    log.close()
    assert not (tmp_path / "run").exists() and log.rows() == []
    assert capsys.readouterr().out == ""


def events(folder):
    """Event protos of every file in TensorBoard's order, from the TFRecord framing."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            yield Event.FromString(data[at + 12 : at + 12 + length])
            at += 12 + length + 4


def test_tensorboard_holds_the_scalars_and_the_resume_mark(tmp_path):
    observe = ObserveConfig(progress=False)
    write(tmp_path, 0, 1, 6, observe)
    write(tmp_path, 3, 4, 6, observe)
    found = list(events(tmp_path / "tensorboard"))
    losses = [(e.step, v.simple_value) for e in found for v in e.summary.value if v.tag == "loss"]
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5, 4, 5]
    assert losses[0][1] == pytest.approx(10.0, rel=1e-6)
    # SessionLog.START (1) at step 4 makes TensorBoard hide what the killed run wrote from there on.
    assert [e.step for e in found if e.session_log.status == 1] == [4]


def test_tensorboard_shows_each_step_once(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    observe = ObserveConfig(progress=False)
    write(tmp_path, 0, 1, 6, observe)
    write(tmp_path, 3, 4, 8, observe)
    board = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("loss")] == [1, 2, 3, 4, 5, 6, 7]


def test_wandb_that_is_not_installed_is_a_setting_to_mend(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"observe.wandb_project is 'p'.*pip install wandb"):
        Log(tmp_path / "run", ObserveConfig(wandb_project="p"), primary=True)
    assert not (tmp_path / "run").exists()


def test_plain_lines_at_the_ends_and_every_few_seconds(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("jaxtrain.observe.log.LINE_EVERY_S", 1e9)
    log = Log(tmp_path, ObserveConfig(), primary=True)
    with log.progress(20, 10) as advance:
        for row in rows(11, 21):
            advance(row)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 11/20", "step 20/20"]
    assert "loss 0.5000" in lines[1] and "lr 0.001" in lines[1] and "2,000 tok/s" in lines[1]


def test_a_terminal_gets_a_bar(tmp_path):
    log = Log(tmp_path, ObserveConfig(), primary=True)
    screen = io.StringIO()
    log._console = Console(file=screen, force_terminal=True, width=100)
    with log.progress(20) as advance:
        for row in rows(1, 21):
            advance(row)
        log.info("said above the bar")
    assert "20/20" in screen.getvalue() and "loss 0.5000" in screen.getvalue()
    assert "said above the bar" in screen.getvalue()


def test_progress_without_the_setting_is_plain_on_a_terminal(tmp_path):
    log = Log(tmp_path, QUIET, primary=True)
    screen = io.StringIO()
    log._console = Console(file=screen, force_terminal=True, width=100)
    with log.progress(3) as advance:
        for row in rows(1, 4):
            advance(row)
    assert screen.getvalue().startswith("step 1/3") and os.linesep in screen.getvalue()
