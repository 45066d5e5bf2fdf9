"""custom_vjp whose forward outputs carry checkpoint names, so that remat policies can save them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from jaxtrain.numerics.remat import tag


def custom_vjp_with_residuals(
    forward: Callable[..., tuple[jax.Array, jax.Array]], backward: Callable[..., tuple[Any, ...]], name: str
) -> Callable[..., jax.Array]:
    """(*inputs) -> out, where forward(*inputs) -> (out, aux); its gradient is backward(inputs, out, aux, dout).

    `forward` runs outside the custom_vjp, which takes its results as inputs. A policy that saves `name`
    (numerics/remat.py) therefore saves both results, and the backward pass does not run `forward` again.
    """

    @jax.custom_vjp
    def attach(inputs: tuple[Any, ...], out: jax.Array, aux: jax.Array) -> jax.Array:
        return out

    def attach_forward(inputs: tuple[Any, ...], out: jax.Array, aux: jax.Array) -> tuple[jax.Array, Any]:
        return out, (inputs, out, aux)

    def attach_backward(residuals: Any, dout: jax.Array) -> tuple[Any, None, None]:
        return backward(*residuals, dout), None, None

    attach.defvjp(attach_forward, attach_backward)

    def run(*inputs: Any) -> jax.Array:
        out, aux = (tag(x, name) for x in forward(*lax.stop_gradient(inputs)))
        return attach(inputs, out, aux)

    return run
