"""What one layout computes: the real compiled step, run from birth on each batch and then on all in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxtrain.data.packing import HostBatch
from jaxtrain.mesh.layout import flatten_paths
from jaxtrain.mesh.param import Param
from jaxtrain.train.batch import shard_batch
from jaxtrain.train.setup import Setup
from jaxtrain.train.step import Step, compile_step

Tree = Any


@dataclass(frozen=True)
class Outcome:
    """On the host: unscaled gradients and sums of each batch at birth; metrics and state of each update.

    `moved` are gradient leaves that differ by a bit when what is masked is randomised.
    """

    gradients: list[Tree]
    sums: list[Tree]
    metrics: list[Tree]
    states: list[Tree]
    moved: tuple[str, ...] = ()


@dataclass(frozen=True)
class Watched(Step):
    """The step, whose update also gives out the gradients and sums from which it is made."""

    seen: list[tuple[Tree, Tree]] = field(default_factory=list)

    def gradients(self, params: Tree, batch: Any, scale: Any) -> tuple[Tree, Tree]:
        """The step's own, remembered while tracing."""
        self.seen.append(super().gradients(params, batch, scale))
        return self.seen[-1]

    def train_step(self, state: Tree, batch: Any) -> tuple[Tree, Tree]:
        """The step's own, with (metrics, (gradients, sums)) in place of the metrics."""
        new_state, metrics = super().train_step(state, batch)
        return new_state, (metrics, self.seen.pop())


class Bench:
    """The compiled step of one setup."""

    def __init__(self, setup: Setup, scale: float) -> None:
        self._setup, self._scale = setup, np.float32(scale)
        watched = Watched(**{part.name: getattr(setup.step, part.name) for part in fields(Step)})
        self._step = compile_step(watched, setup.abstract, setup.abstract_batch)

    def run(self, initial: Tree, batches: Sequence[HostBatch], altered: HostBatch | None = None) -> Outcome:
        """Gradients at `born` and updates from it; `altered` is batch 0 with what is masked randomised."""
        births = [self.gradients(initial, batch) for batch in batches]
        moved = () if altered is None else _moved(self.gradients(initial, altered), births[0])
        metrics, states = [], []
        state = self._start(initial)
        for batch in batches:
            state, (values, _) = self._step(state, self._batch(batch))
            metrics.append(jax.device_get(values))
            states.append(_on_host(self._setup.to_checkpoint(state)))
        return Outcome([gradient for gradient, _ in births], [sums for _, sums in births], metrics, states, moved)

    def gradients(self, initial: Tree, batch: HostBatch) -> tuple[Tree, Tree]:
        """Unscaled gradients and sums of a state on the host."""
        _, (_, seen) = self._step(self._start(initial), self._batch(batch))
        gradient, sums = seen
        ordered = {k: jax.tree.map(partial(self._setup.model.from_stack, k), part) for k, part in gradient.items()}
        gradient, sums = _on_host((ordered, sums))
        return jax.tree.map(lambda g: g / self._scale, gradient), sums

    def _batch(self, batch: HostBatch) -> dict[str, jax.Array]:
        return shard_batch(batch, 0, self._setup.batch_shape, self._setup.batch_sharding)

    def _start(self, initial: Tree) -> Tree:
        """The state on its devices, with this bench's loss scale."""
        state = {**initial, "scaler": {**initial["scaler"], "scale": self._scale}}
        # Copies: the step donates its state, and a buffer on the CPU may be the array itself.
        placed = jax.tree.map(
            lambda leaf, like: jax.device_put(np.array(leaf), like.sharding), state, self._setup.checkpoint_layout
        )
        return self._setup.from_checkpoint(placed)


def random_state(setup: Setup, seed: int = 0) -> Tree:
    """A state on the host in which no parameter is 0 or 1 throughout: what multiplies by such hides what it does.

    Weights are N(0, init_std**2), scales 1 and everything else 0, give or take N(0, 0.05**2).
    """
    rng, std = np.random.default_rng(seed), setup.config.model.init_std
    means = {"scale": (1.0, 0.05), "bias": (0.0, 0.05), "sinks": (0.0, 0.05), "correction": (0.0, 0.05)}

    def draw(path: Any, param: Param) -> np.ndarray:
        mean, spread = means.get(path[-1].key, (0.0, std))
        return (mean + spread * rng.standard_normal(param.shape)).astype(np.float32)

    return _on_host(setup.checkpoint_state_from_params(jax.tree_util.tree_map_with_path(draw, setup.canonical.params)))


def _on_host(tree: Tree) -> Tree:
    return jax.tree.map(np.array, jax.device_get(tree))


def _moved(got: tuple[Tree, Tree], want: tuple[Tree, Tree]) -> tuple[str, ...]:
    pairs = {"loss": (got[1]["loss"], want[1]["loss"])}
    have = flatten_paths(got[0])
    pairs |= {name: (have[name], leaf) for name, leaf in flatten_paths(want[0]).items()}
    return tuple(name for name, (a, b) in pairs.items() if not np.array_equal(a, b))
