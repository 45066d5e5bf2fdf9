"""Rotary position embeddings: closed forms, relative positions, scaling."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.config import ConfigError, RopeConfig
from jaxtrain.ops import rope


def rotated(x_E, position, theta=10_000.0):
    tables = rope.tables(jnp.full((1, 1), position), rope.frequencies(len(x_E), theta))
    return np.asarray(rope.rotate(jnp.asarray(x_E, jnp.float32).reshape(1, 1, 1, -1), *tables)).reshape(-1)


def test_worked_example():
    # width 4, theta 100: pair 0 (dims 0, 2) rotates by 1 radian per position, pair 1 (dims 1, 3) by 0.1
    np.testing.assert_allclose(rope.frequencies(4, 100.0), [1.0, 0.1], rtol=1e-6)
    expected = [math.cos(3), math.cos(0.3), math.sin(3), math.sin(0.3)]
    np.testing.assert_allclose(rotated([1, 1, 0, 0], 3, 100.0), expected, rtol=1e-5)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 8), st.integers(0, 200), st.integers(0, 200), st.integers(1, 50), st.integers(0, 99))
def test_scores_depend_on_distance_only(pairs, at, other, shift, seed):
    q, k = np.random.default_rng(seed).standard_normal((2, 2 * pairs))
    here = rotated(q, at) @ rotated(k, other)
    there = rotated(q, at + shift) @ rotated(k, other + shift)
    np.testing.assert_allclose(here, there, atol=2e-4 * np.linalg.norm(q) * np.linalg.norm(k))


def test_llama3_scaling_divides_only_long_wavelengths():
    base = rope.frequencies(128, 500_000.0)
    scaled = rope.llama3_frequencies(base, 8.0, 1.0, 4.0, 8192)
    wavelength = 2 * np.pi / base.astype(np.float64)
    np.testing.assert_array_equal(scaled[wavelength < 8192 / 4], base[wavelength < 8192 / 4])
    np.testing.assert_allclose(scaled[wavelength > 8192], base[wavelength > 8192] / 8, rtol=1e-6)
    between = (wavelength > 8192 / 4) & (wavelength < 8192)
    assert between.any() and (scaled[between] < base[between]).all() and (scaled[between] > base[between] / 8).all()


def test_linear_scaling_divides_every_frequency():
    got, magnitude = rope.scaled(8, RopeConfig(scaling="linear", factor=8.0))
    np.testing.assert_allclose(got, [0.125, 0.0125, 0.00125, 0.000125], rtol=1e-6)
    assert magnitude == 1.0


# transformers 5.24.0, modeling_rope_utils._compute_yarn_parameters: every width/16-th frequency, attention factor.
@pytest.mark.parametrize(("width", "settings_", "expected", "magnitude"), [
    (128, {"scaling": "yarn", "factor": 4.0, "original_seq_len": 32_768, "theta": 1e6},
     [1.0, 0.17782794, 0.031622779, 0.0053753215, 0.00060294115, 4.4456985e-05, 7.9056936e-06, 1.4058534e-06],
     1.138629436111989),
    (64, {"scaling": "yarn_unrounded", "factor": 32.0, "original_seq_len": 4096, "theta": 150_000.0},
     [1.0, 0.225418, 0.050813273, 0.0067949593, 0.00045648392, 1.8188337e-05, 4.0999785e-06, 9.2420896e-07],
     1.3465735902799727),
    (64, {"scaling": "yarn", "factor": 40.0, "original_seq_len": 4096, "attention_factor": 1.0},
     [1.0, 0.31622776, 0.1, 0.026879361, 0.0055000004, 0.00079056941, 2.4999999e-05, 7.9056945e-06], 1.0),
])  # fmt: skip
def test_yarn_agrees_with_transformers(width, settings_, expected, magnitude):
    got, factor = rope.scaled(width, RopeConfig(**settings_))
    np.testing.assert_allclose(got[:: width // 16], expected, rtol=2e-6)
    assert factor == pytest.approx(magnitude, rel=1e-12)


def test_yarn_divides_only_slow_pairs():
    """The published ends of the ramp: beta_fast and beta_slow rotations in the original length (Peng et al. 2023)."""
    base = rope.frequencies(128, 10_000.0)
    scaled = rope.yarn_frequencies(base, 16.0, 32.0, 1.0, 4096, 10_000.0, rounded=False)
    rotations = 4096 * base.astype(np.float64) / (2 * math.pi)
    np.testing.assert_array_equal(scaled[rotations >= 32], base[rotations >= 32])
    np.testing.assert_allclose(scaled[rotations <= 1], base[rotations <= 1] / 16, rtol=1e-6)
    between = (rotations > 1) & (rotations < 32)
    # Between the ends, the divided fraction grows linearly over pairs.
    share = (base - scaled)[between] / (base * (1 - 1 / 16))[between]
    np.testing.assert_allclose(np.diff(share), math.log(10_000.0) / (64 * math.log(32)), rtol=2e-3)


def test_beta_fast_below_beta_slow_is_an_error():
    with pytest.raises(ConfigError, match=r"beta_fast 1\.0 is not above model\.rope\.beta_slow 2\.0"):
        rope.scaled(8, RopeConfig(scaling="yarn", beta_fast=1.0, beta_slow=2.0))


def test_the_magnitude_multiplies_cosines_and_sines():
    positions = jnp.arange(6)[None]
    base = rope.tables(positions, rope.frequencies(8, 100.0))
    larger = rope.tables(positions, rope.frequencies(8, 100.0), rope.yarn_magnitude(4.0))
    for a, b in zip(larger, base, strict=True):
        np.testing.assert_allclose(a, (0.1 * math.log(4) + 1) * b, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_keeps_dtype_and_length(dtype):
    x = jax.random.normal(jax.random.key(0), (2, 5, 3, 8)).astype(dtype)
    tables = rope.tables(jnp.arange(10).reshape(2, 5) + 4000, rope.frequencies(8, 10_000.0))
    out = rope.rotate(x, *tables)
    assert out.dtype == dtype
    norms = [jnp.linalg.norm(a.astype(jnp.float32), axis=-1) for a in (out, x)]
    np.testing.assert_allclose(*norms, rtol=1e-5 if dtype == jnp.float32 else 2e-2)
