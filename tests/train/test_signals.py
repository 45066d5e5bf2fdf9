"""Signals save at a step border and end with status 75; before the first step, or a second time, they end at once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxtrain.launch.local import free_port
from jaxtrain.observe.events import read_events
from jaxtrain.train.signals import StopSignals

FOREVER = 1_000_000


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("signals")
    (folder / "corpus").mkdir()
    for i in range(20):
        (folder / "corpus" / f"{i}.txt").write_text(f"the quick brown fox {i} jumps over the lazy dog\n" * 9)
    tree = {
        "model": {"vocab_size": 300, "d_model": 16, "n_layers": 2, "n_heads": 2, "d_ff": 32, "max_seq_len": 32},
        "data": {
            "sources": [{"text": str(folder / "corpus")}], "tokenizer": {"vocab_size": 300}, "seq_len": 32,
            "cache": str(folder / "cache"), "held_out": 0.2,
        },
        "train": {"steps": FOREVER, "global_batch": 8, "sample_prompt": ""},
        "optimizer": {"learning_rate": 1e-2, "schedule": "constant"},
        "eval": {"every": None},
        "checkpoint": {"every": FOREVER},
        "observe": {"tensorboard": False},
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return folder


@contextlib.contextmanager
def started(place: Path, run: str, processes: int = 1, *arguments: str) -> Iterator[list[subprocess.Popen[str]]]:
    """The processes of a run, each with its output in a file; none outlives the block."""
    (place / run).mkdir(exist_ok=True)
    address, workers = f"127.0.0.1:{free_port()}", []
    command = [sys.executable, "-m", "jaxtrain", "train", str(place / "run.yaml"), "--run", str(place / run / "run")]
    try:
        for rank in range(processes):
            joined = ["--coordinator", address, "--processes", str(processes), "--process-id", str(rank)]
            with (place / run / f"output-{rank}").open("w") as output:
                workers.append(subprocess.Popen(
                    [*command, *arguments, *(joined if processes > 1 else [])], stdout=output,
                    stderr=subprocess.STDOUT, text=True, env={**os.environ, "JAX_NUM_CPU_DEVICES": "1"},
                ))  # fmt: skip
        yield workers
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def output(place: Path, run: str, rank: int = 0) -> str:
    return (place / run / f"output-{rank}").read_text()


def wait_until(true: Callable[[], bool], workers: list[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline and all(worker.poll() is None for worker in workers)
        time.sleep(0.005)


def rows(place: Path, run: str) -> list[dict[str, Any]]:
    path = place / run / "run" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def losses(place: Path, run: str) -> list[tuple[float, float, int]]:
    return [(row["loss"], row["grad_norm"], row["tokens_total"]) for row in rows(place, run)]


@pytest.mark.prove
@pytest.mark.parametrize(("processes", "signum", "receiver"), [(1, signal.SIGINT, 0), (2, signal.SIGUSR1, 1)])
def test_a_signal_saves_at_a_border_and_the_same_command_resumes(
    place: Path, processes: int, signum: int, receiver: int
) -> None:
    run = f"{processes}-{receiver}"
    with started(place, run, processes) as workers:
        wait_until(lambda: len(rows(place, run)) >= 3, workers)
        begin = time.monotonic()
        workers[receiver].send_signal(signum)
        statuses = [worker.wait(timeout=60) for worker in workers]
        seconds = time.monotonic() - begin
    assert statuses == [75] * processes, output(place, run)
    assert seconds < 10
    name = signal.Signals(signum).name
    assert f"{name}: a checkpoint is saved at the next step border" in output(place, run, receiver)
    assert "Traceback" not in output(place, run)
    step = len(rows(place, run))
    assert f"{name}: step {step} of {FOREVER} is saved" in output(place, run)
    assert [path.name for path in (place / run / "run" / "checkpoints").iterdir()] == [str(step)]
    assert not (place / run / "run" / "summary.json").exists()
    stopped, end = read_events(place / run / "run")[-2:]
    assert (stopped["kind"], stopped["step"], stopped["signal"]) == ("stopped", step, name)
    assert (end["kind"], end["status"]) == ("end", 75)

    with started(place, run, processes, "--train.steps", str(step + 3)) as workers:
        assert [worker.wait(timeout=120) for worker in workers] == [0] * processes, output(place, run)
    with started(place, f"{run}-unbroken", processes, "--train.steps", str(step + 3)) as workers:
        assert [worker.wait(timeout=120) for worker in workers] == [0] * processes
    assert losses(place, run) == losses(place, f"{run}-unbroken")


def test_a_signal_before_the_first_step_ends_at_once(place: Path) -> None:
    run = "early"
    with started(place, run) as workers:
        wait_until(lambda: "corpus:" in output(place, run), workers)
        workers[0].send_signal(signal.SIGTERM)
        assert workers[0].wait(timeout=20) == 143
    assert "SIGTERM before the first step: nothing is saved yet" in output(place, run)
    assert "Traceback" not in output(place, run)
    assert not [path for path in (place / "cache").iterdir() if path.is_dir() and path.name.startswith(".")]
    (place / run / "run" / "checkpoints" / "70").mkdir(parents=True)
    assert StopSignals(place / run / "run").resumption() == "the same command resumes at step 70"


@pytest.mark.prove
def test_a_second_signal_ends_at_once(place: Path) -> None:
    run = "twice"
    with started(place, run, 2) as workers:
        wait_until(lambda: len(rows(place, run)) >= 3, workers)
        # The other process is stopped: no further step completes and no border is reached.
        workers[0].send_signal(signal.SIGSTOP)
        workers[1].send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert workers[1].poll() is None
        workers[1].send_signal(signal.SIGINT)
        assert workers[1].wait(timeout=10) == 130
    assert "SIGINT again, ended at once: nothing is saved yet" in output(place, run, 1)
