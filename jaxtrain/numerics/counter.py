"""Counters beyond int32, as two int32 words.

Trained tokens exceed 2^31 within hours, float32 is inexact above 2^24, and 64-bit integers are disabled in JAX.
A counter is an int32 array [2]: (high, low) with low < 2^30.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

BASE = 1 << 30


def counter_zero() -> jax.Array:
    """A counter at 0, int32 [2]."""
    return jnp.zeros(2, jnp.int32)


def counter_add(counter: jax.Array, n: jax.typing.ArrayLike) -> jax.Array:
    """The counter plus an integer 0 <= n < 2^30."""
    low = counter[1] + jnp.asarray(n, jnp.int32)
    return jnp.stack([counter[0] + low // BASE, low % BASE])


def counter_float(counter: jax.Array) -> jax.Array:
    """The count as a float32 scalar, rounded (relative error below 1.2e-7)."""
    return counter[0].astype(jnp.float32) * BASE + counter[1].astype(jnp.float32)


def counter_int(counter: jax.Array | np.ndarray) -> int:
    """The exact count, on the host."""
    high, low = (int(word) for word in np.asarray(counter))
    return high * BASE + low
