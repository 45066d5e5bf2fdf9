"""A matmul with hand-written gradients."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def contract(equation: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """jnp.einsum(equation, x, w) for an equation "x,w->out" whose dims each appear twice.

    The gradient of w is the product of x and the cotangent. JAX's rule multiplies the cotangent by x and transposes the
    result, which makes the CPU compiler recompute the preceding nonlinearity in transposed order (12% of a train step).
    """
    return jnp.einsum(equation, x, w)


def _forward(equation: str, x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return jnp.einsum(equation, x, w), (x, w)


def _backward(
    equation: str, residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = residuals
    inputs, out = equation.split("->")
    left, right = inputs.split(",")
    dx = jnp.einsum(f"{out},{right}->{left}", cotangent, w)
    dw = jnp.einsum(f"{left},{out}->{right}", x, cotangent)
    return dx.astype(x.dtype), dw.astype(w.dtype)


contract.defvjp(_forward, _backward)
