"""What one layout computes: gradients of every update at birth, and the updates themselves by the compiled step."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxtrain.data.packing import Batch
from jaxtrain.train.batch import place
from jaxtrain.train.setup import Setup
from jaxtrain.train.step import compile_step

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


class Bench:
    """The compiled gradients and step of one setup."""

    def __init__(self, setup: Setup, scale: float) -> None:
        self._setup, self._scale = setup, np.float32(scale)
        step, state, batch = setup.step, setup.abstract, setup.abstract_batch
        gradients = jax.jit(step.gradients).lower(state["params"], batch, self._scale)
        options = dict(setup.config.xla) or None
        with ThreadPoolExecutor(1) as other:
            compiled = other.submit(gradients.compile, options)
            self._step = compile_step(step, state, batch)
            self._gradients = compiled.result()

    def run(self, born: Tree, batches: Sequence[Batch], altered: Batch | None = None) -> Outcome:
        """Gradients at `born` and updates from it, its loss scale replaced; `altered` is batch 0 randomised."""
        start = {**born, "scaler": {**born["scaler"], "scale": self._scale}}
        state = self._place(start)
        results = [self._gradients_of(state["params"], batch) for batch in batches]
        moved = () if altered is None else _moved(self._gradients_of(state["params"], altered), results[0])
        metrics, states = [], []
        for batch in batches:
            state, values = self._step(state, self._batch(batch))
            metrics.append(jax.device_get(values))
            states.append(jax.tree.map(np.array, jax.device_get(state)))
        gradients = [jax.tree.map(lambda g: g / self._scale, gradient) for gradient, _ in results]
        return Outcome(gradients, [sums for _, sums in results], metrics, states, moved)

    def gradients(self, params: Tree, batch: Batch) -> tuple[Tree, Tree]:
        """Unscaled gradients and sums at host parameters."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self._setup.abstract["params"])
        gradient, sums = self._gradients_of(jax.device_put(params, shardings), batch)
        return jax.tree.map(lambda g: g / self._scale, gradient), sums

    def _gradients_of(self, params: Tree, batch: Batch) -> tuple[Tree, Tree]:
        return jax.device_get(self._gradients(params, self._batch(batch), self._scale))

    def _batch(self, batch: Batch) -> dict[str, jax.Array]:
        return place(batch, 0, self._setup.plan, self._setup.batch_sharding)

    def _place(self, state: Tree) -> Tree:
        # Copies: the step donates its state, and a buffer on the CPU may be the array itself.
        return jax.tree.map(
            lambda leaf, like: jax.device_put(np.array(leaf), like.sharding), state, self._setup.abstract
        )


def newborn(setup: Setup, seed: int = 0) -> Tree:
    """A state on the host in which no parameter is 0 or 1 throughout: what multiplies by such hides what it does."""
    state = jax.device_get(setup.create_state())
    rng = np.random.default_rng(seed)
    params = jax.tree.map(
        lambda leaf: (leaf + 0.05 * rng.standard_normal(leaf.shape)).astype(leaf.dtype), state["params"]
    )
    return {**state, "params": params}


def _moved(got: tuple[Tree, Tree], want: tuple[Tree, Tree]) -> tuple[str, ...]:
    gradients = jax.tree_util.tree_leaves_with_path(want[0])
    pairs = [("loss", got[1]["loss"], want[1]["loss"])]
    pairs += [
        (jax.tree_util.keystr(path, simple=True, separator="/"), a, b)
        for a, (path, b) in zip(jax.tree.leaves(got[0]), gradients, strict=True)
    ]
    return tuple(name for name, a, b in pairs if not np.array_equal(a, b))
