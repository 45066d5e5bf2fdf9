"""Stage order of layers on a pipelined mesh, and the permutation between it and the model's order.

P stages, v chunks per stage, J layer slots per chunk. Layers of one kind are a stack of parameters: [n, ...] in the
model's (canonical) order and [P v J', ...] in stage order, where J' is the number of a chunk's layer slots of that
kind. The first dim is sharded over the pipe axis: slot j of chunk c of stage s has index (s v + c) J' + j. Where stages
hold different numbers of layers, the parameters of empty slots are zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxtrain.mesh.param import Param

Tree = Any


@dataclass(frozen=True, eq=False)
class Stages:
    """The layer in each layer slot: int32 [P, v, J], -1 where a slot is empty.

    pattern: stack of each of a chunk's J slots; stacks: stack of each layer, in the model's order.
    """

    layers: NDArray[np.int32]
    pattern: tuple[str, ...]
    stacks: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Stages, chunks, layer slots."""
        stages, chunks, slots = self.layers.shape
        return stages, chunks, slots

    @cached_property
    def rows(self) -> dict[str, NDArray[np.int32]]:
        """For each stack, the canonical index of the layer in each of its slots: [P, v, J'], -1 where empty."""
        stacks, pattern = np.array(self.stacks), np.array(self.pattern)
        found = {}
        for stack in dict.fromkeys(self.stacks):
            row_of = np.append(np.cumsum(stacks == stack) - 1, -1).astype(np.int32)
            found[stack] = row_of[self.layers[:, :, pattern == stack]]
        return found

    @cached_property
    def occupied(self) -> dict[str, NDArray[np.bool_]]:
        """Whether each slot of a stack holds a layer [P, v J']."""
        return {stack: rows.reshape(len(rows), -1) >= 0 for stack, rows in self.rows.items()}

    @property
    def identity(self) -> bool:
        """Whether stage order equals the model's order."""
        return all(np.array_equal(rows.ravel(), np.arange(rows.size)) for rows in self.rows.values())

    def to_stages(self, stack: str, leaf: jax.Array) -> jax.Array:
        """Permute [n, ...] to stage order [P v J', ...]; a stack outside the stages is returned unchanged."""
        if stack not in self.rows:
            return leaf
        flat = self.rows[stack].ravel()
        rows = jnp.take(leaf, np.maximum(flat, 0), axis=0)
        return jnp.where((flat >= 0).reshape(-1, *(1,) * (leaf.ndim - 1)), rows, jnp.zeros((), leaf.dtype))

    def to_model(self, stack: str, leaf: jax.Array) -> jax.Array:
        """The inverse of `to_stages`."""
        if stack not in self.rows:
            return leaf
        flat = self.rows[stack].ravel()
        return jnp.take(leaf, np.argsort(flat, kind="stable")[int(np.sum(flat < 0)) :], axis=0)

    def staged(self, params: Mapping[str, Tree]) -> dict[str, Tree]:
        """A model's tree of Param in stage order."""

        def resized(param: Param, rows: int) -> Param:
            return Param((rows, *param.shape[1:]), param.names)

        stacks = {
            stack: jax.tree.map(lambda param, rows=rows: resized(param, rows.size), params[stack])
            for stack, rows in self.rows.items()
        }
        return {**params, **stacks}
