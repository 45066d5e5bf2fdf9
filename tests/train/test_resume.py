"""Killed at any update, a rerun continues as the unbroken run; several processes train as one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxtrain.cli import main
from jaxtrain.train.lease import take

UPDATES = 9


def write_corpus(folder: Path) -> Path:
    folder.mkdir()
    for number in range(40):
        functions = (f"def f{number}_{i}(x):\n    return x + {i * number}  # {'abc' * (i % 5)}\n" for i in range(9))
        (folder / f"file{number}.py").write_text("\n".join(functions))
    return folder


def config_tree(folder: Path) -> dict[str, Any]:
    return {
        "model": {"vocab_size": 320, "d_model": 32, "n_layers": 2, "n_heads": 2, "d_ff": 64, "max_seq_len": 32},
        "data": {
            "sources": [{"text": str(folder / "corpus")}], "tokenizer": {"vocab_size": 320}, "seq_len": 32,
            "cache": str(folder / "cache"), "held_out": 0.2,
        },
        "train": {"steps": UPDATES, "global_batch": 8, "sample_tokens": 4},
        "optimizer": {"learning_rate": 1e-2, "warmup": 2},
        "checkpoint": {"every": 3},
        "eval": {"every": 4, "batches": 1},
    }  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    write_corpus(folder / "corpus")
    (folder / "run.yaml").write_text(yaml.safe_dump(config_tree(folder)))
    return folder


def start(place: Path, run: str, *arguments: str, verb: str = "train", **env: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "jaxtrain", verb, str(place / "run.yaml"), "--run", str(place / run), *arguments]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1", **env}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def rows(place: Path, run: str) -> list[dict[str, Any]]:
    keep = ("step", "loss", "grad_norm", "learning_rate", "scored_tokens", "tokens_total", "eval_loss", "loss_scale")
    lines = (place / run / "metrics.jsonl").read_text().splitlines()
    return [{key: row[key] for key in keep if key in row} for row in map(json.loads, lines)]


@pytest.fixture(scope="module")
def unbroken(place: Path) -> list[dict[str, Any]]:
    finish(start(place, "unbroken"))
    return rows(place, "unbroken")


def test_a_run_leaves_what_it_promises(place: Path, unbroken: list[dict[str, Any]]) -> None:
    run = place / "unbroken"
    assert [row["step"] for row in unbroken] == list(range(1, UPDATES + 1))
    assert yaml.safe_load((run / "config.yaml").read_text())["train"]["steps"] == UPDATES
    assert json.loads((run / "environment.json").read_text())["packages"]["jax"]
    spec = json.loads((run / "sharding.json").read_text())["parameters"]["layers/mlp/up/weight"]
    assert spec["shape"] == [2, 32, 64]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["tokens_total"] == unbroken[-1]["tokens_total"] == sum(row["scored_tokens"] for row in unbroken)
    assert summary["eval_loss_last"] < summary["eval_loss_first"]
    assert (run / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert list((run / "tensorboard").iterdir())
    assert sorted(int(path.name) for path in (run / "checkpoints").iterdir()) == [6, 9]


@pytest.mark.parametrize(("kill_after", "asynchronous"), [(1, True), (5, False), (8, False), (8, True)])
def test_kill_and_rerun_repeats_the_unbroken_losses(
    place: Path, unbroken: list[dict[str, Any]], kill_after: int, asynchronous: bool
) -> None:
    run = f"killed-{kill_after}-{asynchronous}"
    process = start(place, run, f"--checkpoint.asynchronous={asynchronous}")
    metrics = place / run / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while not metrics.exists() or metrics.read_text().count("\n") < kill_after:
        assert process.poll() is None and time.monotonic() < deadline, "it ended before it could be killed"
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    output = finish(start(place, run))
    assert f"left by pid {process.pid} " in output, output
    if not asynchronous:
        assert re.search(r"resumed at step [36]", output), output
    assert rows(place, run) == unbroken


def test_eval_and_generate_open_the_run(
    place: Path, unbroken: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(place / "unbroken")
    assert main(["eval", run, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["step"] == UPDATES and result["eval_loss"] == pytest.approx(unbroken[-1]["eval_loss"], rel=1e-5)
    # Restored onto another mesh than it was trained on.
    assert main(["eval", run, "--mesh.tensor=2", "--rules.preset=[fsdp, tensor]"]) == 0
    printed = re.search(r"held-out loss ([\d.]+)", capsys.readouterr().out)
    assert printed and float(printed[1]) == pytest.approx(unbroken[-1]["eval_loss"], abs=1e-4)
    assert main(["generate", run, "--prompt", "def f", "--tokens", "4", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("def f")
    assert main(["generate", str(place / "corpus"), "--prompt", "x"]) == 2
    assert "is not a run" in capsys.readouterr().err


def test_a_finished_run_is_left_alone(place: Path, unbroken: list[dict[str, Any]]) -> None:
    before = (place / "unbroken" / "summary.json").read_bytes()
    assert "nothing left to train" in finish(start(place, "unbroken"))
    assert (place / "unbroken" / "summary.json").read_bytes() == before
    assert rows(place, "unbroken") == unbroken


def test_no_readable_checkpoint_is_one_message(place: Path, unbroken: list[dict[str, Any]]) -> None:
    shutil.copytree(place / "unbroken", place / "damaged")
    for path in (place / "damaged" / "checkpoints").rglob("*"):
        if path.is_file():
            path.write_bytes(b"not what was saved")
    process = start(place, "damaged", "--train.steps", "12")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2, output
    assert "no checkpoint in" in output and "step 9" in output and "step 6" in output
    assert "Traceback" not in output


def test_another_configuration_is_refused_with_the_differing_keys(place: Path, unbroken: list[dict[str, Any]]) -> None:
    process = start(place, "unbroken", "--train.seed", "7", "--model.d_ff=96")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "train.seed: 0 there, 7 now" in output and "model.d_ff: 64 there, 96 now" in output
    assert "Traceback" not in output


def test_a_second_train_on_the_directory_is_refused(
    place: Path, unbroken: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.closing(take(place / "unbroken")):
        assert main(["train", str(place / "run.yaml"), "--run", str(place / "unbroken")]) == 2
        assert f"is being trained by pid {os.getpid()} of user" in capsys.readouterr().err
        # Readers need no lease.
        assert main(["eval", str(place / "unbroken")]) == 0
    assert rows(place, "unbroken") == unbroken


def test_two_processes_train_as_one(place: Path, unbroken: list[dict[str, Any]]) -> None:
    output = finish(start(place, "two", "--processes", "2", "--devices-per-process", "1", verb="launch"))
    assert "[1] " not in output.replace("[1] [Gloo]", "")
    for got, want in zip(rows(place, "two"), unbroken, strict=True):
        assert got["scored_tokens"] == want["scored_tokens"]
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-5)
    # One process takes up what two have saved, on another mesh.
    finish(start(place, "two", "--train.steps", str(UPDATES + 1)))
    assert len(rows(place, "two")) == UPDATES + 1
