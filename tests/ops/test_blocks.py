"""Tiled attention against the dense softmax: values, gradients, blocks merged in any order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.ops import blocks
from jaxtrain.ops.blocks import MASKED, TokenPositions


def tokens_of(rng, B, L, documents=3, padding=2):
    segments = np.sort(rng.integers(1, documents + 1, (B, L)), axis=1)
    segments[:, L - min(padding, L - 1) :] = 0
    positions = np.zeros_like(segments)
    for b, s in np.ndindex(B, documents + 1):
        here = segments[b] == s
        positions[b, here] = np.arange(here.sum())
    return TokenPositions(jnp.asarray(segments, jnp.int32), jnp.asarray(positions, jnp.int32))


def arrays_of(rng, B, L, K, G, E, V):
    shapes = [(B, L, K * G, E), (B, L, K, E), (B, L, K, V), (B, L, K * G, V)]
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def dense(q, k, v, queries, keys, window, softcap, scale):
    """Softmax over the whole score matrix, differentiated by JAX; a query without keys gives 0."""
    k, v = (jnp.repeat(a, q.shape[2] // k.shape[2], axis=2) for a in (k, v))
    scores = jnp.einsum("blhe,bmhe->bhlm", q, k) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    distance = queries.positions[:, :, None] - keys.positions[:, None]
    mask = (queries.segments[:, :, None] == keys.segments[:, None]) & (queries.segments[:, :, None] > 0)
    mask = (mask & (distance >= 0) & (distance < (window or 10**6)))[:, None]
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, scores, 0.0)), 0.0)
    total = weights.sum(-1, keepdims=True)
    return jnp.einsum("bhlm,bmhv->blhv", weights / jnp.where(total > 0, total, 1.0), v)


def agree(got, want, rtol=2e-6):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * max(float(np.abs(b).max()), 1.0))


@settings(max_examples=5, deadline=None)
@given(
    st.integers(1, 13), st.sampled_from([(1, 1), (2, 3)]), st.sampled_from([(4, 4), (5, 3)]),
    st.sampled_from([None, 1, 3, 100]), st.sampled_from([None, 2.0]), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_tiles_are_the_dense_softmax(L, heads, widths, window, softcap, ordered, seed):
    rng = np.random.default_rng(seed)
    q, k, v, dout = arrays_of(rng, 2, L, *heads, *widths)
    tokens = tokens_of(rng, 2, L)
    traced = None if window is None else jnp.int32(window)
    args = (tokens, tokens, traced, softcap, 0.4, ordered)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "TILE", 4)
        out, lse = blocks.forward(q, k, v, *args)
        gradients = blocks.backward(q, k, v, lse, blocks.row_delta(out, dout), dout, *args)
    want, pull = jax.vjp(lambda *a: dense(*a, tokens, tokens, window, softcap, 0.4), q, k, v)
    agree((out, *gradients), (want, *pull(dout)))
    assert (np.asarray(lse.swapaxes(1, 2))[np.asarray(tokens.segments) == 0] == MASKED).all()


@settings(max_examples=3, deadline=None)
@given(st.integers(2, 12), st.sampled_from([None, 4]), st.integers(0, 99))
def test_blocks_of_permuted_keys_merge(L, window, seed):
    """Tokens shuffled, keys cut in two: outputs merge; gradients of the blocks, with the merged lse, add up."""
    rng = np.random.default_rng(seed)
    q, k, v, dout = arrays_of(rng, 1, L, 2, 2, 4, 6)
    tokens = tokens_of(rng, 1, L)
    order, cut = rng.permutation(L), int(rng.integers(1, L))
    out, pull = jax.vjp(lambda *a: dense(*a, tokens, tokens, window, None, 0.5), q, k, v)
    want = [a[:, order] for a in (out, *pull(dout))]
    q, k, v, dout = (a[:, order] for a in (q, k, v, dout))
    tokens = TokenPositions(*(a[:, order] for a in tokens))
    halves = [(slice(None), slice(0, cut)), (slice(None), slice(cut, None))]
    parts = [(k[h], v[h], tokens, TokenPositions(*(a[h] for a in tokens))) for h in halves]
    found = [blocks.forward(q, a, b, here, there, window, None, 0.5) for a, b, here, there in parts]
    out, lse = blocks.merge(*found[0], *found[1])
    delta = blocks.row_delta(out, dout)
    gradients = [
        blocks.backward(q, a, b, lse, delta, dout, here, there, window, None, 0.5) for a, b, here, there in parts
    ]
    dq = gradients[0][0] + gradients[1][0]
    dk, dv = (jnp.concatenate([gradients[0][i], gradients[1][i]], axis=1) for i in (1, 2))
    agree((out, dq, dk, dv), want)


def test_a_query_without_keys_changes_no_merge():
    rng = np.random.default_rng(0)
    q, k, v, dout = arrays_of(rng, 1, 4, 1, 1, 4, 4)
    here, there = (TokenPositions(jnp.full((1, 4), s, jnp.int32), jnp.arange(4)[None]) for s in (1, 2))
    out, lse = blocks.forward(q, k, v, here, there, None, None, 0.5)
    assert (out == 0).all() and (lse == MASKED).all()
    agree(blocks.backward(q, k, v, lse, blocks.row_delta(out, dout), dout, here, there, None, None, 0.5), [0 * q] * 3)
    full = blocks.forward(q, k, v, here, here, None, None, 0.5)
    agree(blocks.merge(*full, out, lse), full)


def test_sinks_only_add_to_the_denominator():
    """A sink of log(n) beside n keys of score 0 halves the output: weights 1/(2n)."""
    q, tokens = jnp.zeros((1, 4, 1, 2)), TokenPositions(jnp.ones((1, 4), jnp.int32), jnp.arange(4)[None])
    v = jnp.ones((1, 4, 1, 2))
    out, lse = blocks.add_sinks(*blocks.forward(q, q, v, tokens, tokens, None, None, 1.0), jnp.log(jnp.array([4.0])))
    np.testing.assert_allclose(out[0, :, 0, 0], [1 / 5, 2 / 6, 3 / 7, 4 / 8], rtol=1e-6)
    np.testing.assert_allclose(lse[0, 0], np.log([5, 6, 7, 8]), rtol=1e-6)


def test_temporaries_are_linear_in_length():
    """Compiler bytes, forward and backward, one head group: twice the length needs at most about twice the memory."""

    def both(q, k, v, dout, segments):
        tokens = TokenPositions(segments, segments)
        out, lse = blocks.forward(q, k, v, tokens, tokens, None, None, 0.1, True)
        return blocks.backward(q, k, v, lse, blocks.row_delta(out, dout), dout, tokens, tokens, None, None, 0.1, True)

    def temporaries(L):
        shapes = [(1, L, 4, 64), (1, L, 1, 64), (1, L, 1, 64), (1, L, 4, 64)]
        arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
        compiled = jax.jit(both).lower(*arrays, jax.ShapeDtypeStruct((1, L), jnp.int32)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short, middle, long = map(temporaries, (8192, 16384, 32768))
    assert long < 2.1 * middle < 4.4 * short
    assert long < 32768 * 32768  # bytes: less than one byte per pair of tokens
