"""The data verb: text with borders, numbers that agree with the batches, plot and page."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from jaxtrain.cli import main
from jaxtrain.config import ConfigError, RunConfig, validate
from jaxtrain.data import preview as room
from jaxtrain.data.preview import preview, write_html


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setattr(room, "MEASURE_S", 0.2)
    for source in ("a", "b"):
        (tmp_path / source).mkdir()
        for i in range(20):
            (tmp_path / source / f"{i}.txt").write_text(f"{source}{i} says \x1b[31m red \n" * (1 + i * (source == "a")))
    lines = [json.dumps({"q": f"question {i}", "r": f"answer {i}"}) for i in range(30)]
    (tmp_path / "chat.jsonl").write_text("\n".join(lines))
    return validate({
        "model": {"vocab_size": 300},
        "data": {
            "sources": [
                {"text": str(tmp_path / "a"), "weight": 2}, {"text": str(tmp_path / "b")},
                {"jsonl": str(tmp_path / "chat.jsonl"), "prompt_field": "q", "response_field": "r", "weight": 1},
            ],
            "tokenizer": {"vocab_size": 300}, "seq_len": 64, "overlong": "drop", "cache": str(tmp_path / "cache"),
            "held_out": 0.1,
        },
        "train": {"global_batch": 8},
        "observe": {"progress": False},
    })  # fmt: skip


def test_numbers_are_those_of_the_corpus_and_the_batches(config: RunConfig) -> None:
    seen = preview(config, 3)
    report = json.loads(json.dumps(seen.to_json()))
    assert len(seen.batches) == 3 and all(batch["tokens"].shape == (8, 64) for batch in seen.batches)
    targets = seen.corpus.train.lengths - 1
    kept = targets[targets <= 64]
    assert report["tokens_an_epoch"] == sum(row["tokens_an_epoch"] for row in report["sources"]) == kept.sum()
    assert sum(row["dropped_documents"] for row in report["sources"]) == len(targets) - len(kept) > 0
    assert sum(row["dropped_tokens"] for row in report["sources"]) == targets[targets > 64].sum()
    assert [row["share_asked"] for row in report["sources"]] == [0.5, 0.25, 0.25]
    np.testing.assert_allclose([row["share_read"] for row in report["sources"]], [0.5, 0.25, 0.25], atol=0.05)
    assert 0.8 < report["fill"] <= 1 and 0.7 < report["scored"] < 1 and report["tokens_per_s"] > 0


def test_the_text_separates_documents_and_has_no_control_characters(config: RunConfig) -> None:
    seen = preview(config, 1)
    console = Console(width=200, file=io.StringIO())
    console.print(seen.render())
    plain = console.file.getvalue()
    assert "says" in plain and "padded" in plain and "[31m red" in plain and "\x1b" not in plain
    for row, segments in enumerate(seen.batches[0]["segments"]):
        spans = [str(span.style) for span in seen._sequence(seen.batches[0], row).spans]
        colours = [style.removeprefix("dim ") for style in spans if "black on" in style]
        # One colour from a document's first token to its last, another for its neighbour.
        assert len([c for c, before in zip(colours, [None, *colours], strict=False) if c != before]) == segments.max()
    every = [str(span.style) for row in range(8) for span in seen._sequence(seen.batches[0], row).spans]
    assert any(style.startswith("dim black") for style in every)  # what is not scored


def test_verb_prints_json_and_writes_plot_and_page(config: RunConfig, tmp_path: Path, capsys) -> None:
    import yaml

    from jaxtrain.config import dump_config

    (tmp_path / "run.yaml").write_text(dump_config(config))
    assert yaml.safe_load((tmp_path / "run.yaml").read_text())["data"]["overlong"] == "drop"
    files = ["--picture", str(tmp_path / "lengths.png"), "--html", str(tmp_path / "page.html")]
    assert main(["data", str(tmp_path / "run.yaml"), "--json", *files, "--data.packing", "best_fit"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["packing"] == "best_fit" and len(report["sources"]) == 3
    assert (tmp_path / "lengths.png").read_bytes()[:4] == b"\x89PNG"
    assert "batch 1" in (tmp_path / "page.html").read_text()
    assert main(["data", str(tmp_path / "run.yaml"), "--batches", "1"]) == 0
    assert "batch 1" in (out := capsys.readouterr().out) and "batch 2" not in out


def test_a_source_that_ends_early_is_shown_as_far_as_it_goes(config: RunConfig) -> None:
    sources = [source.model_copy(update={"epochs": 1}) for source in config.data.sources]
    once = config.model_copy(update={"data": config.data.model_copy(update={"sources": sources})})
    seen = preview(once, 10_000)
    assert 1 <= len(seen.batches) == seen.measured["updates"] < 100


def test_files_that_cannot_be_written_are_one_message(config: RunConfig, tmp_path: Path) -> None:
    seen = preview(config, 1)
    with pytest.raises(ConfigError, match=r"--picture .*a.nothing cannot be written"):
        seen.draw(tmp_path / "a.nothing")
    with pytest.raises(ConfigError, match=r"--html .*page.html cannot be written"):
        write_html([seen.render()], tmp_path / "nowhere" / "page.html")
