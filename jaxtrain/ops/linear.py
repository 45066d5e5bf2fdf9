"""A matmul whose gradient products are written out."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def contract(equation: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """jnp.einsum(equation, x, w) for an equation "x,w->out" whose dims each appear twice.

    The gradient of w is made as x times slope. JAX's own rule makes slope times x and transposes the result, which has
    the CPU compiler recompute the nonlinearity behind slope in transposed order (12% of a training step).
    """
    return jnp.einsum(equation, x, w)


def _forward(equation: str, x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return jnp.einsum(equation, x, w), (x, w)


def _backward(equation: str, kept: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = kept
    inputs, out = equation.split("->")
    left, right = inputs.split(",")
    dx = jnp.einsum(f"{out},{right}->{left}", cotangent, w)
    dw = jnp.einsum(f"{left},{out}->{right}", x, cotangent)
    return dx.astype(x.dtype), dw.astype(w.dtype)


contract.defvjp(_forward, _backward)
