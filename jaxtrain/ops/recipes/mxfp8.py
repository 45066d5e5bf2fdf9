"""MXFP8: one scale for 32 values along the contracted dim, on Blackwell (OCP Microscaling Formats v1.0).

All operands are e4m3, and a scale is the least power of two with which its block does not overflow (Mishra et al. 2025,
arXiv:2506.08027).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxtrain.ops.recipes.recipe import Contraction, Quantized, Recipe, power_of_two

BLOCK = 32


def by_block(x: jax.Array, dims: tuple[int, ...], dtype: jnp.dtype) -> Quantized:
    """A scale for each 32 elements along the last of `dims`; the scales have that dim / 32."""
    along = dims[-1]
    blocked = x.reshape(*x.shape[:along], x.shape[along] // BLOCK, BLOCK, *x.shape[along + 1 :])
    scale = power_of_two(jnp.max(jnp.abs(blocked), axis=along + 1, keepdims=True), dtype)
    values = (blocked.astype(jnp.float32) / scale).astype(dtype)
    return Quantized(values.reshape(x.shape), scale.squeeze(along + 1))


def multiply(contraction: Contraction, left: Quantized, right: Quantized, dtype: jnp.dtype) -> jax.Array:
    """The product of operands in blocks, as the library's matmul of two matrices [rows, contracted]."""
    shape = [
        size
        for each, own in zip((left, right), contraction.dims, strict=True)
        for dim, size in enumerate(each.values.shape)
        if dim not in own
    ]
    matrices = [
        _matrix(part, own)
        for each, own in zip((left, right), contraction.dims, strict=True)
        for part in (each.values, each.scale.astype(jnp.float8_e8m0fnu))
    ]
    left_values, left_scales, right_values, right_scales = matrices
    out = jax.nn.scaled_matmul(left_values, right_values, left_scales, right_scales, preferred_element_type=dtype)
    return out.reshape(shape)


def _matrix(x: jax.Array, contracted: tuple[int, ...]) -> jax.Array:
    """x as [1, other elements, contracted elements]."""
    free = [dim for dim in range(x.ndim) if dim not in contracted]
    rows = math.prod(x.shape[dim] for dim in free)
    return x.transpose(*free, *contracted).reshape(1, rows, -1)


MXFP8 = Recipe(
    name="mxfp8",
    title="MXFP8, a scale for 32 values",
    quantize=by_block,
    matmul=multiply,
    one_scale=False,
    forward=jnp.dtype(jnp.float8_e4m3fn),
    backward=jnp.dtype(jnp.float8_e4m3fn),
    capability=(10, 0),
    multiple=BLOCK,
    xla={},
    kernels=r"__cudnn\$blockScaledDot",
)
