"""Balancing without a loss: a skewed router evens out, and goes on after a restart as if there had been none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import BASE, config_of, packed_rows, setup_of

from jaxtrain.checkpoint import Checkpoints
from jaxtrain.config import CheckpointConfig, ConfigError
from jaxtrain.data import IGNORE
from jaxtrain.nn.model import build
from jaxtrain.numerics.precision import Precision
from jaxtrain.train.batch import shard_batch
from jaxtrain.train.experts import balanced, cross_domain_tokens
from jaxtrain.train.resolve import bind
from jaxtrain.train.step import compile_step

UPDATES, SAVED = 200, 120
MOE = {"experts": 8, "top_k": 2, "d_ff": 8, "router": "sigmoid_chosen", "bias_rate": 0.004}
MODEL = {**BASE["model"], "d_model": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2, "d_ff": 16, "init_std": 0.3}


def skewed(state: Any) -> Any:
    """Every token looks alike in one direction, and the router likes two experts for it."""
    params = state["params"]
    params["embed"]["tokens"] = params["embed"]["tokens"] + 0.3
    weight = params["layers"]["mlp"]["router"]["weight"]
    params["layers"]["mlp"]["router"]["weight"] = weight.at[..., 2].add(0.3).at[..., 5].add(0.2)
    return state


def test_a_skewed_router_evens_out_and_survives_a_restart_bit_for_bit(tmp_path: Path) -> None:
    config = config_of(model={**MODEL, "moe": MOE}, optimizer={"learning_rate": 1e-5, "warmup": 0})
    setup = setup_of(config, 1)
    step = compile_step(setup.step, setup.abstract, setup.abstract_batch)
    batch = shard_batch(packed_rows(0), 0, setup.batch_shape, setup.batch_sharding)
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(asynchronous=False))
    state, imbalance = skewed(setup.init_state()), []
    for update in range(UPDATES):
        if update == SAVED:
            checkpoints.save(SAVED, state, {}, {})
        state, metrics = step(state, batch)
        imbalance.append(float(metrics["imbalance"]))
    assert imbalance[0] > 2, "the task is not skewed"
    assert max(imbalance[-10:]) < 1.1
    found = checkpoints.restore(setup.abstract)
    checkpoints.close()
    assert found is not None
    again = found.state
    for _ in range(SAVED, UPDATES):
        again, metrics = step(again, batch)
    assert float(metrics["imbalance"]) == imbalance[-1]
    for got, want in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(got, want)


def test_the_bias_moves_against_the_load_and_nothing_else_moves() -> None:
    model = build(config_of(model={**MODEL, "n_layers": 2, "moe": MOE}).model)
    router = {"correction": jnp.zeros((2, 8)), "weight": jnp.ones(3)}
    params = {"layers": {"mlp": {"router": router}}, "head": jnp.ones(2)}
    load = jnp.array([[5, 1, 3, 3, 3, 3, 3, 3], [0, 8, 0, 8, 0, 8, 0, 8]])
    moved = balanced(params, model, load)
    signs = np.array([[-1, 1, 0, 0, 0, 0, 0, 0], [1, -1] * 4])
    np.testing.assert_allclose(moved["layers"]["mlp"]["router"]["correction"], 0.004 * signs)
    np.testing.assert_array_equal(moved["layers"]["mlp"]["router"]["weight"], np.ones(3))


def test_router_and_bias_stay_float32_in_a_bfloat16_run() -> None:
    config = config_of(model={**MODEL, "moe": MOE}, precision={"compute": "bfloat16"})
    tree = {"router": {"correction": jnp.ones(2)}, "up": {"weight": jnp.ones(2)}}
    cast = Precision(config.precision).cast(tree)
    assert cast["router"]["correction"].dtype == jnp.float32 and cast["up"]["weight"].dtype == jnp.bfloat16


def test_an_update_that_is_skipped_leaves_the_bias() -> None:
    setup = setup_of(config_of(model={**MODEL, "moe": MOE}), 1)
    rows = packed_rows(0)
    rows["labels"] = np.full_like(rows["labels"], IGNORE)
    step = compile_step(setup.step, setup.abstract, setup.abstract_batch)
    state, metrics = step(setup.init_state(), shard_batch(rows, 0, setup.batch_shape, setup.batch_sharding))
    assert not metrics["applied"]
    assert not np.asarray(state["params"]["layers"]["mlp"]["router"]["correction"]).any()


def test_experts_that_leave_a_domain_are_refused_unless_allowed() -> None:
    tree: dict[str, Any] = {
        "model": {**MODEL, "n_heads": 4, "moe": MOE}, "mesh": {"expert": 8}, "cluster": {"domain_size": 4},
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"spans 2 fast domains, 4 \+ 4 devices"):
        bind(config_of(**tree), jax.devices())
    tree["mesh"]["allow_cross_domain"] = ["expert"]
    setup = bind(config_of(**tree), jax.devices())
    assert setup.expert_crossings.tolist() == [[float(i // 4 != j // 4) for j in range(8)] for i in range(8)]


def test_rows_that_cross_by_hand() -> None:
    pairs = np.kron(1 - np.eye(2), np.ones((2, 2)))
    moe = {"experts": 8, "top_k": 2, "groups": 4, "top_groups": 1}
    crossed = cross_domain_tokens(config_of(model={**MODEL, "moe": moe}).model, pairs)
    assert crossed is not None
    # Of two choices half lie outside. The other domain has one of them, unless both of 4 of 8 lie inside: 6 of 28.
    assert crossed.sent == pytest.approx(1.0)
    assert crossed.once == pytest.approx(1 - 6 / 28)
    # A single group of two experts lies in the other domain half of the time.
    assert crossed.once_limited == pytest.approx(0.5)
    assert cross_domain_tokens(config_of(model={**MODEL, "moe": moe}).model, np.zeros((4, 4))) is None
