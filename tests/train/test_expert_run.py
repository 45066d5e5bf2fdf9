"""A whole run of a small mixture: what it writes of its experts, and that the printed costs are there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.config import ConfigError, validate
from jaxtrain.train.loop import train
from jaxtrain.train.resolve import bind


def test_a_run_records_and_draws_what_its_experts_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "corpus").mkdir()
    for i in range(20):
        (tmp_path / "corpus" / f"{i}.txt").write_text(f"the quick brown fox {i} jumps over the lazy dog\n" * 9)
    moe = {"experts": 8, "top_k": 2, "d_ff": 16, "balance_weight": 0.01, "bias_rate": 0.01, "buffer": 0.5}
    config = validate({
        "model": {
            "vocab_size": 300, "d_model": 16, "n_layers": 2, "n_heads": 2, "d_ff": 32, "max_seq_len": 32, "moe": moe,
        },
        "data": {
            "sources": [{"text": str(tmp_path / "corpus")}], "tokenizer": {"vocab_size": 300}, "seq_len": 32,
            "cache": str(tmp_path / "cache"), "held_out": 0.2,
        },
        "mesh": {"expert": 4},
        "train": {"steps": 3, "global_batch": 8, "sample_prompt": "the ", "sample_tokens": 4},
        "eval": {"every": 2, "batches": 1},
    })  # fmt: skip
    result = train(config, tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    for row in rows:
        load = np.array(row["expert_load"])
        assert load.shape == (2, 8)
        assert (load.sum(axis=1) == round(row["fill"] * 8 * 32) * 2).all(), "each token of a document chose two experts"
        assert row["imbalance"] == pytest.approx((load.max(axis=1) / load.mean(axis=1)).max())
        # At most every choice of both layers left its device; 64 bytes a row, there and back, forward and backward.
        assert 0 < row["expert_bytes"] <= load.sum() * 64 * 4 and row["expert_crossing_share"] == 0
        assert row["dropped"] == 0
    said = capsys.readouterr().out
    assert "counts the load of experts in a forward pass" in said
    lost = sum(row["overflowed"] for row in rows)
    assert lost > 0 and "did not fit the receive buffer" in said, "half an even share cannot hold all"
    assert (tmp_path / "run" / "experts.png").stat().st_size > 10_000
    assert str(result["experts_picture"]).endswith("experts.png")


def test_capacity_and_buffer_exclude_each_other() -> None:
    moe = {"experts": 8, "capacity": 1.0, "buffer": 1.0}
    config = validate({"model": {"n_layers": 1, "moe": moe}, "data": {"tokenizer": {"vocab_size": 300}}})
    with pytest.raises(ConfigError, match=r"model\.moe\.buffer 1\.0 has no effect .* model\.moe\.capacity 1\.0"):
        bind(config)
