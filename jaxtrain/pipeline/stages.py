"""Where layers live on a pipelined mesh: stage order, and the way from and to the order of the model.

P stages, v chunks a stage, J places for layers in a chunk. A parameter of stacked layers is [n_layers, ...] in the
model's (canonical) order and [P v J, ...] in stage order, whose first dim is cut over the pipe axis: place j of chunk c
of stage s is row (s v + c) J + j. Where stages hold different numbers of layers, rows that hold none are zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxtrain.mesh.param import Param

Tree = Any
LAYERS = "layers"
"""The logical name of a stack's first dim, and the stack's name among a model's parameters."""


@dataclass(frozen=True, eq=False)
class Stages:
    """Which layer lies at which place: int32 [P, v, J], -1 where a place is empty."""

    layers: NDArray[np.int32]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Stages, chunks, places."""
        stages, chunks, places = self.layers.shape
        return stages, chunks, places

    @cached_property
    def real(self) -> NDArray[np.bool_]:
        """Which places hold a layer [P, v J]."""
        return self.layers.reshape(len(self.layers), -1) >= 0

    @cached_property
    def identity(self) -> bool:
        """Whether stage order is the model's own order."""
        flat = self.layers.ravel()
        return bool(np.array_equal(flat, np.arange(flat.size)))

    def to_stages(self, leaf: jax.Array) -> jax.Array:
        """[n_layers, ...] -> [P v J, ...]."""
        if self.identity:
            return leaf
        flat = self.layers.ravel()
        rows = jnp.take(leaf, np.maximum(flat, 0), axis=0)
        return jnp.where((flat >= 0).reshape(-1, *(1,) * (leaf.ndim - 1)), rows, jnp.zeros((), leaf.dtype))

    def to_model(self, leaf: jax.Array) -> jax.Array:
        """[P v J, ...] -> [n_layers, ...]."""
        if self.identity:
            return leaf
        flat = self.layers.ravel()
        return jnp.take(leaf, np.argsort(flat, kind="stable")[int(np.sum(flat < 0)) :], axis=0)

    def staged(self, params: Tree) -> Tree:
        """A tree of Param in stage order."""

        def one(param: Param) -> Param:
            rows = (self.layers.size, *param.shape[1:]) if param.names[:1] == (LAYERS,) else param.shape
            return Param(rows, param.names)

        return jax.tree.map(one, params)
