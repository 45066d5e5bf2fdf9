"""16-bit weights with float32 gradients.

A gradient has the dtype of what is differentiated: that of a bfloat16 weight would be rounded, and be sent between
devices in bfloat16. A `WideWeight` has a float32 operand beside the weight, which nothing reads and which takes the
gradient: it is zeros, so that the compiler removes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WideWeight:
    """A weight in the compute dtype, and the float32 array of its shape that takes its gradient."""

    weight: jax.Array
    carrier: jax.Array

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the weight."""
        return self.weight.dtype


def operand(weights: Tree, wide: bool) -> Tree:
    """What to differentiate by: float32 zeros in the shapes of `weights` if `wide`, else the weights."""
    return jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights) if wide else weights


def weights_of(operand: Tree, weights: Tree, wide: bool) -> Tree:
    """The weights as a function of `operand(weights, wide)`, for the model: WideWeights if `wide`."""
    return jax.tree.map(WideWeight, weights, operand) if wide else operand


def widen(tree: Tree) -> Tree:
    """Float32 arrays with the values of the WideWeights of a tree; other leaves as they are.

    Where they are used they are cast to the compute dtype, which is exact.
    """

    def one(leaf: Any) -> Any:
        return _join(leaf.weight, leaf.carrier) if isinstance(leaf, WideWeight) else leaf

    return jax.tree.map(one, tree, is_leaf=lambda leaf: isinstance(leaf, WideWeight))


@jax.custom_vjp
def _join(weight: jax.Array, carrier: jax.Array) -> jax.Array:
    return weight.astype(jnp.float32)


def _join_forward(weight: jax.Array, carrier: jax.Array) -> tuple[jax.Array, jax.Array]:
    return weight.astype(jnp.float32), jnp.zeros((), weight.dtype)


def _join_backward(like: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.zeros(cotangent.shape, like.dtype), cotangent


_join.defvjp(_join_forward, _join_backward)
