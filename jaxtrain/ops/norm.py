"""Normalisation over the last dim, computed in float32 for inputs of any dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * scale over the last dim (Zhang & Sennrich 2019); [..., N] and [N] -> [..., N] in x's dtype."""
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * inverse * scale.astype(jnp.float32)).astype(x.dtype)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """(x - mean) / std * scale + bias over the last dim (Ba et al. 2016); [..., N] -> [..., N] in x's dtype."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps)
    return (centred * inverse * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)
