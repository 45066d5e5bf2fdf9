"""Rotary position embeddings (Su et al. 2021) in the "rotate half" layout: dims i and i + E/2 form a pair.

B batch, L sequence length, H heads, E head width, P = E/2 pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxtrain.config import ConfigError, RopeConfig

Frequencies = NDArray[np.float32]
"""Radians per position of each pair [P]."""


def frequencies(width: int, theta: float) -> Frequencies:
    """Radians per position of each of the width/2 pairs: theta ** (-2 i / width)."""
    return (1.0 / theta ** (np.arange(0, width, 2, dtype=np.float64) / width)).astype(np.float32)


def llama3_frequencies(
    base: Frequencies, factor: float, low_freq_factor: float, high_freq_factor: float, original_seq_len: int
) -> Frequencies:
    """Frequencies scaled as in Llama 3.1: low ones divided by `factor`, high ones unchanged, a ramp between."""
    rotations = original_seq_len * base.astype(np.float64) / (2 * math.pi)
    unscaled = np.clip((rotations - low_freq_factor) / (high_freq_factor - low_freq_factor), 0.0, 1.0)
    return (base * (unscaled + (1 - unscaled) / factor)).astype(np.float32)


def yarn_frequencies(
    base: Frequencies, factor: float, beta_fast: float, beta_slow: float, original_seq_len: int, theta: float,
    rounded: bool = True,
) -> Frequencies:  # fmt: skip
    """Frequencies scaled as in YaRN (Peng et al. 2023): a ramp over pairs, from unchanged to divided by `factor`.

    The ramp begins at the pair that makes `beta_fast` rotations within `original_seq_len` and ends at the one that
    makes `beta_slow`. `rounded` widens it to whole pairs, as the authors' code does and gpt-oss does not.
    """
    pairs = len(base)
    ends = [
        pairs * math.log(original_seq_len / (rotations * 2 * math.pi)) / math.log(theta)
        for rotations in (beta_fast, beta_slow)
    ]
    first, last = (math.floor(ends[0]), math.ceil(ends[1])) if rounded else ends
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    # As in their code, a ramp of width 0 becomes one of 0.001 pairs.
    ramp = np.clip((np.arange(pairs) - first) / max(last - first, 1e-3), 0.0, 1.0)
    return (base * (1 - ramp + ramp / factor)).astype(np.float32)


def yarn_magnitude(factor: float) -> float:
    """The factor of queries and keys under YaRN with scaling `factor`: 0.1 ln(factor) + 1."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn(r: RopeConfig, base: Frequencies, rounded: bool = True) -> tuple[Frequencies, float]:
    if r.beta_fast <= r.beta_slow:
        raise ConfigError(
            f"model.rope.beta_fast {r.beta_fast} is not above model.rope.beta_slow {r.beta_slow}: "
            "choose beta_fast > beta_slow (rotations within original_seq_len where the ramp begins and ends)"
        )
    scaled = yarn_frequencies(base, r.factor, r.beta_fast, r.beta_slow, r.original_seq_len, r.theta, rounded)
    return scaled, yarn_magnitude(r.factor) if r.attention_factor is None else r.attention_factor


SCALINGS: dict[str, Callable[[RopeConfig, Frequencies], tuple[Frequencies, float]]] = {
    "none": lambda r, base: (base, 1.0),
    "linear": lambda r, base: ((base / r.factor).astype(np.float32), 1.0),
    "llama3": lambda r, base: (
        llama3_frequencies(base, r.factor, r.low_freq_factor, r.high_freq_factor, r.original_seq_len),
        1.0,
    ),
    "yarn": _yarn,
    "yarn_unrounded": lambda r, base: _yarn(r, base, rounded=False),
}
"""model.rope.scaling -> function of the unscaled frequencies; returns frequencies and magnitude."""


def scaled(width: int, config: RopeConfig) -> tuple[Frequencies, float]:
    """Frequencies of the width/2 pairs under model.rope, and the magnitude that multiplies cosines and sines.

    Raises ConfigError where YaRN's beta_fast is not above beta_slow.
    """
    return SCALINGS[config.scaling](config, frequencies(width, config.theta))


def tables(positions_BL: jax.Array, frequencies_P: Frequencies, magnitude: float = 1.0) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of every position's angle, times `magnitude`: two float32 [B, L, P]."""
    angles_BLP = positions_BL[..., None].astype(jnp.float32) * frequencies_P
    cosine_BLP, sine_BLP = jnp.cos(angles_BLP), jnp.sin(angles_BLP)
    return (cosine_BLP, sine_BLP) if magnitude == 1.0 else (cosine_BLP * magnitude, sine_BLP * magnitude)


def rotate(x_BLHE: jax.Array, cosine_BLP: jax.Array, sine_BLP: jax.Array) -> jax.Array:
    """Rotate each pair of each head by its position's angle, in float32; returns x's shape and dtype."""
    low, high = jnp.split(x_BLHE.astype(jnp.float32), 2, axis=-1)
    cosine, sine = cosine_BLP[:, :, None, :], sine_BLP[:, :, None, :]
    rotated = jnp.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)
    return rotated.astype(x_BLHE.dtype)
