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

from jaxtrain.config import AttentionConfig, ConfigError, RulesConfig, RunConfig
from jaxtrain.mesh.constraints import use_rules
from jaxtrain.mesh.rules import resolve_rules
from jaxtrain.ops import attention, blocks
from jaxtrain.ops.attention import AttentionRequest, attend, choose, use_attention
from jaxtrain.ops.reference import use_reference

BACKENDS = ["dense", "xla"]  # those that run on a CPU


def loop(q, k, v, segments, window, softcap, scale=None, sinks=None):
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    out = np.zeros((*q.shape[:3], v.shape[3]))
    for b, i, h in np.ndindex(q.shape[:3]):
        kv = h // (q.shape[2] // k.shape[2])
        first = 0 if window is None else max(0, i - window + 1)
        visible = [j for j in range(first, i + 1) if segments[b, j] == segments[b, i] != 0]
        if not visible:
            continue
        scores = k[b, visible, kv] @ q[b, i, h] * (scale or 1 / np.sqrt(q.shape[3]))
        if softcap:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max())
        sink = 0 if sinks is None else np.exp(sinks[h] - scores.max())
        out[b, i, h] = weights / (weights.sum() + sink) @ v[b, visible, kv]
    return out


def inputs(seed, B, L, K, G, E, V=None):
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = [(B, L, K * G, E), (B, L, K, E), (B, L, K, V or E)]
    return [2 * jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def positions_of(segments):
    """Position of each token in its document."""
    out = np.zeros_like(segments)
    for b, i in np.ndindex(segments.shape):
        out[b, i] = out[b, i - 1] + 1 if i and segments[b, i] == segments[b, i - 1] else 0
    return jnp.asarray(out)


def one_document(B, L):
    return jnp.ones((B, L), jnp.int32), jnp.broadcast_to(jnp.arange(L), (B, L))


def backend(name, **attention_settings):
    return use_attention(RunConfig(attention=AttentionConfig(backend=name, **attention_settings)))


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=4, deadline=None)
@given(
    st.sampled_from([1, 6, 9]), st.integers(1, 2), st.sampled_from([1, 3]), st.sampled_from([None, 3]),
    st.sampled_from([None, 1, 3]), st.sampled_from([None, 2.0]), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_definition(name, L, K, G, V, window, softcap, sinks, seed):
    q, k, v = inputs(seed, 2, L, K, G, 5, V)
    segments = np.sort(np.random.default_rng(seed).integers(0, 4, (2, L)))[:, ::-1].copy()
    sinks = np.random.default_rng(seed).standard_normal(K * G).astype(np.float32) if sinks else None
    scale = None if seed % 2 else 0.3
    with pytest.MonkeyPatch.context() as patch, backend(name):
        patch.setattr(blocks, "TILE", 4)
        out = attend(q, k, v, jnp.asarray(segments), positions_of(segments), window, softcap, scale, sinks)
    np.testing.assert_allclose(out, loop(q, k, v, segments, window, softcap, scale, sinks), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", BACKENDS)
def test_one_visible_key_returns_its_value(name):
    q, k, v = inputs(0, 1, 6, 2, 2, 4)
    with backend(name):
        out = attend(q, k, v, *one_document(1, 6), window=1)
    np.testing.assert_allclose(out, jnp.repeat(v, 2, axis=2), rtol=1e-6)


@pytest.mark.parametrize("name", BACKENDS)
def test_padding_gives_zeros_and_no_gradient(name):
    q, k, v = inputs(1, 2, 7, 1, 2, 4)
    segments = jnp.array([[1, 1, 2, 2, 2, 0, 0], [0] * 7])
    positions = positions_of(np.asarray(segments))

    def total(q, k, v):
        return jnp.sum(jnp.cos(attend(q, k, v, segments, positions)))

    with backend(name):
        out = attend(q, k, v, segments, positions)
        gradients = jax.grad(total, (0, 1, 2))(q, k, v)
    for a in (out, *gradients):
        assert np.isfinite(a).all()
        np.testing.assert_array_equal(a[np.asarray(segments) == 0], 0)
        assert np.abs(a[0, :5]).max() > 0


@pytest.mark.parametrize("name", BACKENDS)
def test_documents_of_a_sequence_do_not_see_each_other(name):
    q, k, v = inputs(2, 1, 8, 2, 1, 4)
    segments = np.array([[1, 1, 1, 2, 2, 2, 2, 0]])
    with backend(name):
        packed = attend(q, k, v, jnp.asarray(segments), positions_of(segments))
        for span in (slice(0, 3), slice(3, 7)):
            alone = attend(q[:, span], k[:, span], v[:, span], *one_document(1, span.stop - span.start))
            np.testing.assert_allclose(packed[:, span], alone, rtol=1e-6, atol=1e-6)


def test_bfloat16_sums_in_float32():
    q, k, v = inputs(3, 1, 512, 1, 1, 64)
    exact = attend(q, k, v, *one_document(1, 512))
    for name in BACKENDS:
        with backend(name):
            rough = attend(*(a.astype(jnp.bfloat16) for a in (q, k, v)), *one_document(1, 512))
        assert rough.dtype == jnp.bfloat16
        assert np.abs(rough.astype(jnp.float32) - exact).max() < 0.05 * np.abs(exact).max()


@settings(max_examples=3, deadline=None)
@given(st.integers(2, 11), st.sampled_from([None, 3]), st.sampled_from([None, 1.5]), st.integers(0, 99))
def test_gradients_of_every_input_agree(L, window, softcap, seed):
    """The tiled backward pass against JAX's gradient of the dense softmax, with sinks and a traced window."""
    q, k, v = inputs(seed, 2, L, 2, 2, 4, 6)
    segments = np.sort(np.random.default_rng(seed).integers(0, 3, (2, L)))[:, ::-1].copy()
    sinks = jnp.linspace(-1.0, 1.0, 4)
    weight = jax.random.normal(jax.random.key(seed), (2, L, 4, 6))

    def gradients(name):
        def total(q, k, v, sinks, window):
            out = attend(q, k, v, jnp.asarray(segments), positions_of(segments), window, softcap, 0.4, sinks)
            return jnp.sum(weight * out)

        with backend(name), pytest.MonkeyPatch.context() as patch:
            patch.setattr(blocks, "TILE", 4)
            return jax.jit(jax.grad(total, (0, 1, 2, 3)))(q, k, v, sinks, window)

    for a, b in zip(gradients("xla"), gradients("dense"), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-6 * max(1, float(np.abs(b).max())))


def test_order_of_tokens_does_not_matter_to_dense():
    q, k, v = inputs(5, 1, 8, 1, 2, 4)
    segments, order = jnp.array([[1, 1, 1, 2, 2, 2, 2, 0]]), np.random.default_rng(0).permutation(8)
    positions = positions_of(np.asarray(segments))
    with use_reference():
        there = attend(q, k, v, segments, positions)[:, order]
        here = attend(*(a[:, order] for a in (q, k, v, segments, positions)))
    np.testing.assert_allclose(here, there, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kv_heads", [2, 8])
def test_heads_sharded_over_more_devices_than_kv_heads(kv_heads):
    """Tensor 4: eight query heads are sharded, two kv heads are not; queries are never gathered."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "tensor"))
    q, k, v = inputs(4, 2, 16, kv_heads, 8 // kv_heads, 4)
    tokens = one_document(2, 16)
    kv = P("data", None, "tensor" if kv_heads == 8 else None)
    specs = (P("data", None, "tensor"), kv, kv)
    shardings = tuple(NamedSharding(mesh, spec) for spec in specs)

    def forward(q, k, v):
        return attend(q, k, v, *tokens)

    def total(q, k, v):
        return jnp.sum(jnp.cos(forward(q, k, v)))

    both = jax.jit(
        lambda *a: (forward(*a), jax.grad(total, (0, 1, 2))(*a)),
        in_shardings=shardings, out_shardings=(shardings[0], shardings),
    ).lower(q, k, v).compile()  # fmt: skip
    gathered = re.findall(r"= f32\[([\d,]*)\]\S* all-gather\(", both.as_text())
    assert set(gathered) <= {"1,16,2,4"}, gathered  # gradients of unsharded kv heads; nothing of the size of queries
    expected = (forward(q, k, v), jax.grad(total, (0, 1, 2))(q, k, v))
    actual = both(*map(jax.device_put, (q, k, v), shardings))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6), actual, expected)


FIVE = ("data", "pipe", "tensor", "seq", "expert")


@pytest.mark.parametrize("kv_heads", [2, 8])
def test_tiles_run_on_each_device_under_the_map_over_replicas(kv_heads):
    """Data 2 deferred by a vmap, tensor 4: gradients are those of one device."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 1, 4, 1, 1), FIVE)
    rules = resolve_rules(RulesConfig(preset=["tensor"]))
    q, k, v = inputs(4, 4, 16, kv_heads, 8 // kv_heads, 4)
    sinks, tokens = jnp.linspace(-1.0, 1.0, 8), one_document(4, 16)

    def total(q, k, v, sinks, *tokens):
        return jnp.sum(jnp.cos(attend(q, k, v, *tokens, jnp.int32(5), sinks_H=sinks)))

    def mapped(q, k, v, sinks, *tokens):
        with use_rules(rules, mesh, without=("data",)), backend("xla"):
            by_replica = [a.reshape(2, 2, *a.shape[1:]) for a in (q, k, v, *tokens)]
            each = jax.vmap(
                jax.value_and_grad(total, (0, 1, 2, 3)), (0, 0, 0, None, 0, 0), spmd_axis_name="data"
            )(*by_replica[:3], sinks, *by_replica[3:])  # fmt: skip
            value, (dq, dk, dv, dsinks) = each
        return value.sum(), [a.reshape(4, *a.shape[2:]) for a in (dq, dk, dv)], dsinks.sum(0)

    got = jax.jit(mapped)(q, k, v, sinks, *tokens)
    with use_reference():
        value, (*want, dsinks) = jax.value_and_grad(total, (0, 1, 2, 3))(q, k, v, sinks, *tokens)
    for a, b in zip(jax.tree.leaves(got), (value, *want, dsinks), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-6 * max(1, float(np.abs(b).max())))


def test_saved_output_is_not_recomputed():
    """remat.names [attention_out]: the backward pass does not run the forward pass again."""
    q, k, v = inputs(6, 1, 16, 1, 2, 4)
    tokens = one_document(1, 16)

    def exponentials(policy):
        def f(q, k, v):
            return jnp.sum(attend(jnp.sin(q), k, v, *tokens))

        with backend("xla"):
            return str(jax.make_jaxpr(jax.value_and_grad(jax.checkpoint(f, policy=policy)))(q, k, v)).count(" exp ")

    policies = jax.checkpoint_policies
    assert exponentials(policies.save_only_these_names("attention_out")) == 2 + 1  # forward, backward
    assert exponentials(policies.nothing_saveable) == 2 + 2 + 1


CPU = AttentionRequest("cpu", None, 512, (64, 64), "float32")
HOPPER = AttentionRequest("gpu", 9.0, 8192, (128, 128), "bfloat16")


@pytest.mark.parametrize(("request_", "expected"), [
    (CPU, "dense"),
    (CPU._replace(length=32_768), "xla"),
    (CPU._replace(context_method="ring"), "xla"),
    (AttentionRequest("tpu", None, 512, (128, 128), "bfloat16"), "xla"),
    (HOPPER._replace(dtype="float32"), "xla"),
    (HOPPER._replace(capability=8.0), "xla"),
    (HOPPER._replace(capability=8.0, packed=False), "cudnn"),
])  # fmt: skip
def test_auto_chooses_the_first_that_can(request_, expected):
    choice = choose("auto", request_)
    assert choice.backend.name == expected
    assert all(
        f"not {b.name}: " in choice.reason for b in attention.BACKENDS[: attention.BACKENDS.index(choice.backend)]
    )


@pytest.mark.parametrize(
    "changed", [{}, {"window": True}, {"softcap": True, "sinks": True}, {"context_method": "ring"}]
)
def test_auto_on_hopper_is_tokamax_for_packed_sequences(changed, monkeypatch):
    monkeypatch.setattr(attention, "find_spec", lambda name: name)
    assert choose("auto", HOPPER._replace(**changed)).backend.name == "tokamax"


@pytest.mark.parametrize(("wanted", "request_", "why", "able"), [
    ("tokamax", CPU, "NVIDIA GPUs of compute capability 9", "dense, xla"),
    ("tokamax", HOPPER._replace(dtype="float32"), "float32", "dense, xla"),
    ("cudnn", HOPPER, "documents of a packed sequence", "xla"),
    ("cudnn", HOPPER._replace(packed=False, window=True), "windows", "xla"),
    ("cudnn", HOPPER._replace(packed=False, widths=(60, 60)), "multiples of 8", "xla"),
    ("dense", CPU._replace(context_method="ring"), "mesh.seq", "xla"),
])  # fmt: skip
def test_unsupported_backend_is_an_error_that_names_the_supported_ones(wanted, request_, why, able):
    with pytest.raises(ConfigError, match=re.escape(f"attention.backend {wanted} cannot be used")) as error:
        choose(wanted, request_)
    assert why in str(error.value) and str(error.value).endswith(able)


def test_unsupported_backend_is_an_error_in_attend():
    with backend("cudnn"), pytest.raises(ConfigError, match=r"attention\.backend cudnn"):
        attend(*inputs(0, 1, 4, 1, 1, 8), *one_document(1, 4))
