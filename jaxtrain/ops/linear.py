"""Linear maps with hand-written gradients, which sum over tokens in float32.

Weights may be wider than activations (numerics/wide.py): they are cast where they are used, their gradients are not.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxtrain.ops.reference import uses_reference


def contract(equation: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """jnp.einsum(equation, x, w) in x's dtype, for an equation "x,w->out" whose dims each appear twice.

    The gradient of w is the product of x and the cotangent. JAX's rule multiplies the cotangent by x and transposes the
    result, which makes the CPU compiler recompute the preceding nonlinearity in transposed order (12% of a train step).
    """
    if uses_reference():
        return jnp.einsum(equation, _rounded(x, x.dtype), _rounded(w, x.dtype)).astype(x.dtype)
    return _contract(equation, x, w)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _contract(equation: str, x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.einsum(equation, x, w.astype(x.dtype))


def _forward(equation: str, x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # Not _contract itself: remat policies recognise matmuls.
    return jnp.einsum(equation, x, w.astype(x.dtype)), (x, w)


def _backward(
    equation: str, residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = residuals
    inputs, out = equation.split("->")
    left, right = inputs.split(",")
    dx = jnp.einsum(f"{out},{right}->{left}", cotangent, w.astype(x.dtype))
    dw = jnp.einsum(f"{left},{out}->{right}", x, cotangent, preferred_element_type=w.dtype)
    return dx.astype(x.dtype), dw.astype(w.dtype)


_contract.defvjp(_forward, _backward)


def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """x [..., *N] + bias [*N] in x's dtype; the gradient of the bias is summed in float32."""
    if uses_reference():
        return (x.astype(jnp.float32) + _rounded(bias, x.dtype)).astype(x.dtype)
    return _add_bias(x, bias)


@jax.custom_vjp
def _add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    return x + bias.astype(x.dtype)


def _add_bias_forward(x: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _add_bias(x, bias), bias


def _add_bias_backward(bias: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    tokens = tuple(range(cotangent.ndim - bias.ndim))
    return cotangent, jnp.sum(cotangent, axis=tokens, dtype=jnp.float32).astype(bias.dtype)


_add_bias.defvjp(_add_bias_forward, _add_bias_backward)


def lookup(table_VD: jax.Array, ids: jax.Array, dtype: jnp.dtype, sharding: NamedSharding | None) -> jax.Array:
    """Rows of a table [..., D] in `dtype`; `sharding`: of the table as it is read, None for any.

    The gradient of the table is summed in float32, however often a row is read.
    """
    if uses_reference():
        return (jax.nn.one_hot(ids, table_VD.shape[0]) @ _rounded(table_VD, dtype)).astype(dtype)
    return _lookup(table_VD, ids, dtype, sharding)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _lookup(table_VD: jax.Array, ids: jax.Array, dtype: jnp.dtype, sharding: NamedSharding | None) -> jax.Array:
    return _pin(table_VD.astype(dtype), sharding)[ids]


def _lookup_forward(
    table_VD: jax.Array, ids: jax.Array, dtype: jnp.dtype, sharding: NamedSharding | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # An empty array passes the rows and the dtype of the table to the backward pass.
    return _lookup(table_VD, ids, dtype, sharding), (ids, jnp.zeros((table_VD.shape[0], 0), table_VD.dtype))


def _lookup_backward(
    dtype: jnp.dtype, sharding: NamedSharding | None, residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, None]:
    ids, like_V0 = residuals
    zeros_VD = jnp.zeros((like_V0.shape[0], cotangent.shape[-1]), jnp.float32)
    # Devices add up in float32 too: a cast before would make the partitioner all-reduce the whole table.
    return _pin(zeros_VD.at[ids].add(cotangent.astype(jnp.float32)), sharding).astype(like_V0.dtype), None


_lookup.defvjp(_lookup_forward, _lookup_backward)


def _rounded(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """x rounded to `dtype`, in float32: the reference rounds operands and computes, also gradients, in float32."""
    return x.astype(dtype).astype(jnp.float32)


def _pin(x: jax.Array, sharding: NamedSharding | None) -> jax.Array:
    return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)
