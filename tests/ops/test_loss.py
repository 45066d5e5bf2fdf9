"""Cross entropy against optax and closed forms: masked, chunked, capped, vmapped, with a sharded vocabulary."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.config import RulesConfig
from jaxtrain.mesh.constraints import use_rules
from jaxtrain.mesh.rules import resolve_rules
from jaxtrain.ops import loss
from jaxtrain.ops.loss import IGNORE, cross_entropy, loss_sums


def reference(x, w, labels, softcap=None):
    logits = loss.soft_cap(jnp.einsum("bld,dv->blv", x, w), softcap)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
    return jnp.sum(jnp.where(labels != IGNORE, each, 0.0))


def inputs(seed, B, L, D, V, scored=0.7):
    rng = np.random.default_rng(seed)
    labels = np.where(rng.random((B, L)) < scored, rng.integers(0, V, (B, L)), IGNORE)
    x, w = rng.standard_normal((B, L, D)), rng.standard_normal((D, V))
    return jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32), jnp.asarray(labels, jnp.int32)


def agree(actual, expected, rtol=2e-5):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * max(np.abs(b).max(), 1e-6))


@settings(max_examples=10, deadline=None)
@given(
    st.just(2), st.sampled_from([1, 8]), st.just(5), st.sampled_from([2, 17]),
    st.sampled_from([None, 1.5]), st.sampled_from([1, 2, 256]), st.integers(0, 99),
)  # fmt: skip
def test_values_and_gradients(B, L, D, V, softcap, chunk, seed):
    x, w, labels = inputs(seed, B, L, D, V)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "CHUNK_TOKENS", chunk)
        total, count = cross_entropy(x, w, labels, softcap)
        gradients = jax.grad(lambda x, w: 3 * cross_entropy(x, w, labels, softcap)[0], (0, 1))(x, w)
    agree(total, reference(x, w, labels, softcap))
    agree(gradients, jax.grad(lambda x, w: 3 * reference(x, w, labels, softcap), (0, 1))(x, w))
    assert count == np.sum(np.asarray(labels) != IGNORE) and count.dtype == jnp.int32


def test_uniform_logits_cost_log_vocabulary():
    total, count = cross_entropy(jnp.zeros((2, 4, 3)), jnp.ones((3, 50)), jnp.array([[1, 2, -1, 3], [-1, -1, -1, 9]]))
    np.testing.assert_allclose(total, 4 * math.log(50), rtol=1e-6)
    assert count == 4


def test_z_loss_of_uniform_logits():
    """Logits of 0: logsumexp is log V, so the z-loss is weight x log(V)^2 a token; every logit has a gradient."""
    x, labels = jnp.ones((1, 2, 1)), jnp.array([[3, IGNORE]])
    objective, sums = loss_sums(x, jnp.zeros((1, 50)), labels, z_weight=0.1)
    np.testing.assert_allclose(sums["z_loss"], 0.1 * math.log(50) ** 2, rtol=1e-6)
    np.testing.assert_allclose(objective, math.log(50) + sums["z_loss"], rtol=1e-6)
    np.testing.assert_allclose(sums["loss"], math.log(50), rtol=1e-6)
    dw = jax.grad(lambda w: loss_sums(x, w, labels, z_weight=0.1)[0])(jnp.zeros((1, 50)))
    expected = np.full(50, (1 + 0.2 * math.log(50)) / 50)
    expected[3] -= 1
    np.testing.assert_allclose(dw[0], expected, rtol=1e-5)


@settings(max_examples=4, deadline=None)
@given(st.sampled_from([1, 8]), st.sampled_from([None, 1.5]), st.sampled_from([0, 3]), st.integers(0, 99))
def test_z_loss_values_and_gradients(L, softcap, padding, seed):
    """Padding of the vocabulary, however likely it would be, changes no value and has no gradient."""
    x, w, labels = inputs(seed, 2, L, 5, 17)
    padded = jnp.concatenate([w, jnp.full((5, padding), 9.0)], axis=1)
    rows = 17 if padding else None

    def with_z_loss(x, w):
        logits = loss.soft_cap(jnp.einsum("bld,dv->blv", x, w), softcap)
        squares = jnp.square(jax.nn.logsumexp(logits, axis=-1))
        return reference(x, w, labels, softcap) + 0.3 * jnp.sum(jnp.where(labels != IGNORE, squares, 0.0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "CHUNK_TOKENS", 2)
        value, (dx, dw) = jax.value_and_grad(
            lambda x, w: loss_sums(x, w, labels, softcap, z_weight=0.3, rows=rows)[0], (0, 1)
        )(x, padded)
    assert (np.asarray(dw[:, 17:]) == 0).all()
    got = value, (dx, dw[:, :17])
    agree(got, jax.value_and_grad(with_z_loss, (0, 1))(x, w))


def test_temporaries_are_linear_in_vocabulary_and_flat_in_length():
    """Compiler bytes are those of the [D, V] gradient and one chunk of logits, not of [B, L, V]."""

    def temporaries(L, V):
        shapes = [jax.ShapeDtypeStruct((1, L, 8), jnp.float32), jax.ShapeDtypeStruct((8, V), jnp.float32)]
        step = jax.value_and_grad(lambda x, w, labels: cross_entropy(x, w, labels)[0], (0, 1))
        compiled = jax.jit(step).lower(*shapes, jax.ShapeDtypeStruct((1, L), jnp.int32)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, wide, many = temporaries(2048, 2048), temporaries(2048, 8192), temporaries(8192, 2048)
    assert 3 * small < wide < 4.5 * small
    assert many - small < 4 * 8192 * 8 * 8  # the residual stream's gradient, a few times over
    assert wide < 4 * 2048 * 8192  # all logits in float32


def test_without_a_scored_label_loss_and_gradients_are_zero():
    x, w, labels = inputs(0, 2, 8, 4, 11, scored=0)
    (total, count), gradients = jax.value_and_grad(
        lambda x, w: cross_entropy(x, w, labels), argnums=(0, 1), has_aux=True
    )(x, w)
    assert total == 0 and count == 0
    assert all((np.asarray(g) == 0).all() for g in gradients)


def test_tokens_of_a_chunk_grow_with_width():
    assert [loss._chunks(length, width) for length, width in [(256, 256), (512, 512), (8192, 4096), (7, 64)]] == [
        1, 2, 8, 1,
    ]  # fmt: skip


def test_logits_are_not_saved():
    """Residuals are [N, B, C, D] and [D, V]: none is as large as all logits."""
    x, w, labels = inputs(0, 2, 1024, 4, 64)
    _, pull = jax.vjp(lambda x, w: cross_entropy(x, w, labels)[0], x, w)
    assert max(leaf.size for leaf in jax.tree.leaves(pull)) < 2 * 1024 * 64


def test_float16_gradients_survive_a_small_probability():
    """A token of probability 1e-8 has a gradient that float16 cannot hold before the loss scale of 2**15."""
    V = 8
    x, w = jnp.ones((1, 1, 1), jnp.float16), jnp.zeros((1, V), jnp.float16).at[0, 0].set(17.0)
    labels = jnp.zeros((1, 1), jnp.int32)
    dw = jax.grad(lambda w: 2.0**15 * cross_entropy(x, w, labels)[0])(w)
    assert dw.dtype == jnp.float16
    np.testing.assert_allclose(dw[0, 1], 2.0**15 * math.exp(-17), rtol=2e-2)


@pytest.mark.parametrize(("softcap", "rows"), [(None, 60), (2.0, None)])
def test_sharded_vocabulary_is_never_gathered(softcap, rows):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 1, 4, 1, 1), ("data", "pipe", "tensor", "seq", "expert"))
    rules = resolve_rules(RulesConfig(preset=["tensor_sequence"]))
    x, w, labels = inputs(1, 4, 512, 8, 64)
    labels = jnp.where(labels >= (rows or 64), 0, labels)
    shardings = tuple(NamedSharding(mesh, spec) for spec in (P("data", "tensor"), P(None, "tensor"), P("data")))
    step = jax.value_and_grad(lambda x, w, labels: cross_entropy(x, w, labels, softcap, rows=rows)[0], (0, 1))

    def sharded(x, w, labels):
        with use_rules(rules, mesh):
            return step(x, w, labels)

    compiled = jax.jit(sharded, in_shardings=shardings).lower(x, w, labels).compile()
    actual = compiled(*map(jax.device_put, (x, w, labels), shardings))
    agree(actual, jax.value_and_grad(lambda x, w: reference(x, w[:, :rows], labels, softcap), (0, 1))(x, w))
    assert rows is None or (np.asarray(actual[1][1][:, rows:]) == 0).all()
    gathered = [line for line in compiled.as_text().splitlines() if " all-gather(" in line]
    assert all(",64]" not in line and "[64" not in line for line in gathered), gathered


def test_batch_shards_reduce_the_head_gradient_once():
    """Fully sharded: without batch_shards the gradient of w is reduced in every chunk, with them after the last."""
    mesh = Mesh(np.array(jax.devices()).reshape(8, 1, 1, 1, 1), ("data", "pipe", "tensor", "seq", "expert"))
    rules = resolve_rules(RulesConfig(preset=["fsdp"]))
    x, w, labels = inputs(3, 8, 1024, 16, 128)
    shardings = tuple(NamedSharding(mesh, spec) for spec in (P("data"), P("data"), P("data")))

    def compiled(shards):
        def step(x, w, labels):
            with use_rules(rules, mesh):
                return jax.grad(lambda x, w: cross_entropy(x, w, labels, None, shards)[0], (0, 1))(x, w)

        return jax.jit(step, in_shardings=shardings, out_shardings=shardings[:2]).lower(x, w, labels).compile()

    once = compiled(8)
    expected = jax.grad(lambda x, w: reference(x, w, labels), (0, 1))(x, w)
    agree(once(*map(jax.device_put, (x, w, labels), shardings)), expected)
    assert not reduced_in_a_loop(once.as_text())
    assert reduced_in_a_loop(compiled(1).as_text())  # otherwise batch_shards would have no effect


@pytest.mark.parametrize("batch_shards", [1, 2])
def test_sharded_length_chunks_each_shard_and_reduces_once(batch_shards):
    """Sequence 4: logits of a chunk are sharded over it, and the gradient of w is reduced after the last chunk."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 1, 1, 4, 1), ("data", "pipe", "tensor", "seq", "expert"))
    rules = resolve_rules(
        RulesConfig(preset=["fsdp"] if batch_shards > 1 else ["ddp"], batch=None if batch_shards == 1 else "data")
    )
    x, w, labels = inputs(5, 2, 4160, 16, 128)
    tokens = P("data" if batch_shards > 1 else None, "seq")
    shardings = tuple(NamedSharding(mesh, spec) for spec in (tokens, P(), tokens))

    def step(x, w, labels):
        with use_rules(rules, mesh):
            return jax.value_and_grad(
                lambda x, w: loss_sums(x, w, labels, None, batch_shards, 0.1)[0], (0, 1)
            )(x, w)  # fmt: skip

    compiled = jax.jit(step, in_shardings=shardings).lower(x, w, labels).compile()
    got = compiled(*map(jax.device_put, (x, w, labels), shardings))
    agree(got, jax.jit(jax.value_and_grad(lambda x, w: loss_sums(x, w, labels, z_weight=0.1)[0], (0, 1)))(x, w))
    assert not reduced_in_a_loop(compiled.as_text())
    largest = max(
        math.prod(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+,128)\]", compiled.as_text())
    )
    assert largest <= 2 // batch_shards * 260 * 128  # 1,040 tokens of a shard in chunks of 260


def reduced_in_a_loop(text):
    """Whether a computation other than the entry reduces a [D, V] array."""
    entry = text.index("ENTRY ")
    return bool(re.search(r"= f32\[(1,)*16,128\]\S* all-reduce\(", text[:entry]))


def test_vmap_over_replicas_in_a_scan():
    """vmap with a mesh axis over replicas, grad inside and outside, scan over microbatches."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 1, 2, 1, 1), ("data", "pipe", "tensor", "seq", "expert"))
    rules = resolve_rules(RulesConfig(preset=["tensor"]))
    x, w, labels = inputs(2, 8, 512, 8, 32)
    shaped = [a.reshape(2, 4, 1, *a.shape[1:]) for a in (x, labels)]  # microbatch, replica, sequence

    def one(w, x, labels):
        return cross_entropy(x, w, labels)[0]

    def micro(total, part):
        with use_rules(rules, mesh, without=("data",)):
            inside = jax.vmap(jax.grad(one), in_axes=(None, 0, 0), spmd_axis_name="data")(w, *part).sum(0)
            outside = jax.grad(
                lambda w: jax.vmap(one, in_axes=(None, 0, 0), spmd_axis_name="data")(w, *part).sum()
            )(w)  # fmt: skip
        return (total[0] + inside, total[1] + outside), None

    (inside, outside), _ = jax.jit(lambda: jax.lax.scan(micro, (jnp.zeros_like(w),) * 2, tuple(shaped)))()
    expected = jax.grad(lambda w: reference(x, w, labels))(w)
    agree((inside, outside), (expected, expected))


def test_float16_gradients_with_a_large_z_loss_are_finite():
    """The gradient of the logits is up to 1 + 2 z logsumexp = 3: times 2**15 it would not be finite in float16."""
    x, w = jnp.ones((1, 2, 1), jnp.float16), jnp.zeros((1, 8), jnp.float16).at[0, 0].set(100.0)
    labels = jnp.array([[0, IGNORE]])

    def objective(x, w):
        return loss_sums(x, w, labels, z_weight=1e-2)[0]

    wide = [a.astype(jnp.float32) for a in (x, w)]
    for got, want in zip(jax.grad(objective, (0, 1))(x, w), jax.grad(objective, (0, 1))(*wide), strict=True):
        assert got.dtype == jnp.float16
        np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=2e-3)
