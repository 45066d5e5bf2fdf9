"""A run of every schema version resumes and is read; one of a later version, or with a removed setting, is named."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from jaxtrain.cli import main
from jaxtrain.config import SCHEMA

MESH = ["--mesh.data=1", "--mesh.tensor=2", "--mesh.seq=4"]
RUNS = Path(__file__).resolve().parents[1] / "data" / "runs"


def unpack(version: int, folder: Path) -> Path:
    with tarfile.open(RUNS / f"v{version}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / "run"


@pytest.mark.parametrize("version", range(1, SCHEMA + 1))
def test_a_run_of_every_schema_resumes(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = unpack(version, tmp_path)
    monkeypatch.chdir(tmp_path)
    before = (run / "metrics.jsonl").read_text()
    assert main(["generate", "run", "--prompt", "line", "--tokens", "2"]) == 0
    assert main(["train", "run", "--train.steps", "4", "--optimizer.learning_rate=5e-3", *MESH]) == 0
    out, err = capsys.readouterr()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["resumed_from"] == 2 and summary["steps"] == 4
    assert "is now named" not in err
    # Their positions are those of blocks in which epochs overlap.
    assert "goes on with blocks of an older version" in out
    rows = (run / "metrics.jsonl").read_text()
    assert rows.startswith(before) and len(rows.splitlines()) == 4
    assert (run / "config.yaml").read_text().startswith(f"schema: {SCHEMA}\n")
    assert (run / "tokenizer.json").is_file()


def test_what_this_version_does_not_know_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = unpack(SCHEMA, tmp_path) / "config.yaml"
    monkeypatch.chdir(tmp_path)
    text = config.read_text()
    config.write_text(text.replace(f"schema: {SCHEMA}", f"schema: {SCHEMA + 1}"))
    assert main(["train", "run", "--train.steps", "4"]) == 2
    assert f"has schema {SCHEMA + 1}, this version of jaxtrain reads 1 to {SCHEMA}" in capsys.readouterr().err
    config.write_text(text.replace("  seed: 0", "  seed: 0\n  removed_setting: 1"))
    (tmp_path / "new.yaml").write_text(text)
    assert main(["train", "new.yaml", "--run", "run", "--train.steps", "4", *MESH]) == 2
    message = capsys.readouterr().err
    assert "unknown setting train.removed_setting" in message and "use the version that wrote it" in message
