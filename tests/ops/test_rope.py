"""Rotary positions: closed forms and the property that gives them their meaning."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.ops import rope


def rotated(x_E, position, theta=10_000.0):
    tables = rope.tables(jnp.full((1, 1), position), rope.frequencies(len(x_E), theta))
    return np.asarray(rope.rotate(jnp.asarray(x_E, jnp.float32).reshape(1, 1, 1, -1), *tables)).reshape(-1)


def test_worked_example():
    # width 4, theta 100: pair 0 (dims 0, 2) turns 1 radian a position, pair 1 (dims 1, 3) 0.1 radian
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


def test_llama3_scaling_leaves_short_waves_and_divides_long_ones():
    plain = rope.frequencies(128, 500_000.0)
    scaled = rope.llama3_frequencies(plain, 8.0, 1.0, 4.0, 8192)
    wavelength = 2 * np.pi / plain.astype(np.float64)
    np.testing.assert_array_equal(scaled[wavelength < 8192 / 4], plain[wavelength < 8192 / 4])
    np.testing.assert_allclose(scaled[wavelength > 8192], plain[wavelength > 8192] / 8, rtol=1e-6)
    between = (wavelength > 8192 / 4) & (wavelength < 8192)
    assert between.any() and (scaled[between] < plain[between]).all() and (scaled[between] > plain[between] / 8).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_keeps_dtype_and_length(dtype):
    x = jax.random.normal(jax.random.key(0), (2, 5, 3, 8)).astype(dtype)
    tables = rope.tables(jnp.arange(10).reshape(2, 5) + 4000, rope.frequencies(8, 10_000.0))
    out = rope.rotate(x, *tables)
    assert out.dtype == dtype
    norms = [jnp.linalg.norm(a.astype(jnp.float32), axis=-1) for a in (out, x)]
    np.testing.assert_allclose(*norms, rtol=1e-5 if dtype == jnp.float32 else 2e-2)
