"""Readers of a run: the run holds its tokenizer, the mesh is one that this machine has, several processes may read."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_resume import config_tree, write_corpus
from tokenizers import Tokenizer

from jaxtrain.cli import main
from jaxtrain.config import validate
from jaxtrain.train.loop import train


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus, its cache and the run `run`, trained on tensor 2 x data 4."""
    folder = tmp_path_factory.mktemp("reading")
    write_corpus(folder / "corpus")
    tree = config_tree(folder)
    tree["train"] |= {"steps": 2, "accumulation": 2}
    tree |= {"mesh": {"data": 4, "tensor": 2}, "rules": {"preset": ["fsdp", "tensor"]}, "eval": {"every": None}}
    train(validate(tree), folder / "run", quiet=True)
    return folder


@pytest.fixture(scope="module")
def loss(trained: Path) -> dict[str, Any]:
    found, said = call(trained / "run", devices=8)
    assert not said
    return found


def call(run: Path, *arguments: str, devices: int = 1) -> tuple[dict[str, Any], str]:
    """`eval --json` in a process of its own; the object on stdout and the lines on stderr."""
    command = [sys.executable, "-m", "jaxtrain", "eval", str(run), "--json", *arguments]
    done = subprocess.run(
        command, env={**os.environ, "JAX_NUM_CPU_DEVICES": str(devices)}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_another_machine_chooses_a_mesh_and_says_so(trained: Path, loss: dict[str, Any]) -> None:
    found, said = call(trained / "run", devices=1)
    assert found["scored_tokens"] == loss["scored_tokens"]
    assert found["eval_loss"] == pytest.approx(loss["eval_loss"], rel=1e-5)
    assert "the run's mesh (data 4 x tensor 2) does not fit here" in said and "read on mesh data 1 of 1 devices" in said
    # Three replicas do not divide the batch: two devices are used, on the tensor axis of the run.
    found, said = call(trained / "run", devices=3)
    assert found["eval_loss"] == pytest.approx(loss["eval_loss"], rel=1e-5)
    assert "read on mesh tensor 2 of 2 devices" in said


def test_two_processes_read_one_run(trained: Path, loss: dict[str, Any]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "jaxtrain", "eval", str(trained / "run"), "--json"]
    command += ["--coordinator", f"127.0.0.1:{port}", "--processes", "2", "--process-id"]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}
    processes = [
        subprocess.Popen([*command, rank], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in ("0", "1")
    ]
    outputs = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    # Gloo writes a line of its own on stdout.
    first, second = ([line for line in out.splitlines() if "[Gloo]" not in line] for out, _ in outputs)
    assert json.loads(first[0])["eval_loss"] == pytest.approx(loss["eval_loss"], rel=1e-5)
    assert len(first) == 1 and not second and "does not fit here" not in outputs[1][1]


def test_a_changed_corpus_stops_no_reader(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "moved"
    shutil.copytree(trained, folder)
    corpus, run = folder / "corpus", str(folder / "run")
    for path in corpus.iterdir():
        path.write_text(path.read_text() + "# one line more\n")
    for number in range(200, 220):
        (corpus / f"file{number}.py").write_text("def added(x):\n    return x\n")
    shutil.rmtree(folder / "cache")
    source = f"--data.sources=[{{text: {corpus}}}]"
    capsys.readouterr()
    assert main(["eval", run, "--json", source, f"--data.cache={folder / 'cache'}"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["eval_loss"] > 0
    assert re.search(
        r"the corpus changed since step 2 was saved .*the \d+ documents that are held out now, \d+ were", err
    )
    assert len(err.splitlines()) == 1
    # Only held-out documents were tokenized.
    assert [path.name.partition("-")[2] for path in (folder / "cache" / "corpora").glob("*[!k]")] == ["held-out-0.2"]

    shutil.rmtree(corpus)
    shutil.rmtree(folder / "cache")
    assert main(["generate", run, "--prompt", "def f", "--tokens", "4", "--temperature", "0"]) == 0
    moved = capsys.readouterr().out
    assert main(["generate", str(trained / "run"), "--prompt", "def f", "--tokens", "4", "--temperature", "0"]) == 0
    assert moved == capsys.readouterr().out
    assert main(["export-hf", run, str(folder / "hf")]) == 0
    exported, held = (
        Tokenizer.from_file(str(folder / name / "tokenizer.json")).encode("def f", add_special_tokens=False).ids
        for name in ("hf", "run")
    )
    assert exported == held
    assert main(["eval", run, source]) == 2
    assert str(corpus) in capsys.readouterr().err


def test_a_lost_tokenizer_is_named_and_resolved_again_where_it_can_be(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(trained / "run", tmp_path / "run")
    words = ["generate", str(run), "--prompt", "def f", "--tokens", "2"]
    # A run of a version that held no tokenizer: the corpus still gives it.
    (run / "tokenizer.json").unlink()
    assert main(words) == 0
    (run / "tokenizer.json").write_text("{")
    assert main(words) == 0
    capsys.readouterr()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("another corpus\n" * 20)
    assert main([*words, f"--data.sources=[{{text: {tmp_path / 'text'}}}]"]) == 2
    message = capsys.readouterr().err
    assert f"{run / 'tokenizer.json'} is not the one that the run was trained with" in message
    assert "data.tokenizer.path None" not in message and "restore data.tokenizer.path" not in message
