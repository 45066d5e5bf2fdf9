"""The loop: one compilation, hooks between steps, stopping and resuming, and an end that plots cannot spoil."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxtrain.config import ConfigError, RunConfig, StoppedError, StorageError, replace, validate
from jaxtrain.observe.events import read_events
from jaxtrain.observe.files import write_summary
from jaxtrain.train import summary
from jaxtrain.train.loop import train
from jaxtrain.train.run import Run


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("loop")
    (folder / "corpus").mkdir()
    for i in range(20):
        (folder / "corpus" / f"{i}.txt").write_text(f"the quick brown fox {i} jumps over the lazy dog\n" * 9)
    return validate({
        "model": {"vocab_size": 300, "d_model": 16, "n_layers": 2, "n_heads": 2, "d_ff": 32, "max_seq_len": 32},
        "data": {
            "sources": [{"text": str(folder / "corpus")}], "tokenizer": {"vocab_size": 300}, "seq_len": 32,
            "cache": str(folder / "cache"), "held_out": 0.2,
        },
        "train": {"steps": 6, "global_batch": 8, "sample_prompt": ""},
        "eval": {"every": 2, "batches": 1},
        "checkpoint": {"every": 2},
        "observe": {"tensorboard": False},
    })  # fmt: skip


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_same_rows(run: Path, other: Path) -> None:
    for key in ("loss", "grad_norm", "tokens_total", "eval_loss"):
        assert [row.get(key) for row in rows_of(run)] == [row.get(key) for row in rows_of(other)]


class Kill:
    """Sends this process a signal after a step, before the border."""

    def __init__(self, step: int, signum: int) -> None:
        self.at, self.signum = step, signum

    def due(self, run: Run) -> bool:
        return run.step == self.at

    def __call__(self, run: Run) -> None:
        os.kill(os.getpid(), self.signum)
        while run.signals.received is None:
            time.sleep(0.001)


class StopAt:
    """Reports the step at every second step and stops the run at one of them."""

    def __init__(self, step: int) -> None:
        self.at = step

    def due(self, run: Run) -> bool:
        return run.step % 2 == 0

    def __call__(self, run: Run) -> dict[str, Any]:
        if run.step == self.at:
            run.stop(f"asked to stop at {self.at}")
        return {"hook": run.step}


def test_one_compilation_hooks_between_steps_and_a_stopped_run_resumes(
    config: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with jax.log_compiles(), caplog.at_level(logging.WARNING, logger="jax"):
        unbroken = train(config, tmp_path / "unbroken", quiet=True)
    compiled = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Finished XLA compilation")]
    assert sum("jit(train_step)" in message for message in compiled) == 1, compiled
    assert sum("jit(evaluate)" in message for message in compiled) == 1, compiled
    assert unbroken["steps"] == unbroken["updates"] == 6 and "stopped" not in unbroken

    events = [e for e in read_events(tmp_path / "unbroken") if e["kind"] != "evaluation"]
    assert [(e["kind"], e["step"]) for e in events] == [
        ("start", 0), ("compiled", 0), ("checkpoint", 2), ("checkpoint", 4), ("checkpoint", 6), ("end", 6)
    ]  # fmt: skip
    assert events[-1]["status"] == 0 and all(e["blocked_s"] > 0 for e in events if e["kind"] == "checkpoint")

    stopped = train(config, tmp_path / "run", quiet=True, hooks=[StopAt(4)])
    assert (stopped["steps"], stopped["stopped"], stopped["checkpoint"]) == (4, "asked to stop at 4", 4)
    assert [row.get("hook") for row in rows_of(tmp_path / "run")] == [None, 2, None, 4]
    assert rows_of(tmp_path / "run")[0]["hook_before"] == 0
    finished = train(config, tmp_path / "run", quiet=True)
    assert (finished["steps"], finished["resumed_from"]) == (6, 4)
    resumed = [e for e in read_events(tmp_path / "run") if e["kind"] in ("restored", "start")][1:]
    assert [(e["kind"], e["step"]) for e in resumed] == [("restored", 4), ("start", 4)] and resumed[0]["bytes"] > 10_000
    assert_same_rows(tmp_path / "run", tmp_path / "unbroken")

    # A signal, received in the step before: no evaluation and no summary, but a checkpoint of this step.
    with pytest.raises(StoppedError, match="SIGTERM: step 3 of 6 is saved"):
        train(config, tmp_path / "signal", quiet=True, hooks=[Kill(3, signal.SIGTERM)])
    assert [e["kind"] for e in read_events(tmp_path / "signal")][-3:] == ["checkpoint", "stopped", "end"]
    assert not (tmp_path / "signal" / "summary.json").exists()
    assert train(config, tmp_path / "signal", quiet=True)["resumed_from"] == 3
    assert_same_rows(tmp_path / "signal", tmp_path / "unbroken")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_plot_that_fails_is_reported_and_the_run_is_complete(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(directory: Path) -> Path:
        assert json.loads((directory / "summary.json").read_text())["steps"] == 6, "the summary is written first"
        raise RuntimeError("no fonts here")

    monkeypatch.setattr(summary, "draw_curve", broken)
    result = train(config, tmp_path / "run")
    assert result["picture"] is None and result["steps"] == 6
    assert "picture left out: RuntimeError: no fonts here" in capsys.readouterr().out
    assert train(config, tmp_path / "run", quiet=True)["steps"] == 6, "a finished run is left alone"
    capsys.readouterr()

    # Killed between the last checkpoint and the summary: the old summary is of another run length, or there is none.
    monkeypatch.undo()
    summary_file = tmp_path / "run" / "summary.json"
    right = json.loads(summary_file.read_text())
    stale = {**right, "steps": 4, "tokens_total": 1, "loss_last": 9.9}
    for left, says in ((json.dumps(stale), "summary.json is that of step 4"), (None, "summary.json is missing")):
        summary_file.unlink()
        if left is not None:
            summary_file.write_text(left)
        result = train(config, tmp_path / "run")
        assert says in capsys.readouterr().out
        written = json.loads(summary_file.read_text())
        for key in ("steps", "tokens_total", "loss_first", "loss_last", "eval_loss_last", "checkpoint", "sources"):
            assert written[key] == right[key] == result[key], key
        assert written["measured_updates"] == right["measured_updates"] == 5
        assert written["tokens_per_s"] == pytest.approx(right["tokens_per_s"])


class Crash:
    """Fails after a step, before it is saved; `damage` alters the record of the newest durable checkpoint before."""

    def __init__(self, step: int, damage: bool = False) -> None:
        self.at, self.damage = step, damage

    def due(self, run: Run) -> bool:
        return run.step == self.at

    def __call__(self, run: Run) -> None:
        newest = run.wait_for_checkpoints()
        if self.damage:
            (run.directory / "checkpoints" / str(newest) / "record" / "metadata").write_text("altered")
        raise RuntimeError("planted")


def test_a_crash_between_durable_checkpoints_resumes_from_the_local_disk(
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config, tmp_path / "unbroken", quiet=True)
    disk = tmp_path / "disk"
    local = replace(config, "checkpoint.every=100", f"checkpoint.local={{directory: {disk}, every: 2, keep: 1}}")
    with pytest.raises(RuntimeError, match="planted"):
        train(local, tmp_path / "run", quiet=True, hooks=[Crash(5)])
    saves = [event for event in read_events(tmp_path / "run") if event["kind"] == "local_checkpoint"]
    assert [event["step"] for event in saves] == [2, 4] and all(event["bytes"] > 10_000 for event in saves)
    assert {path.parent.name.partition("-")[0] for path in disk.rglob("*.shards")} == {"4"}, "keep is 1"
    assert train(local, tmp_path / "run")["resumed_from"] == 4
    printed = capsys.readouterr().out
    assert "resumed at step 4 of 6 from the local disks" in printed and "copies of other nodes' shards: none" in printed
    assert_same_rows(tmp_path / "run", tmp_path / "unbroken")
    (restored,) = [event for event in read_events(tmp_path / "run") if event["kind"] == "restored"]
    assert (restored["tier"], restored["step"]) == ("local", 4)
    assert not list(disk.rglob("*.shards")), "a finished run needs none"

    # Durable ones of steps 2 and 4, and a local one of step 3: where 4 is damaged, 3 is the newest.
    local = replace(local, "checkpoint.every=2", "checkpoint.local.every=3")
    with pytest.raises(RuntimeError, match="planted"):
        train(local, tmp_path / "damaged", quiet=True, hooks=[Crash(5, damage=True)])
    assert train(local, tmp_path / "damaged", quiet=True)["resumed_from"] == 3
    assert (tmp_path / "damaged" / "checkpoints" / "damaged-4-0").is_dir()
    assert_same_rows(tmp_path / "damaged", tmp_path / "unbroken")


class Remove:
    """Removes the run directory after a step, before its checkpoint."""

    def due(self, run: Run) -> bool:
        return run.step == 3

    def __call__(self, run: Run) -> None:
        run.wait_for_checkpoints()
        shutil.rmtree(run.directory)


def test_a_run_directory_that_is_removed_ends_the_run_with_status_74(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        StorageError, match=r"the run directory .*/run was removed or replaced while this process trained"
    ) as caught:
        train(config, tmp_path / "run", quiet=True, hooks=[Remove()])
    assert caught.value.status == 74 and not (tmp_path / "run").exists()

    # In the moment between the last look at the lease and the summary.
    def remove(directory: Path, result: Any) -> None:
        shutil.rmtree(directory)
        write_summary(directory, result)

    monkeypatch.setattr(summary, "write_summary", remove)
    with pytest.raises(StorageError, match=r"run directory .*/late was removed or replaced while this process trained"):
        train(config, tmp_path / "late", quiet=True)


def test_a_prompt_without_room_is_refused_at_the_start(config: RunConfig, tmp_path: Path) -> None:
    long = replace(config, f"train.sample_prompt={'dog ' * 40}")
    with pytest.raises(ConfigError, match=r"train.sample_prompt has \d+ tokens and data.seq_len is 32: shorten it"):
        train(long, tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
