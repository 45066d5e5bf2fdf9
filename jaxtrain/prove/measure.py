"""Run the compiled step of one layout: gradients of each batch at the initial state, then chained steps over all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxtrain.checkpoint.order import CheckpointOrder
from jaxtrain.data.packing import HostBatch
from jaxtrain.mesh.layout import flatten_paths
from jaxtrain.mesh.param import Param
from jaxtrain.train.batch import shard_batch
from jaxtrain.train.resolve import Bound
from jaxtrain.train.step import Step, compile_step

Tree = Any


@dataclass(frozen=True)
class Outcome:
    """Host arrays: unscaled gradients and sums of each batch at the initial state; metrics and state of each step.

    `mask_leaks` are the gradient leaves that change by any bit when masked inputs are randomised.
    """

    gradients: list[Tree]
    sums: list[Tree]
    metrics: list[Tree]
    states: list[Tree]
    mask_leaks: tuple[str, ...] = ()


@dataclass(frozen=True)
class RecordingStep(Step):
    """The training step, which also returns the gradients and sums that it uses."""

    recorded: list[tuple[Tree, Tree]] = field(default_factory=list)

    def gradients(self, params: Tree, batch: Any, scale: Any) -> tuple[Tree, Tree]:
        """`Step.gradients`, recorded while it is traced."""
        self.recorded.append(super().gradients(params, batch, scale))
        return self.recorded[-1]

    def train_step(self, state: Tree, batch: Any) -> tuple[Tree, Tree]:
        """`Step.train_step` with (metrics, (gradients, sums)) in place of the metrics."""
        new_state, metrics = super().train_step(state, batch)
        return new_state, (metrics, self.recorded.pop())


class StepRunner:
    """The compiled step of one setup, run on host batches from host states."""

    def __init__(self, setup: Bound, loss_scale: float) -> None:
        self._setup, self._loss_scale, self._order = setup, np.float32(loss_scale), CheckpointOrder(setup)
        recording = RecordingStep(**{part.name: getattr(setup.step, part.name) for part in fields(Step)})
        self._step = compile_step(recording, setup.abstract, setup.abstract_batch)

    def run(self, initial: Tree, batches: Sequence[HostBatch], randomized: HostBatch | None = None) -> Outcome:
        """Gradients at `initial` and chained steps from it; `randomized` is batch 0 with masked inputs randomised."""
        results = [self.gradients(initial, batch) for batch in batches]
        leaks = () if randomized is None else _changed_leaves(self.gradients(initial, randomized), results[0])
        metrics, states = [], []
        state = self._to_devices(initial)
        for batch in batches:
            state, (values, _) = self._step(state, self._shard(batch))
            metrics.append(jax.device_get(values))
            states.append(_on_host(self._order.to_model_order(state)))
        return Outcome([gradient for gradient, _ in results], [sums for _, sums in results], metrics, states, leaks)

    def gradients(self, initial: Tree, batch: HostBatch) -> tuple[Tree, Tree]:
        """Unscaled gradients and sums of a batch at a host state."""
        _, (_, recorded) = self._step(self._to_devices(initial), self._shard(batch))
        gradient, sums = recorded
        ordered = {k: jax.tree.map(partial(self._setup.model.from_stack, k), part) for k, part in gradient.items()}
        gradient, sums = _on_host((ordered, sums))
        return jax.tree.map(lambda g: g / self._loss_scale, gradient), sums

    def _shard(self, batch: HostBatch) -> dict[str, jax.Array]:
        return shard_batch(batch, 0, self._setup.batch_shape, self._setup.batch_sharding)

    def _to_devices(self, initial: Tree) -> Tree:
        """The sharded state, with this runner's loss scale."""
        state = {**initial, "scaler": {**initial["scaler"], "scale": self._loss_scale}}
        # Copies: the step donates its state, and a CPU buffer may share the array's memory.
        sharded = jax.tree.map(
            lambda leaf, like: jax.device_put(np.array(leaf), like.sharding), state, self._order.model_order
        )
        return self._order.from_model_order(sharded)


def random_state(setup: Bound, seed: int = 0) -> Tree:
    """A host state in which no parameter is 0 or 1 throughout, since such a factor would hide errors.

    Weights are N(0, init_std**2); scales are N(1, 0.05**2); biases, sinks and corrections are N(0, 0.05**2).
    """
    rng, std = np.random.default_rng(seed), setup.config.model.init_std
    means = {"scale": (1.0, 0.05), "bias": (0.0, 0.05), "sinks": (0.0, 0.05), "correction": (0.0, 0.05)}

    def draw(path: Any, param: Param) -> np.ndarray:
        mean, spread = means.get(path[-1].key, (0.0, std))
        return (mean + spread * rng.standard_normal(param.shape)).astype(np.float32)

    return _on_host(CheckpointOrder(setup).initial(jax.tree_util.tree_map_with_path(draw, setup.canonical.params)))


def _on_host(tree: Tree) -> Tree:
    return jax.tree.map(np.array, jax.device_get(tree))


def _changed_leaves(got: tuple[Tree, Tree], want: tuple[Tree, Tree]) -> tuple[str, ...]:
    """Names of the gradients that are not bitwise equal, and "loss" if it is not."""
    pairs = {"loss": (got[1]["loss"], want[1]["loss"])}
    have = flatten_paths(got[0])
    pairs |= {name: (have[name], leaf) for name, leaf in flatten_paths(want[0]).items()}
    return tuple(name for name, (a, b) in pairs.items() if not np.array_equal(a, b))
