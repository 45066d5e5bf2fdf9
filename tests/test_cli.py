"""Bad input: exit status 2, one message, nothing half-written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxtrain.cli import main, split_overrides


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    (tmp_path / "corpus").mkdir()
    for i in range(20):
        (tmp_path / "corpus" / f"{i}.txt").write_text(f"the quick brown fox {i} jumps over the lazy dog\n" * 4)
    tree = {
        "model": {"vocab_size": 300, "d_model": 16, "n_layers": 2, "n_heads": 2, "d_ff": 32, "max_seq_len": 32},
        "data": {
            "sources": [{"text": str(tmp_path / "corpus")}], "tokenizer": {"vocab_size": 300}, "seq_len": 32,
            "cache": str(tmp_path / "cache"),
        },
        "train": {"steps": 2, "global_batch": 8},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))

    def call(*arguments: str) -> str:
        directory = tmp_path / "out"
        status = main(["train", str(tmp_path / "run.yaml"), "--run", str(directory), *arguments])
        captured = capsys.readouterr()
        assert status == 2, captured
        assert "Traceback" not in captured.err and captured.err.startswith("jaxtrain: ")
        assert not directory.exists(), "something was written"
        return captured.err

    call.folder = tmp_path  # type: ignore[attr-defined]
    return call


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("--model.n_layer=3", "unknown setting model.n_layer (did you mean n_layers?)"),
        ("--train.steps=many", "train.steps is 'many'"),
        ("--mesh.tensor=3", "tensor 3 x seq 1 x expert 1 = 3 does not divide 8 devices"),
        ("--train.global_batch=12", "train.global_batch 12 does not divide"),
        ("--rules.preset=[tensr]", "did you mean tensor?"),
        ("--rules.mlp=tensr", "rules.mlp is 'tensr'"),
        ("--rules.experts=data", "rules.experts"),
        ("--remat.policy=names", "remat.names is empty"),
        ("--optimizer.warmup=50", "optimizer.warmup 50"),
        ("--data.virtual_shards=3", "data.virtual_shards 3 does not divide"),
        ("--data.sources=[{text: /nowhere/at/all}]", "/nowhere/at/all"),
        ("--model.n_kv_heads=3", "model.n_kv_heads 3 does not divide"),
    ],
)
def test_bad_settings(run: Any, override: str, words: str) -> None:
    assert words in run(override)


def test_learned_positions_shorter_than_rows(run: Any) -> None:
    assert "model.max_seq_len 16" in run("--model.positions", "learned", "--model.max_seq_len", "16")


def test_tokenizer_larger_than_the_embedding(run: Any) -> None:
    assert "model.vocab_size 299" in run("--model.vocab_size=299")


def test_binary_and_empty_corpus(run: Any) -> None:
    (run.folder / "corpus" / "bad.bin").write_bytes(bytes(range(256)) * 8)
    assert "bad.bin" in run()
    (run.folder / "empty").mkdir()
    assert "empty" in run(f"--data.sources=[{{text: {run.folder / 'empty'}}}]")


def test_run_directory_that_is_something_else(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (run.folder / "home").mkdir()
    (run.folder / "home" / "letter.txt").write_text("dear")
    assert main(["train", str(run.folder / "run.yaml"), "--run", str(run.folder / "home")]) == 2
    assert "is not empty and not a run" in capsys.readouterr().err
    assert [p.name for p in (run.folder / "home").iterdir()] == ["letter.txt"]


def test_missing_config_names_the_shipped_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "configs/tinny.yaml"]) == 2
    assert "did you mean tiny.yaml?" in capsys.readouterr().err


def test_overrides_in_every_spelling() -> None:
    words = ["--mesh.data", "-1", "run.yaml", "--a.b=c d", "--json", "--rules.mlp", "null"]
    assert split_overrides(words) == (["run.yaml", "--json"], ["mesh.data=-1", "a.b=c d", "rules.mlp=null"])
