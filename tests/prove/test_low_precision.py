"""bfloat16 under every layout stays near the float32 curve; float16 skips, recovers and is restored."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxtrain.checkpoint import Checkpoints
from jaxtrain.config import CheckpointConfig, ConfigError, RunConfig, load_config, replace
from jaxtrain.data import IGNORE
from jaxtrain.prove.batches import hostile_steps, repacked
from jaxtrain.prove.layouts import BACKENDS, DENSE, PIPELINE, SEQUENCE, layout_of
from jaxtrain.prove.measure import Bench, random_state
from jaxtrain.prove.shrink import LENGTH, ROWS, VOCAB, shrink
from jaxtrain.train.batch import shard_batch
from jaxtrain.train.setup import resolve
from jaxtrain.train.step import compile_step

LOSS, NORM = 2e-2, 1e-1
"""Bounds of a bfloat16 run: relative error of each of 9 losses and of each gradient norm (8 bits are 2 to 3 digits)."""
QUICK = ["data=-1, rules.preset=[zero2]", "data=2, tensor=2, rules.preset=[fsdp,tensor_sequence], train.accumulation=4"]
REST = [name for name in (*DENSE, *BACKENDS, *SEQUENCE, *PIPELINE) if name not in QUICK]


def curve(config: RunConfig, devices: int, packing: str | None = None) -> list[dict[str, float]]:
    setup = resolve(config, jax.devices()[:devices])
    updates = hostile_steps(ROWS, LENGTH, VOCAB)
    laid = [repacked(update, packing, LENGTH) if packing else update for update in updates]
    batches = [update.packed(setup.batch_shape.global_batch, LENGTH) for update in laid] * 3
    return Bench(setup, 1.0).run(random_state(setup), batches).metrics


@pytest.fixture(scope="module")
def float32() -> list[dict[str, float]]:
    return curve(layout_of(shrink(load_config("models/llama3_8b.yaml")), "data=1", 1).config, 1)


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.prove) for name in REST)])
def test_bfloat16_stays_near_the_float32_curve(name: str, float32: list[dict[str, float]]) -> None:
    small = replace(shrink(load_config("models/llama3_8b.yaml")), "precision.compute=bfloat16")
    try:
        layout = layout_of(small, name, 8)
        packing = layout.config.data.packing if "packing" in name else None
        # Cut at other places, documents are others.
        got = curve(layout.config, layout.devices, packing if packing != "concat" else None)
    except ConfigError as error:
        # Kernels need a GPU; any other refusal of a row of the table is a fault.
        if not name.endswith(("backend=tokamax", "backend=cudnn")):
            raise
        pytest.skip(f"refused: {error}")
    differs = 0.0
    for here, there in zip(got, float32, strict=True):
        assert here["loss"] == pytest.approx(there["loss"], rel=LOSS)
        assert here["grad_norm"] == pytest.approx(there["grad_norm"], rel=NORM)
        assert here["scored_tokens"] == there["scored_tokens"]
        differs = max(differs, abs(here["loss"] - there["loss"]))
    assert differs > 1e-6, "nothing was computed in bfloat16"


def test_float16_overflow_skips_holds_the_schedule_recovers_and_is_restored(tmp_path: Path) -> None:
    small = replace(
        shrink(load_config("models/llama3_8b.yaml")),
        "precision.compute=float16", "precision.scale_init=4096", "precision.scale_growth_every=2",
        # A rate that no two updates share.
        "optimizer.schedule=linear", "optimizer.warmup=0", "train.steps=100",
    )  # fmt: skip
    before = _Run(layout_of(small, "data=2, rules.preset=[zero2], train.accumulation=2", 8).config, 2)
    state = before.setup.state_from_params(random_state(before.setup)["params"])
    state = jax.tree.map(lambda leaf, like: jax.device_put(leaf, like.sharding), state, before.setup.abstract)
    # Planted: a scale at which a cotangent of 1 is beyond float16.
    state["scaler"]["scale"] = jax.device_put(np.float32(2.0**24), before.setup.abstract["scaler"]["scale"].sharding)
    seen = []
    for _ in range(24):
        held = jax.device_get(state["params"])
        state, metrics = before.update(state)
        seen.append(metrics)
        if not metrics["applied"]:
            for got, want in zip(jax.tree.leaves(jax.device_get(state["params"])), jax.tree.leaves(held), strict=True):
                np.testing.assert_array_equal(got, want)
    assert not seen[0]["applied"], "the planted scale must overflow"
    for now, after in pairwise(seen):
        assert (after["learning_rate"] == now["learning_rate"]) == (not now["applied"])
        assert after["loss_scale"] == now["loss_scale"] / 2 or now["applied"]
    scales = [row["loss_scale"] for row in seen]
    lowest = scales.index(min(scales))
    assert max(scales[lowest:]) > scales[lowest], "the scale grows again"
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(asynchronous=False))
    checkpoints.save(1, state, {}, {})
    after = _Run(layout_of(small, "data=4, rules.preset=[fsdp]", 8).config, 4)
    found = checkpoints.restore(after.setup.abstract)
    checkpoints.close()
    assert found is not None
    for name, value in jax.device_get(state["scaler"]).items():
        assert found.state["scaler"][name] == value
    _, here = before.update(state)
    _, there = after.update(found.state)
    assert (here["loss_scale"], here["learning_rate"]) == (there["loss_scale"], there["learning_rate"])
    assert here["loss"] == pytest.approx(there["loss"], rel=1e-2)


class _Run:
    def __init__(self, config: RunConfig, devices: int) -> None:
        self.setup = resolve(config, jax.devices()[:devices])
        self._step = compile_step(self.setup.step, self.setup.abstract, self.setup.abstract_batch)
        rows = hostile_steps(ROWS, LENGTH, VOCAB)[0].packed(ROWS, LENGTH)
        assert (rows["labels"] != IGNORE).any()
        self._batch = shard_batch(rows, 0, self.setup.batch_shape, self.setup.batch_sharding)

    def update(self, state: Any) -> tuple[Any, dict[str, Any]]:
        state, metrics = self._step(state, self._batch)
        return state, {name: value.item() for name, value in jax.device_get(metrics).items()}
