"""Gradients in 16 bits are as near to float32 as 16 bits allow, leaf by leaf; float16 skips, recovers, is restored."""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.checkpoint import Checkpoints
from jaxtrain.checkpoint.order import CheckpointOrder
from jaxtrain.config import CheckpointConfig, RunConfig, load_config, replace
from jaxtrain.data import IGNORE
from jaxtrain.ops import dispatch, linear, low_precision
from jaxtrain.ops.recipes import RECIPES
from jaxtrain.prove.batches import adversarial_batches
from jaxtrain.prove.layouts import parse_layout
from jaxtrain.prove.low_precision import verify_precision
from jaxtrain.prove.measure import random_state
from jaxtrain.prove.shrink import BATCH, SEQ_LEN, VOCAB, shrink
from jaxtrain.train.batch import shard_batch
from jaxtrain.train.resolve import bind
from jaxtrain.train.step import compile_step

MODELS = ("gpt2.yaml", "models/llama3_8b.yaml", "gpt_oss_20b.yaml", "deepseek_v3.yaml")


ACCUMULATED = "data=4, rules.preset=[fsdp], train.accumulation=2, remat.policy=full"


def failures(name: str, layouts: str = "data=1", precision: str = "bfloat16") -> list[str]:
    """The leaves, or errors, that fail a layout each; nothing else than passing and failing happens."""
    report = verify_precision(load_config(name), precision, layouts, jax.devices())
    assert len(report.results) == len(layouts.split(";")) and not report.counts["refused"], report.results
    return [f"{r.failure.kind} {r.failure.leaf}" if r.failure else r.reason for r in report.faults]


@pytest.mark.parametrize(
    ("name", "layouts", "precision"),
    [
        ("models/llama3_8b.yaml", ACCUMULATED, "float8"),
        ("gpt_oss_20b.yaml", "expert=2, rules.preset=[fsdp]", "bfloat16"),
    ],
)
def test_no_leaf_is_twice_as_far_from_float32_as_an_ideal_step(name: str, layouts: str, precision: str) -> None:
    assert failures(name, layouts, precision) == []


@pytest.mark.prove
@pytest.mark.parametrize("name", MODELS)
def test_no_layout_loses_precision(name: str) -> None:
    no_layout_fails(name, "bfloat16")


@pytest.mark.prove
@pytest.mark.parametrize(
    ("name", "recipe"), [*product(["models/llama3_8b.yaml"], RECIPES), ("deepseek_v3.yaml", "float8")]
)
def test_no_layout_changes_what_a_recipe_computes(name: str, recipe: str) -> None:
    no_layout_fails(name, recipe)


def no_layout_fails(name: str, precision: str) -> None:
    report = verify_precision(load_config(name), precision, "all", jax.devices())
    assert report.passed, report.faults
    assert report.counts["passed"] >= 12


@pytest.mark.prove
def test_float16_is_as_near_as_it_can_be() -> None:
    assert failures("models/llama3_8b.yaml", "data=4, rules.preset=[fsdp]", "float16") == []


def _sum_chunks_in_16_bits(step: Any, dtype: Any, floats: Any, integers: Any, weights: Any) -> Any:
    narrow = jax.tree.map(lambda w: w.astype(dtype), weights)
    return jax.lax.scan(lambda _, chunk: (None, step(*chunk, narrow)), None, (floats, integers))[1]


PLANTED: dict[str, tuple[str, list[tuple[Any, str, Any]], str]] = {
    # Name: model, replaced functions, the leaf that must be named.
    "tables": ("gpt2.yaml", [(linear, "_lookup", lambda t, i, d, s: t.astype(d)[i])], "gradient embed/"),
    "biases": ("gpt2.yaml", [(linear, "_add_bias", lambda x, b: x + b.astype(x.dtype))], "/bias"),
    "biases of experts": (
        "gpt_oss_20b.yaml", [(dispatch, "add_group_bias", lambda y, b, g: y + b.astype(y.dtype)[g])], "/bias",
    ),
    "experts in chunks": (
        "gpt_oss_20b.yaml",
        [(dispatch, "BUFFER_BYTES", 2**13), (dispatch, "scan_chunks", _sum_chunks_in_16_bits)], "layers/mlp/",
    ),
}  # fmt: skip


@pytest.mark.prove
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_sum_in_16_bits_is_reported(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, replaced, leaf = PLANTED[fault]
    for module, attribute, value in replaced:
        monkeypatch.setattr(module, attribute, value)
    [failure] = failures(name)
    assert leaf in failure


@pytest.mark.prove
def test_a_planted_second_rounding_of_gathered_weights_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded(weight: Any, gathered: Any) -> Any:
        # The ideal step gathers nothing.
        return weight if gathered is None else weight._replace(
            values=weight.values.astype(jnp.float8_e5m2).astype(weight.values.dtype)
        )  # fmt: skip

    monkeypatch.setattr(low_precision, "_gather", rounded)
    [failure] = failures("models/llama3_8b.yaml", ACCUMULATED, "float8")
    assert failure.startswith("rounding")


@pytest.mark.prove
def test_chunks_of_experts_are_summed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "BUFFER_BYTES", 2**13)
    assert failures("gpt_oss_20b.yaml") == []


def test_float16_overflow_skips_steps_keeps_the_schedule_recovers_and_is_restored(tmp_path: Path) -> None:
    small = replace(
        shrink(load_config("models/llama3_8b.yaml")),
        "precision.compute=float16", "precision.scale_init=4096", "precision.scale_growth_every=2",
        # A learning rate that differs in every step.
        "optimizer.schedule=linear", "optimizer.warmup=0", "train.steps=100",
    )  # fmt: skip
    before = _Run(parse_layout(small, "data=2, rules.preset=[zero2], train.accumulation=2", 8).config, 2)
    state = CheckpointOrder(before.setup).state_from_params(random_state(before.setup)["params"])
    state = jax.tree.map(lambda leaf, like: jax.device_put(leaf, like.sharding), state, before.setup.abstract)
    # With this scale a cotangent of 1 overflows float16.
    state["scaler"]["scale"] = jax.device_put(np.float32(2.0**24), before.setup.abstract["scaler"]["scale"].sharding)
    rows = []
    for _ in range(24):
        held = jax.device_get(state["params"])
        state, metrics = before.step(state)
        rows.append(metrics)
        if not metrics["applied"]:
            for got, want in zip(jax.tree.leaves(jax.device_get(state["params"])), jax.tree.leaves(held), strict=True):
                np.testing.assert_array_equal(got, want)
    assert not rows[0]["applied"], "the initial scale must overflow"
    for now, then in pairwise(rows):
        assert (then["learning_rate"] == now["learning_rate"]) == (not now["applied"])
        assert then["loss_scale"] == now["loss_scale"] / 2 or now["applied"]
    scales = [row["loss_scale"] for row in rows]
    lowest = scales.index(min(scales))
    assert max(scales[lowest:]) > scales[lowest], "the scale grows again"
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(asynchronous=False))
    checkpoints.save(1, state, {}, {})
    after = _Run(parse_layout(small, "data=4, rules.preset=[fsdp]", 8).config, 4)
    found = checkpoints.restore(after.setup.abstract)
    checkpoints.close()
    assert found is not None
    for name, value in jax.device_get(state["scaler"]).items():
        assert found.state["scaler"][name] == value
    _, got = before.step(state)
    _, restored = after.step(found.state)
    assert (got["loss_scale"], got["learning_rate"]) == (restored["loss_scale"], restored["learning_rate"])
    assert got["loss"] == pytest.approx(restored["loss"], rel=1e-2)


class _Run:
    def __init__(self, config: RunConfig, devices: int) -> None:
        self.setup = bind(config, jax.devices()[:devices])
        self._train_step = compile_step(self.setup.step, self.setup.abstract, self.setup.abstract_batch)
        batch = adversarial_batches(BATCH, SEQ_LEN, VOCAB)[0].packed(BATCH, SEQ_LEN)
        assert (batch["labels"] != IGNORE).any()
        self._batch = shard_batch(batch, 0, self.setup.batch_shape, self.setup.batch_sharding)

    def step(self, state: Any) -> tuple[Any, dict[str, Any]]:
        state, metrics = self._train_step(state, self._batch)
        return state, {name: value.item() for name, value in jax.device_get(metrics).items()}
