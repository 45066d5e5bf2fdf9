"""A run on rows that devices share, from its first line to a resume on another mesh."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxtrain.config import replace, validate
from jaxtrain.train.loop import train


def test_a_run_is_split_resumed_whole_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "corpus").mkdir()
    for i in range(20):
        (tmp_path / "corpus" / f"{i}.txt").write_text(f"the quick brown fox {i} jumps over the lazy dog\n" * 9)
    config = validate({
        "model": {"vocab_size": 300, "d_model": 16, "n_layers": 1, "n_heads": 2, "d_ff": 32, "max_seq_len": 32},
        "data": {
            "sources": [{"text": str(tmp_path / "corpus")}], "tokenizer": {"vocab_size": 300}, "seq_len": 30,
            "cache": str(tmp_path / "cache"), "held_out": 0.2,
        },
        "mesh": {"data": 2, "seq": 4},
        "train": {"steps": 2, "global_batch": 8, "sample_prompt": "the ", "sample_tokens": 4},
        "eval": {"every": 2, "batches": 1},
        "checkpoint": {"every": 2},
    })  # fmt: skip
    split = train(config, tmp_path / "split")
    said = capsys.readouterr().out
    assert "sequences are split over seq in zig-zag order, attention.context_parallel ring" in said
    assert "ring: 8 tokens of each sequence a device" in said
    assert "30 tokens do not divide and are padded to 32: 2 a sequence, 16 a step, not scored" in said
    assert split["mesh"] == {"data": 2, "seq": 4} and split["sample"].startswith("the ")
    sharding = json.loads((tmp_path / "split" / "sharding.json").read_text())
    assert sharding["batch"] == "P(None, 'data', 'seq')"
    # The same run on one axis: equal losses, then the split one goes on there.
    whole = train(replace(config, "mesh.seq=1", "mesh.data=8"), tmp_path / "whole", quiet=True)
    for key in ("loss_last", "eval_loss_first", "eval_loss_last"):
        assert split[key] == pytest.approx(whole[key], rel=1e-5), key
    assert split["tokens_total"] == whole["tokens_total"]
    resumed = train(replace(config, "mesh.seq=1", "mesh.data=8", "train.steps=3"), tmp_path / "split", quiet=True)
    assert resumed["resumed_from"] == 2 and resumed["updates"] == 3
