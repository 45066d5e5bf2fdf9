"""What an 8-bit recipe is: data, how it quantizes an operand, and how it multiplies two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.mesh.constraints import over_replicas


class Quantized(NamedTuple):
    """An operand in 8 bits: values, and float32 scales that broadcast against them, each a power of two.

    The operand is values x scale. The scale of a power of two changes no digit of a value, so that operands that
    different microbatches or replicas scale differently still have the same values, but for those near zero.
    """

    values: jax.Array
    scale: jax.Array


@dataclass(frozen=True)
class Contraction:
    """An equation "left,right->out" whose output has the free dims of left, then those of right."""

    equation: str

    @property
    def dims(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The contracted dims of both operands, in the same order."""
        left, right = self.operands
        shared = [name for name in left if name in right]
        return tuple(left.index(name) for name in shared), tuple(right.index(name) for name in shared)

    @property
    def operands(self) -> tuple[str, str]:
        """The dims of left and of right."""
        left, right = self.equation.split("->")[0].split(",")
        return left, right

    @property
    def out(self) -> str:
        """The dims of the output."""
        return self.equation.split("->")[1]

    @property
    def by_left(self) -> Contraction:
        """The gradient of left, from the cotangent and right."""
        left, right = self.operands
        return Contraction(f"{self.out},{right}->{left}")

    @property
    def by_right(self) -> Contraction:
        """The gradient of right, from left and the cotangent."""
        left, right = self.operands
        return Contraction(f"{left},{self.out}->{right}")


@dataclass(frozen=True)
class Recipe:
    """How matmuls are computed in 8 bits.

    `quantize(x, dims, dtype)` gives an operand that is contracted over `dims`, and `matmul` the product of two in a
    dtype. With `one_scale` the quantized operand is the same for all `dims`. `forward` are the values of weights and
    activations, `backward` those of cotangents. `capability` is the first card that computes so, `multiple` what
    contracted dims must be a multiple of. `xla` are options that the GPU compiler needs; `kernels` matches what it
    calls then.
    """

    name: str
    title: str
    quantize: Callable[[jax.Array, tuple[int, ...], jnp.dtype], Quantized]
    matmul: Callable[[Contraction, Quantized, Quantized, jnp.dtype], jax.Array]
    one_scale: bool
    forward: jnp.dtype
    backward: jnp.dtype
    capability: tuple[int, int]
    multiple: int
    xla: Mapping[str, bool]
    kernels: str


def power_of_two(largest: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The least power of two (float32) by which values up to `largest` must be divided to fit `dtype`, or twice it.

    NaN and infinity give themselves: what they scale is not finite either.
    """
    _, exponent = jnp.frexp(jnp.maximum(largest.astype(jnp.float32), TINY) / float(jnp.finfo(dtype).max))
    return jnp.where(jnp.isfinite(largest), jnp.ldexp(jnp.float32(1), exponent), largest.astype(jnp.float32))


TINY = 2.0**-60
"""Operands below it are scaled as this, so that the product of two scales is a float32 number."""


def scaled(x: jax.Array, dims: tuple[int, ...], dtype: jnp.dtype) -> Quantized:
    """x with one scale for all elements that differ in `dims` only, over all devices and replicas."""
    largest = over_replicas(lax.pmax, jnp.max(jnp.abs(x), axis=dims, keepdims=True))
    scale = power_of_two(largest, dtype)
    return Quantized((x.astype(jnp.float32) / scale).astype(dtype), scale)


def product_of_scaled(contraction: Contraction, left: Quantized, right: Quantized, dtype: jnp.dtype) -> jax.Array:
    """The product of operands with one scale each, which the GPU compiler passes to its 8-bit matmul.

    Scaled after the product, partial sums of devices would be all-reduced where they could be reduce-scattered.
    bfloat16 holds values x scale exactly.
    """
    x, w = (each.values.astype(jnp.bfloat16) * each.scale.astype(jnp.bfloat16) for each in (left, right))
    return lax.dot_general(x, w, (contraction.dims, ((), ())), preferred_element_type=dtype)


def product(contraction: Contraction, left: Quantized, right: Quantized, dtype: jnp.dtype) -> jax.Array:
    """The product of operands whose scales are 1 wide in every contracted dim."""
    dims = contraction.dims
    # In float16 the unscaled product would overflow; in bfloat16 a power of two rounds nothing.
    wide = jnp.float32 if dtype == jnp.float16 else dtype
    out = lax.dot_general(left.values, right.values, (dims, ((), ())), preferred_element_type=wide)
    left_scale, right_scale = (lax.squeeze(each.scale, own) for each, own in zip((left, right), dims, strict=True))
    left_scale = left_scale.reshape(*left_scale.shape, *[1] * right_scale.ndim)
    return (out * (left_scale * right_scale).astype(wide)).astype(dtype)
