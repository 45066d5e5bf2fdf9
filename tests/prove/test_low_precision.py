"""bfloat16 losses stay near those of float32 under every layout; float16 skips steps, recovers and is restored."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxtrain.checkpoint import Checkpoints
from jaxtrain.checkpoint.order import CheckpointOrder
from jaxtrain.config import CheckpointConfig, ConfigError, RunConfig, load_config, replace
from jaxtrain.data import IGNORE
from jaxtrain.prove.batches import adversarial_batches, repack
from jaxtrain.prove.layouts import ATTENTION_LAYOUTS, DENSE, PIPELINE, SEQUENCE, parse_layout
from jaxtrain.prove.measure import StepRunner, random_state
from jaxtrain.prove.shrink import BATCH, SEQ_LEN, VOCAB, shrink
from jaxtrain.train.batch import shard_batch
from jaxtrain.train.resolve import bind
from jaxtrain.train.step import compile_step

LOSS, NORM = 2e-2, 1e-1
"""Bounds of a bfloat16 run: relative error of each of 9 losses and of each gradient norm (8 bits are 2 to 3 digits)."""
QUICK = ["data=-1, rules.preset=[zero2]", "data=2, tensor=2, rules.preset=[fsdp,tensor_sequence], train.accumulation=4"]
REST = [name for name in (*DENSE, *ATTENTION_LAYOUTS, *SEQUENCE, *PIPELINE) if name not in QUICK]


def curve(config: RunConfig, devices: int, packing: str | None = None) -> list[dict[str, float]]:
    setup = bind(config, jax.devices()[:devices])
    steps = adversarial_batches(BATCH, SEQ_LEN, VOCAB)
    repacked = [repack(step, packing, SEQ_LEN) if packing else step for step in steps]
    batches = [step.packed(setup.batch_shape.global_batch, SEQ_LEN) for step in repacked] * 3
    return StepRunner(setup, 1.0).run(random_state(setup), batches).metrics


@pytest.fixture(scope="module")
def float32() -> list[dict[str, float]]:
    return curve(parse_layout(shrink(load_config("models/llama3_8b.yaml")), "data=1", 1).config, 1)


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.prove) for name in REST)])
def test_bfloat16_stays_near_the_float32_curve(name: str, float32: list[dict[str, float]]) -> None:
    small = replace(shrink(load_config("models/llama3_8b.yaml")), "precision.compute=bfloat16")
    try:
        layout = parse_layout(small, name, 8)
        packing = layout.config.data.packing if "packing" in name else None
        # concat cuts documents at other positions, which changes them.
        got = curve(layout.config, layout.devices, packing if packing != "concat" else None)
    except ConfigError as error:
        # These kernels need a GPU; refusing any other layout of the table is a fault.
        if not name.endswith(("backend=tokamax", "backend=cudnn")):
            raise
        pytest.skip(f"refused: {error}")
    difference = 0.0
    for bf16, fp32 in zip(got, float32, strict=True):
        assert bf16["loss"] == pytest.approx(fp32["loss"], rel=LOSS)
        assert bf16["grad_norm"] == pytest.approx(fp32["grad_norm"], rel=NORM)
        assert bf16["scored_tokens"] == fp32["scored_tokens"]
        difference = max(difference, abs(bf16["loss"] - fp32["loss"]))
    assert difference > 1e-6, "nothing was computed in bfloat16"


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
