"""A function of two passes written by hand, of which the results of the first are named for remat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from jaxtrain.numerics.remat import tag


def custom_vjp_with_residuals(
    forward: Callable[..., tuple[jax.Array, jax.Array]], backward: Callable[..., tuple[Any, ...]], name: str
) -> Callable[..., jax.Array]:
    """(inputs) -> out, where forward(*inputs) -> (out, more), with the gradient backward(inputs, out, more, dout).

    The first pass stands beside the differentiated function, which takes its results: a policy that keeps `name`
    (numerics/remat.py) keeps both, and the backward pass needs no second one.
    """

    @jax.custom_vjp
    def attach(inputs: tuple[Any, ...], out: jax.Array, more: jax.Array) -> jax.Array:
        return out

    def keep(inputs: tuple[Any, ...], out: jax.Array, more: jax.Array) -> tuple[jax.Array, Any]:
        return out, (inputs, out, more)

    def gradients(kept: Any, dout: jax.Array) -> tuple[Any, None, None]:
        return backward(*kept, dout), None, None

    attach.defvjp(keep, gradients)

    def run(*inputs: Any) -> jax.Array:
        out, more = (tag(x, name) for x in forward(*lax.stop_gradient(inputs)))
        return attach(inputs, out, more)

    return run
