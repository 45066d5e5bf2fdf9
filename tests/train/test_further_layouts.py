"""A DeepSeek-like model (latent attention, a dense layer, further tokens) learns the same on any layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from runs import config_of, packed_rows, setup_of, train_on, worst_relative_error

from jaxtrain.config import ConfigError
from jaxtrain.nn.mtp import further_labels

MODEL = {
    "model": {
        "n_layers": 3, "n_heads": 4, "n_kv_heads": None, "head_dim": 8, "d_model": 32, "d_ff": 48, "vocab_size": 128,
        "max_length": 32, "mtp": 2, "mla": {"kv_rank": 16, "q_rank": 8, "rope_dim": 4, "v_dim": 12},
        "moe": {
            "experts": 8, "top_k": 2, "d_ff": 24, "shared": 1, "first_dense": 1, "router": "sigmoid_chosen",
            "groups": 4, "groups_kept": 2, "bias_rate": 0.01, "balance": "sequence", "balance_weight": 0.01,
            "z_weight": 0.001,
        },
    },
}  # fmt: skip
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "expert=2 x tensor=2 x data=2, fsdp, 2 microbatches, remat": (
        8,
        {
            "mesh": {"expert": 2, "tensor": 2}, "rules": {"preset": ["fsdp", "tensor"]}, "train": {"accumulation": 2},
            "remat": {"policy": "full"},
        },
    ),
}  # fmt: skip
BATCHES = [packed_rows(seed) for seed in range(4)]


@pytest.fixture(scope="module")
def reference() -> Any:
    return train_on(setup_of(config_of(**MODEL), devices=1), BATCHES)


@pytest.mark.parametrize("name", LAYOUTS)
def test_same_losses_and_parameters(name: str, reference: Any) -> None:
    devices, laid = LAYOUTS[name]
    metrics, state, _ = train_on(setup_of(config_of(**MODEL, **laid), devices), BATCHES)
    for got, want in zip(metrics, reference[0], strict=True):
        for key in ("loss", "mtp_loss", "grad_norm", "balance_loss"):
            assert got[key] == pytest.approx(want[key], rel=2e-5), key
        assert got["expert_load"] == want["expert_load"]
    error, path = worst_relative_error(state["params"], reference[1]["params"])
    assert error < 1e-4, path


def test_loads_of_each_depth_count_what_has_a_further_token(reference: Any) -> None:
    """Tokens with a further one at depth k visit two experts each; each stack's correction follows its own loads."""
    metrics, state, _ = reference
    segments = BATCHES[0]["segments"]
    for depth, load in zip((0, 0, 1, 2), metrics[0]["expert_load"], strict=True):
        here, further = segments[:, : 32 - depth], segments[:, depth:]
        inside = int(np.sum((here == further) & (here > 0)))
        assert sum(load) == 2 * inside
    loads = np.array([update["expert_load"] for update in metrics])
    moved = 0.01 * np.sign(loads.mean(axis=-1, keepdims=True) - loads).sum(axis=0)
    stacks = (state["params"]["layers"]["mlp"], state["params"]["mtp"]["block"]["mlp"])
    corrections = np.concatenate([stack["router"]["correction"] for stack in stacks])
    np.testing.assert_allclose(corrections, moved, atol=1e-6)
    assert np.abs(moved).max() > 0.01


def test_mean_is_over_the_labels_of_each_depth(reference: Any) -> None:
    """Born near zero, every depth predicts all tokens alike: log of the vocabulary, whatever share is scored."""
    assert reference[0][0]["mtp_loss"] == pytest.approx(np.log(128), rel=5e-3)
    labels = further_labels(BATCHES[0]["labels"], BATCHES[0]["segments"], 2)
    assert (labels[0] >= 0).sum() > (labels[1] >= 0).sum() > 0


def test_segments_of_remat_are_refused_before_anything_is_built() -> None:
    model = {**MODEL["model"], "n_layers": 4}
    with pytest.raises(ConfigError, match=r"remat\.every 2.*use remat\.every 1"):
        setup_of(config_of(model=model, remat={"policy": "full", "every": 2}))
