"""The command line: bad input (exit status 2, one message, nothing half-written), help, suggestions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxtrain.cli import main, split_overrides
from jaxtrain.cli.main import VERBS, help_of
from jaxtrain.cli.train import default_run
from jaxtrain.config import ConfigError, RunConfig, dump_config, load_config
from jaxtrain.config.suggest import SYNONYMS, setting_keys, suggest_key
from jaxtrain.train.loop import train


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
        ("--model.n_layer=3", "unknown setting model.n_layer (did you mean model.n_layers?)"),
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
        ("--data.cache=s3://bucket/cache", "data.cache is the URL s3://bucket/cache"),
        ("--data.tokenizer.path=gs://bucket/t.json", "data.tokenizer.path is the URL gs://bucket/t.json"),
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


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["train", "tiny", "--run", "s3://bucket/x"], "--run"),
        (["launch", "tiny", "--processes", "2", "--run", "gs://bucket/x"], "--run"),
        (["eval", "az://bucket/x"], "RUN"),
        (["import-hf", "folder", "s3://bucket/x"], "RUN"),
        (["export-hf", "runs/x", "hf://bucket/x"], "DIR"),
        (["tokenize", "tiny", "--out", "memory://x"], "--out"),
        (["train", "tiny", "--run", "file:///tmp/x"], "--run"),
    ],
)
def test_urls_are_no_folders(
    words: list[str], name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"jaxtrain: {name} is the URL ") and "name" in message, message
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="is the URL s3://bucket"):
        train(load_config("tiny"), Path("s3://bucket/x"))


def test_missing_config_names_the_shipped_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "configs/tinny.yaml"]) == 2
    assert "did you mean tiny.yaml?" in capsys.readouterr().err


def test_overrides_in_every_spelling() -> None:
    words = ["--mesh.data", "-1", "run.yaml", "--a.b=c d", "--json", "--rules.mlp", "null"]
    assert split_overrides(words) == (["run.yaml", "--json"], ["mesh.data=-1", "a.b=c d", "rules.mlp=null"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "no verb; verbs: train, launch"),
        ("trian tiny", "'trian' is not a verb (did you mean train?)"),
        ("train", "required: CONFIG"),
        ("train tiny --lr 3e-4", "train has no option --lr (did you mean --optimizer.learning_rate?)"),
        ("train --batch-size 4 tiny", "no option --batch-size (did you mean --train.global_batch?)"),
        ("train tiny --proceses 2", "(did you mean --processes?)"),
        ("train tiny --train.lr 1", "unknown setting train.lr (did you mean optimizer.learning_rate?)"),
        ("train tiny --trian.steps 1", "unknown setting trian.steps (did you mean train.steps?)"),
        ("train tiny --parallel.tp 2", "unknown setting parallel.tp (did you mean mesh.tensor?)"),
        ("train tiny --train.steps", "--train.steps has no value"),
        ("train tiny --train.steps --json", "--train.steps has no value"),
        ("train tiny train.steps=4", "write --train.steps=4 to override a setting"),
        ("inspect tiny tiny", "'tiny' is one argument too many"),
        ("inspect tiny --devices true", "--devices 'true': input should be a valid integer"),
        ("inspect tiny --devices", "--devices: expected one argument"),
        ("inspect tiny --cluster h100_8", "'h100_8' is unknown (did you mean h100_8x8?)"),
        ("inspect tiny --devices 8 --picture /nowhere/mesh.png", "--picture /nowhere/mesh.png cannot be written"),
        ("inspect llama3_8", "config file llama3_8 does not exist (did you mean llama3_8b"),
        ("compile tiny --target gpu", "--target 'gpu': input should be 'cuda', 'cpu' or 'tpu'"),
        ("generate runs/x", "required: --prompt"),
    ],
)
def test_a_wrong_command_line_is_one_message(capsys: pytest.CaptureFixture[str], words: str, message: str) -> None:
    assert main(words.split()) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == ""
    assert len(captured.err.splitlines()) == 1 and len(captured.err) < 250


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_every_argument_overrides_and_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.strip() == help_of(verb).strip()
    for name, field in VERBS[verb].__pydantic_fields__.items():
        assert field.description, f"{verb}.{name} has no documentation"
        assert f"--{name.replace('_', '-')}" in text or name in ("config", "run", "directory")
    assert "--optimizer.learning_rate=3e-4" in text and f"jaxtrain {verb}" in text.partition("example:")[2]
    assert ("llama3_70b_pipe" in text) == ("config" in VERBS[verb].__pydantic_fields__)
    assert max(map(len, text.splitlines())) <= 80


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {verb} " in text for verb in VERBS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("jaxtrain 0.")


def test_suggestions_name_settings_that_exist() -> None:
    keys = set(setting_keys(RunConfig))
    assert keys >= SYNONYMS.keys()
    for key, names in SYNONYMS.items():
        for name in names.split():
            assert suggest_key(name, RunConfig) == key
    assert suggest_key("data.length", RunConfig) == "data.seq_len"
    assert suggest_key("train.seq_len", RunConfig) == "data.seq_len"
    assert suggest_key("qqqqqq", RunConfig) is None


def test_a_run_directory_as_config_is_resumed(tmp_path: Path) -> None:
    run = tmp_path / "q"
    run.mkdir()
    with pytest.raises(ConfigError, match=r"q is a folder without config\.yaml"):
        load_config(run)
    (run / "config.yaml").write_text(dump_config(load_config("tiny", ["train.steps=7"])))
    (run / "environment.json").write_text("{}")
    assert load_config(run).train.steps == 7
    assert default_run(str(run)) == default_run(str(run / "config.yaml")) == run
    assert default_run("configs/tiny.yaml") == default_run("tiny") == Path("runs/tiny")


def test_the_plot_of_the_mesh(tmp_path: Path) -> None:
    assert main(["inspect", "tiny", "--devices", "8", "--picture", str(tmp_path / "mesh.png"), "--json"]) == 0
    assert (tmp_path / "mesh.png").read_bytes().startswith(b"\x89PNG")
