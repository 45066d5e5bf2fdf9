"""`verify` can fail: each fault that is planted in the training code is reported.

The trainer has no dropout, so there is no fault of shared dropout keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from jaxtrain import optim
from jaxtrain.config import load_config
from jaxtrain.data import IGNORE
from jaxtrain.data.packing import fill
from jaxtrain.mesh.constraints import active_axes
from jaxtrain.mesh.shard_map import shard_mapped
from jaxtrain.nn.model import Model
from jaxtrain.numerics.counter import counter_add
from jaxtrain.numerics.precision import Precision
from jaxtrain.ops import attention, linear
from jaxtrain.prove.shrink import shrink
from jaxtrain.prove.verify import LayoutResult, Verifier
from jaxtrain.train import step as step_module
from jaxtrain.train.batch import shard_batch
from jaxtrain.train.step import Step

Plant = Callable[[pytest.MonkeyPatch], None]
ONE, TWO_MICROBATCHES = "data=1", "data=1, train.accumulation=2"
REPLICAS, TENSOR = "data=2", "data=1, tensor=2, rules.preset=[tensor]"


def in_train_step(change: Callable[[pytest.MonkeyPatch, Step, Any], None]) -> Plant:
    """A fault that depends on the step or its state, planted while train_step is traced."""
    real = Step.train_step

    def plant(patch: pytest.MonkeyPatch) -> None:
        def train_step(self: Step, state: Any, batch: Any) -> Any:
            with pytest.MonkeyPatch.context() as inner:
                change(inner, self, state)
                return real(self, state, batch)

        patch.setattr(Step, "train_step", train_step)

    return plant


def mean_of_means(patch: pytest.MonkeyPatch) -> None:
    real = Step._objective

    def objective(self: Step, weights: Any, batch: Any, totals: Any, scale: Any) -> Any:
        scored = jnp.maximum(jnp.sum(batch["labels"] != IGNORE), 1) * self.config.train.accumulation
        return real(self, weights, batch, {**totals, "scored": scored}, scale)

    patch.setattr(Step, "_objective", objective)


def mean_over_replicas(patch: pytest.MonkeyPatch) -> None:
    real = Step._reduce
    patch.setattr(Step, "_reduce", lambda self, gradient: real(self, gradient) / gradient.shape[0])


def bfloat16_all_reduce(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Precision, "reduce", property(lambda self: jnp.dtype("bfloat16")))


def down_projection(reduce: Callable[[jax.Array, Any], jax.Array]) -> Plant:
    real = linear.contract

    def plant(patch: pytest.MonkeyPatch) -> None:
        def contract(equation: str, x: jax.Array, w: jax.Array) -> jax.Array:
            axes = active_axes("mlp")
            if not axes or equation != "BLF,FD->BLD":
                return real(equation, x, w)
            specs = (PartitionSpec(None, None, axes), PartitionSpec(axes))
            body = shard_mapped(lambda x, w: reduce(jnp.einsum(equation, x, w), axes), specs, PartitionSpec())
            return body(x, w)

        patch.setattr(linear, "contract", contract)

    return plant


def microbatches(body_of: Callable[[Any], Any], inputs_of: Callable[[Any], Any] = lambda xs: xs) -> Plant:
    real = step_module._scan

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(step_module, "_scan", lambda body, carry, xs: real(body_of(body), carry, inputs_of(xs)))

    return plant


def in_bfloat16(body: Any) -> Any:
    def rounded(carry: Any, x: Any) -> Any:
        carry, out = body(carry, x)
        return jax.tree.map(lambda t: t.astype(jnp.bfloat16).astype(jnp.float32), carry), out

    return rounded


def without_the_last(xs: Any) -> Any:
    return jax.tree.map(lambda x: x[:-1] if x.shape[0] > 1 else x, xs)


def auxiliary_loss(of_microbatch: Callable[[jax.Array, jax.Array], jax.Array]) -> Plant:
    real = Model.hidden

    def plant(patch: pytest.MonkeyPatch) -> None:
        def hidden(self: Model, params: Any, tokens: Any, positions: Any, segments: Any, *rest: Any) -> Any:
            x_BLD, stats = real(self, params, tokens, positions, segments, *rest)
            return x_BLD, {**stats, "objective": 1e-2 * of_microbatch(jnp.square(x_BLD).mean(-1), segments > 0)}

        patch.setattr(Model, "hidden", hidden)

    return plant


def leaking_mask(patch: pytest.MonkeyPatch) -> None:
    real = attention.attend

    def attend(q: Any, k: Any, v: Any, segments: Any, *rest: Any, **named: Any) -> Any:
        return real(q, k, v, jnp.minimum(segments, 1), *rest, **named)

    patch.setattr(attention, "attend", attend)


def batches(change: Callable[[dict[str, np.ndarray]], None]) -> Plant:
    def faulty(*arguments: Any) -> Any:
        batch = fill(*arguments)
        change(batch)
        return batch

    return lambda patch: patch.setattr("jaxtrain.prove.batches.fill", faulty)


def label_of_the_next_document(batch: dict[str, np.ndarray]) -> None:
    segments = batch["segments"]
    last = (segments[:, :-1] != segments[:, 1:]) & (segments[:, 1:] > 0)
    batch["labels"][:, :-1][last] = batch["tokens"][:, 1:][last]


def positions_not_reset(batch: dict[str, np.ndarray]) -> None:
    batch["positions"][:] = np.arange(batch["positions"].shape[1])


def replicas_read_the_same_sequences(patch: pytest.MonkeyPatch) -> None:
    def faulty(batch: Any, first: int, shape: Any, sharding: Any) -> Any:
        same = {
            name: np.concatenate([field[: len(field) // shape.replicas]] * shape.replicas)
            for name, field in batch.items()
        }
        return shard_batch(same, first, shape, sharding)

    patch.setattr("jaxtrain.prove.measure.shard_batch", faulty)


def all_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Step, "totals", lambda self, batch: {"scored": jnp.int32(batch["labels"].size)})


FAULTS: dict[str, tuple[Plant, str, str]] = {
    "mean of means over microbatches": (mean_of_means, TWO_MICROBATCHES, "gradient"),
    "mean over replicas": (mean_over_replicas, REPLICAS, "gradient"),
    "bfloat16 between replicas": (bfloat16_all_reduce, REPLICAS, "gradient"),
    "missing reduction over tensor": (down_projection(lambda x, axes: x), TENSOR, "gradient"),
    "doubled reduction over tensor": (
        down_projection(lambda x, axes: lax.psum(lax.psum(x, axes), axes)), TENSOR, "gradient",
    ),
    "accumulator in bfloat16": (microbatches(in_bfloat16), TWO_MICROBATCHES, "gradient"),
    "last microbatch dropped": (microbatches(lambda body: body, without_the_last), TWO_MICROBATCHES, "gradient"),
    "auxiliary loss averaged per microbatch": (
        auxiliary_loss(lambda x, real: jnp.sum(x * real) / jnp.maximum(jnp.sum(real), 1)), TWO_MICROBATCHES, "gradient",
    ),
    "padding in an auxiliary loss": (auxiliary_loss(lambda x, real: jnp.sum(x) / 512), ONE, "gradient"),
    "unscored tokens in the mean": (all_counts, ONE, "gradient"),
    "mask leaks between segments": (leaking_mask, ONE, "gradient"),
    "label of the next document": (batches(label_of_the_next_document), ONE, "gradient"),
    "positions not reset": (batches(positions_not_reset), ONE, "gradient"),
    "replicas read the same sequences": (replicas_read_the_same_sequences, REPLICAS, "gradient"),
    "norm counts replicas": (
        in_train_step(lambda patch, step, state: patch.setattr(
            step_module, "global_norm", lambda tree: optim.global_norm(tree) * math.sqrt(step.mesh.size)
        )), REPLICAS, "metric",
    ),
    "clipped before unscaled": (
        in_train_step(lambda patch, step, state: patch.setattr(
            step_module, "clip_scale",
            lambda norm, limit: optim.clip_scale(norm * state["scaler"]["scale"], limit),
        )), ONE, "moment",
    ),
    "schedule counts microbatches": (
        in_train_step(lambda patch, step, state: patch.setattr(
            step_module, "learning_rate",
            lambda config, total, steps, tokens: optim.learning_rate(
                config, total, steps * step.config.train.accumulation, tokens
            ),
        )), TWO_MICROBATCHES, "metric",
    ),
    "tokens counted once a replica": (
        in_train_step(lambda patch, step, state: patch.setattr(
            step_module, "counter_add", lambda counter, n: counter_add(counter, n * step.mesh.size)
        )), REPLICAS, "metric",
    ),
    "weight decay on norms": (
        lambda patch: patch.setattr(optim, "decay_mask", lambda params: optim._map(lambda _: True, params)),
        ONE, "parameter",
    ),
    "no weight decay": (
        lambda patch: patch.setattr(optim.optax, "add_decayed_weights", lambda rate, mask: optim.optax.identity()),
        ONE, "parameter",
    ),
}  # fmt: skip


# RoPE depends on distances only, so positions that are not reset change nothing there.
MODELS = {"positions not reset": ["models/gpt2.yaml"]}


# Planted by `make prove` only.
SLOW = {
    "bfloat16 between replicas", "last microbatch dropped", "padding in an auxiliary loss",
    "unscored tokens in the mean", "replicas read the same sequences", "tokens counted once a replica",
    "no weight decay",
}  # fmt: skip


def verdicts(layout: str, model: str = "models/llama3_8b.yaml") -> list[LayoutResult]:
    verifier = Verifier(shrink(load_config(model)), jax.devices()[:2])
    result = verifier.run(verifier.compile(layout))
    return [result, verifier.check_adamw()] if result.status == "passed" else [result]


@pytest.mark.parametrize("layout", [ONE, TWO_MICROBATCHES, REPLICAS, TENSOR])
def test_without_a_fault_all_pass(layout: str) -> None:
    assert [result.status for result in verdicts(layout)] == ["passed"] * 2


@pytest.mark.parametrize("fault", [pytest.param(f, marks=[pytest.mark.prove] if f in SLOW else []) for f in FAULTS])
def test_a_planted_fault_is_reported(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, layout, kind = FAULTS[fault]
    plant(monkeypatch)
    check = verdicts(layout, *MODELS.get(fault, []))[-1].failure
    assert check is not None, "verify let it pass"
    assert check.kind == kind and check.error > 10 * check.bound, check
