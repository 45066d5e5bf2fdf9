"""Attention against a loop over queries in float64, alone and with heads sharded."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.ops.attention import attend


def slow(q, k, v, segments, window, softcap):
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    out = np.zeros_like(q)
    for b, i, h in np.ndindex(q.shape[:3]):
        kv = h // (q.shape[2] // k.shape[2])
        first = 0 if window is None else max(0, i - window + 1)
        seen = [j for j in range(first, i + 1) if segments[b, j] == segments[b, i] != 0]
        if not seen:
            continue
        scores = k[b, seen, kv] @ q[b, i, h] / np.sqrt(q.shape[3])
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max())
        out[b, i, h] = weights / weights.sum() @ v[b, seen, kv]
    return out


def inputs(seed, B, L, K, G, E):
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = [(B, L, K * G, E), (B, L, K, E), (B, L, K, E)]
    return [2 * jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


@settings(max_examples=8, deadline=None)
@given(
    st.just(2), st.sampled_from([1, 6, 9]), st.integers(1, 2), st.sampled_from([1, 3]), st.just(5),
    st.sampled_from([None, 1, 3]), st.sampled_from([None, 2.0]), st.integers(0, 99),
)  # fmt: skip
def test_definition(B, L, K, G, E, window, softcap, seed):
    q, k, v = inputs(seed, B, L, K, G, E)
    segments = np.sort(np.random.default_rng(seed).integers(0, 4, (B, L)))[:, ::-1].copy()
    out = attend(q, k, v, jnp.asarray(segments), window=window, softcap=softcap)
    np.testing.assert_allclose(out, slow(q, k, v, segments, window, softcap), rtol=2e-5, atol=2e-6)


def test_one_visible_key_returns_its_value():
    q, k, v = inputs(0, 1, 6, 2, 2, 4)
    out = attend(q, k, v, jnp.ones((1, 6), jnp.int32), window=1)
    np.testing.assert_allclose(out, jnp.repeat(v, 2, axis=2), rtol=1e-6)


def test_padding_gives_zeros_and_no_gradient():
    q, k, v = inputs(1, 2, 7, 1, 2, 4)
    segments = jnp.array([[1, 1, 2, 2, 2, 0, 0], [0] * 7])

    def total(q, k, v):
        return jnp.sum(jnp.cos(attend(q, k, v, segments)))

    out = attend(q, k, v, segments)
    gradients = jax.grad(total, (0, 1, 2))(q, k, v)
    for a in (out, *gradients):
        assert np.isfinite(a).all()
        np.testing.assert_array_equal(a[np.asarray(segments) == 0], 0)
        assert np.abs(a[0, :5]).max() > 0


def test_documents_of_a_row_do_not_see_each_other():
    q, k, v = inputs(2, 1, 8, 2, 1, 4)
    segments = jnp.array([[1, 1, 1, 2, 2, 2, 2, 0]])
    packed = attend(q, k, v, segments)
    for span in (slice(0, 3), slice(3, 7)):
        alone = attend(q[:, span], k[:, span], v[:, span], jnp.ones((1, span.stop - span.start), jnp.int32))
        np.testing.assert_allclose(packed[:, span], alone, rtol=1e-6, atol=1e-7)


def test_bfloat16_sums_in_float32():
    q, k, v = inputs(3, 1, 512, 1, 1, 64)
    exact = attend(q, k, v, jnp.ones((1, 512), jnp.int32))
    rough = attend(*(a.astype(jnp.bfloat16) for a in (q, k, v)), jnp.ones((1, 512), jnp.int32))
    assert rough.dtype == jnp.bfloat16
    assert np.abs(rough.astype(jnp.float32) - exact).max() < 0.05 * np.abs(exact).max()


@pytest.mark.parametrize("kv_heads", [2, 8])
def test_heads_sharded_over_more_devices_than_kv_heads(kv_heads):
    """Tensor 4: eight query heads are split, two kv heads stay whole; queries are never gathered."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "tensor"))
    q, k, v = inputs(4, 2, 16, kv_heads, 8 // kv_heads, 4)
    segments = jnp.ones((2, 16), jnp.int32)
    kv = P("data", None, "tensor" if kv_heads == 8 else None)
    specs = (P("data", None, "tensor"), kv, kv)
    shardings = tuple(NamedSharding(mesh, spec) for spec in specs)

    def forward(q, k, v):
        return attend(q, k, v, segments)

    def total(q, k, v):
        return jnp.sum(jnp.cos(forward(q, k, v)))

    both = jax.jit(
        lambda *a: (forward(*a), jax.grad(total, (0, 1, 2))(*a)),
        in_shardings=shardings, out_shardings=(shardings[0], shardings),
    ).lower(q, k, v).compile()  # fmt: skip
    gathered = re.findall(r"= f32\[([\d,]*)\]\S* all-gather\(", both.as_text())
    assert set(gathered) <= {"1,16,2,4"}, gathered  # gradients of whole kv heads, nothing of the size of queries
    expected = (forward(q, k, v), jax.grad(total, (0, 1, 2))(q, k, v))
    actual = both(*map(jax.device_put, (q, k, v), shardings))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6), actual, expected)
