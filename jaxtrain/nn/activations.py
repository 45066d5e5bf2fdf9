"""Activations of feed-forward layers: a registry that user code can extend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxtrain.config import Registry


@dataclass(frozen=True)
class Activation:
    """Nonlinearity of a feed-forward layer: an elementwise function of arrays of equal shape.

    `function` takes the up projection; with `gated`, it takes the gate and the up projection, and layers have a third
    matrix, the gate.
    """

    function: Callable[..., jax.Array]
    gated: bool = False

    def __call__(self, gate: jax.Array | None, up: jax.Array) -> jax.Array:
        """The input of the down projection; `gate` is None unless the activation is gated."""
        return self.function(gate, up) if self.gated else self.function(up)


ACTIVATIONS: Registry[Activation] = Registry("model.activation")
"""model.activation -> Activation."""


def clipped_swiglu(gate: jax.Array, up: jax.Array, limit: float = 7.0, alpha: float = 1.702) -> jax.Array:
    """(up + 1) * gate * sigmoid(alpha * gate), gate at most `limit` and up within +-limit (gpt-oss); any shape."""
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * (gate * jax.nn.sigmoid(alpha * gate))


ACTIVATIONS.register("swiglu")(Activation(lambda gate, up: jax.nn.silu(gate) * up, gated=True))
ACTIVATIONS.register("gelu")(Activation(lambda up: jax.nn.gelu(up, approximate=False)))
ACTIVATIONS.register("gelu_tanh")(Activation(lambda up: jax.nn.gelu(up, approximate=True)))
ACTIVATIONS.register("relu2")(Activation(lambda up: jnp.square(jax.nn.relu(up))))
ACTIVATIONS.register("swiglu_oss")(Activation(clipped_swiglu, gated=True))
