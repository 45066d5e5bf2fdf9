"""A loop over chunks of tokens whose gradients of shared weights are summed in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Tree = Any
ChunkFunction = Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]
"""(float arrays of a chunk, integer arrays of a chunk, weights) -> (float results, integer results)."""


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def scan_chunks(
    step: ChunkFunction, dtype: jnp.dtype, floats: Tree, integers: Tree, weights: Tree
) -> tuple[Tree, Tree]:
    """The results of `step` for each chunk, stacked; leaves of `floats` and `integers` have the chunks as first dim.

    `dtype`: in which weights wait for the next chunk. The backward pass computes each chunk again: the transpose of
    lax.scan would save all residuals, and sum the gradients of 16-bit weights in 16 bits.
    """
    kept = jax.tree.map(lambda w: w.astype(dtype), weights)

    def one(_: None, chunk: tuple[Tree, Tree]) -> tuple[None, tuple[Tree, Tree]]:
        return None, step(*chunk, _like(kept, weights))

    return lax.scan(one, None, (floats, integers))[1]


def _forward(
    step: ChunkFunction, dtype: jnp.dtype, floats: Tree, integers: Tree, weights: Tree
) -> tuple[tuple[Tree, Tree], tuple[Tree, Tree, Tree]]:
    return scan_chunks(step, dtype, floats, integers, weights), (floats, integers, weights)


def _backward(
    step: ChunkFunction, dtype: jnp.dtype, residuals: tuple[Tree, Tree, Tree], cotangents: tuple[Tree, Tree]
) -> tuple[Tree, None, Tree]:
    floats, integers, weights = residuals
    kept = jax.tree.map(lambda w: w.astype(dtype), weights)

    def one(total: Tree, chunk: tuple[Tree, Tree, Tree]) -> tuple[Tree, Tree]:
        floats, integers, cotangent = chunk
        pull = jax.vjp(lambda f, w: step(f, integers, w)[0], floats, _like(kept, weights))[1]
        dfloats, dweights = pull(cotangent)
        return jax.tree.map(lambda t, d: t + d.astype(jnp.float32), total, dweights), dfloats

    zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights)
    total, dfloats = lax.scan(one, zeros, (floats, integers, cotangents[0]))
    return dfloats, None, _like(total, weights)


def _like(tree: Tree, like: Tree) -> Tree:
    return jax.tree.map(lambda a, b: a.astype(b.dtype), tree, like)


scan_chunks.defvjp(_forward, _backward)
