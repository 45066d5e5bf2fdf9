"""Rotary positions (Su et al. 2021) in the "rotate half" layout: dim i turns with dim i + E/2.

B batch, L length, H heads, E head width, P = E/2 pairs.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray


def frequencies(width: int, theta: float) -> NDArray[np.float32]:
    """Radians a position of each of the width/2 pairs: theta ** (-2 i / width)."""
    return (1.0 / theta ** (np.arange(0, width, 2, dtype=np.float64) / width)).astype(np.float32)


def llama3_frequencies(
    plain: NDArray[np.float32], factor: float, low_freq_factor: float, high_freq_factor: float, original_length: int
) -> NDArray[np.float32]:
    """Frequencies stretched as in Llama 3.1: long waves divided by `factor`, short ones kept, a ramp between."""
    turns = original_length * plain.astype(np.float64) / (2 * math.pi)
    kept = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0.0, 1.0)
    return (plain * (kept + (1 - kept) / factor)).astype(np.float32)


def tables(positions_BL: jax.Array, frequencies_P: NDArray[np.float32]) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of every position's angle: two float32 [B, L, P]."""
    angles_BLP = positions_BL[..., None].astype(jnp.float32) * frequencies_P
    return jnp.cos(angles_BLP), jnp.sin(angles_BLP)


def rotate(x_BLHE: jax.Array, cosine_BLP: jax.Array, sine_BLP: jax.Array) -> jax.Array:
    """Rotate each pair of each head by its position's angle, in float32; returns x's shape and dtype."""
    low, high = jnp.split(x_BLHE.astype(jnp.float32), 2, axis=-1)
    cosine, sine = cosine_BLP[:, :, None, :], sine_BLP[:, :, None, :]
    turned = jnp.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)
    return turned.astype(x_BLHE.dtype)
