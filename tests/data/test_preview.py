"""The data verb: text with borders, numbers that agree with the batches, plot and page."""

import io
import json
import math
import re
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from jaxtrain.cli import main
from jaxtrain.config import ConfigError, RunConfig, replace, validate
from jaxtrain.data import open_stream, tokens_read
from jaxtrain.data import preview as room
from jaxtrain.data.preview import SHOWN_SEQUENCES, Preview, preview, shares_of, write_html


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
    # As many batches on a slow machine, where no more are read in MEASURE_S.
    seen = preview(config, 40)
    report = json.loads(json.dumps(seen.to_json()))
    assert len(seen.batches) == 40 and all(batch["tokens"].shape == (8, 64) for batch in seen.batches)
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


def test_borders_and_mask_are_readable_at_80_columns_without_a_terminal(config: RunConfig) -> None:
    long = "/".join([str(Path(config.data.cache).parent), "x" * 60, "y" * 60, "data[ab].jsonl"])
    Path(long).parent.mkdir(parents=True)
    Path(long).write_text("".join(json.dumps({"q": f"ask {i}", "r": "r" * 3}) + "\n" for i in range(9)))
    chats = [
        config.data.sources[2].model_dump(mode="json"),
        {"jsonl": long, "prompt_field": "q", "response_field": "r"},
    ]
    seen = preview(replace(config, f"data.sources={json.dumps(chats)}"), 1)
    console = Console(width=80, file=io.StringIO())
    console.print(seen.render())
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and not any("..." in line or "…" in line for line in lines)
    text = "".join(line.strip("│ ") for line in lines)
    assert f"1  jsonl: {long}".replace(" ", "") in text.replace(" ", "")
    rows = [line for line in lines if line.startswith("│") and "more sequences" not in line]
    body = " ".join(line.strip("│ ") for line in rows)
    shown = seen.batches[0]["segments"][:SHOWN_SEQUENCES]
    documents = int(shown.max(axis=1).sum())
    # A mark between neighbours and before the padding; every prompt in brackets, no answer in them.
    assert body.count("║") == documents - len(shown) + int((shown == 0).any(axis=1).sum())
    assert body.count("⟦") == body.count("⟧") == documents
    assert not re.search(r"⟦[^⟧]*(answer|rrr)", body) and not re.search(r"⟧[^⟦║]*(question|ask)", body)


def test_a_long_document_is_abbreviated_between_its_ends_with_its_mask(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps({"q": "begin" + "ab " * 400 + "end?", "r": "yes"}) + "\n")
    source = {"jsonl": str(tmp_path / "long.jsonl"), "prompt_field": "q", "response_field": "r"}
    long = replace(config, f"data.sources={json.dumps([source])}", "data.seq_len=2048", "data.overlong=split",
                   "data.held_out=0", "model.max_seq_len=2048")  # fmt: skip
    seen = preview(long, 1)
    text = seen._sequence(seen.batches[0], 0).plain.split(" ║ ")[0]
    assert text.startswith("0: ⟦<|bos|>beginab ab") and text.endswith("end?⟧yes<|eos|>") and len(text) < 500
    assert int(re.search(r"«([\d,]+) characters left out»", text).group(1).replace(",", "")) == 7 + 5 + 1200 + 4 - 400


def test_epochs_of_a_source_over_the_whole_run(config: RunConfig) -> None:
    assert shares_of(100, [2, 1, 1], [math.inf] * 3) == [50, 25, 25]
    assert shares_of(100, [2, 1, 1], [10, math.inf, math.inf]) == [10, 45, 45]
    assert shares_of(100, [2, 1, 1], [10, 20, math.inf]) == [10, 20, 70] and shares_of(100, [1, 1], [9, 5]) == [9, 5]
    sources = [s.model_copy(update={"epochs": 2.0 if i == 1 else None}) for i, s in enumerate(config.data.sources)]
    data = config.data.model_copy(update={"sources": sources, "overlong": "split"})
    run = config.model_copy(update={"data": data, "train": config.train.model_copy(update={"steps": 60})})
    seen = preview(run, 60)
    # The estimate agrees with what the stream reads in as many steps.
    with closing(open_stream(seen.corpus.train, run)) as stream:
        for _ in range(60):
            next(stream)
        actual = tokens_read(stream.get_state())
    report = seen.to_json()
    epochs = [tokens / row["tokens_an_epoch"] for tokens, row in zip(actual, report["sources"], strict=True)]
    np.testing.assert_allclose([row["run_epochs"] for row in report["sources"]], epochs, rtol=0.05, atol=0.2)
    assert report["sources"][1]["run_epochs"] == 2 and report["run_tokens"] == pytest.approx(sum(actual), rel=0.02)
    once = [source.model_copy(update={"epochs": 1.0}) for source in sources]
    short = run.model_copy(update={"data": data.model_copy(update={"sources": once})})
    console = Console(width=80, file=io.StringIO())
    console.print(Preview(short, seen.corpus, seen.pieces, seen.phases, [], seen.measured).render())
    assert "it will stop with an error" in " ".join(console.file.getvalue().split())


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
