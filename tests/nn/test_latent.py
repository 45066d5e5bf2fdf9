"""Latent attention, sinks and the clipped nonlinearity against their definitions in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.config import ConfigError, ModelConfig
from jaxtrain.nn.activations import clipped_swiglu
from jaxtrain.nn.layers import BatchContext
from jaxtrain.nn.mla import LatentAttention
from jaxtrain.nn.model import build
from jaxtrain.ops import rope
from jaxtrain.ops.attention import attend

D, H, E, P, V, R, Q = 12, 3, 4, 2, 5, 6, 7
L = 8


def config_of(**changes):
    mla = {"kv_rank": R, "q_rank": Q, "rope_dim": P, "v_dim": V, **changes.pop("mla", {})}
    sizes = {"vocab_size": 16, "d_model": D, "n_layers": 1, "n_heads": H, "head_dim": E, "d_ff": 8, "init_std": 0.5}
    return ModelConfig.model_validate({**sizes, "mla": mla, **changes})


def by_hand(params, x, config, scale, window=L):
    """DeepSeek-V2 equations 37-47 for one document, heads and queries one by one."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    x = np.asarray(x, np.float64)

    def rms(y, s):
        return y / np.sqrt(np.mean(y * y, -1, keepdims=True) + config.norm_eps) * s["scale"]

    def rotated(y, position):
        angle = position * config.rope.theta ** (-2 * np.arange(P // 2) / P)
        low, high = y[: P // 2], y[P // 2 :]
        return np.concatenate([low * np.cos(angle) - high * np.sin(angle), high * np.cos(angle) + low * np.sin(angle)])

    if config.mla.q_rank:
        latent = rms(x @ p["query_down"]["weight"], p["query_latent_norm"])
        queries = np.einsum("lr,rhe->lhe", latent, p["query_up"]["weight"])
    else:
        queries = np.einsum("ld,dhe->lhe", x, p["query"]["weight"])
    down = x @ p["kv_down"]["weight"]
    kv = np.einsum("lr,rhe->lhe", rms(down[:, :R], p["kv_latent_norm"]), p["kv_up"]["weight"])
    out = np.zeros((L, D))
    for h in range(H):
        for i in range(L):
            q = np.concatenate([queries[i, h, :E], rotated(queries[i, h, E:], i)])
            visible = range(max(0, i - window + 1), i + 1)
            scores = np.array([q @ np.concatenate([kv[j, h, :E], rotated(down[j, R:], j)]) for j in visible]) * scale
            weights = np.exp(scores - scores.max())
            out[i] += weights / weights.sum() @ kv[list(visible), h, E:] @ p["out"]["weight"][h]
    return out


@pytest.mark.parametrize(
    ("changes", "scale"),
    [({}, (E + P) ** -0.5), ({"mla": {"q_rank": 0}}, (E + P) ** -0.5), ({"attention_scale": 0.7}, 0.7)],
)
def test_latent_attention_is_that_of_the_paper(changes, scale):
    config = config_of(**changes)
    module = LatentAttention(config, nnx.Rngs(0))
    for norm in ("kv_latent_norm", "query_latent_norm"):
        if hasattr(module, norm):
            scales = getattr(module, norm).scale
            scales[...] = scales[...] + 0.3 * np.arange(scales.shape[0])
    graph, state = nnx.split(module)
    params = nnx.to_pure_dict(state)
    x = jax.random.normal(jax.random.key(1), (1, L, D))
    positions = np.arange(L)[None]

    def run(params, window):
        context = BatchContext(
            jnp.ones_like(positions), positions, rope.tables(positions, *rope.scaled(config.mla.rope_dim, config.rope))
        )
        return nnx.merge(graph, params)(x, context, window)

    for window in (L, 3):
        got = jax.jit(run)(params, window)[0]
        np.testing.assert_allclose(got, by_hand(params, x[0], config, scale, window), rtol=2e-4, atol=2e-5)


def test_names_and_shapes_of_latent_attention():
    attention = build(config_of()).params["layers"]["attention"]
    shapes = {f"{part}.{kind}": param.shape[1:] for part, kinds in attention.items() for kind, param in kinds.items()}
    assert shapes == {
        "query_down.weight": (D, Q), "query_latent_norm.scale": (Q,), "query_up.weight": (Q, H, E + P),
        "kv_down.weight": (D, R + P), "kv_latent_norm.scale": (R,), "kv_up.weight": (R, H, E + V),
        "out.weight": (H, V, D),
    }  # fmt: skip
    assert attention["kv_down"]["weight"].names == ("layers", "embed", "whole")
    assert {*build(config_of(mla={"q_rank": 0})).params["layers"]["attention"]} == {
        "query", "kv_down", "kv_latent_norm", "kv_up", "out",
    }  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [{"n_kv_heads": 1}, {"qkv_bias": True}, {"qk_norm": True}, {"attention_sinks": True}, {"mla": {"rope_dim": 3}}],
)
def test_settings_that_latent_attention_lacks_are_errors(changes):
    with pytest.raises(ConfigError, match=r"model\.(mla|n_kv)"):
        build(config_of(**changes))


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 2), st.sampled_from([1, 3]), st.integers(0, 99), st.sampled_from([None, 2]))
def test_sinks_join_the_softmax_and_add_nothing(K, G, seed, window):
    keys = jax.random.split(jax.random.key(seed), 4)
    q = jax.random.normal(keys[0], (2, 5, K * G, 4))
    k, v = jax.random.normal(keys[1], (2, 5, K, 4)), jax.random.normal(keys[2], (2, 5, K, 3))
    sinks = 2 * jax.random.normal(keys[3], (K * G,))
    segments, positions = np.array([[1, 1, 1, 2, 2], [1, 1, 0, 0, 0]]), np.array([[0, 1, 2, 0, 1], [0, 1, 0, 0, 0]])
    got = jax.jit(attend, static_argnums=(5, 6, 7))(q, k, v, segments, positions, window, None, 0.3, sinks)
    want = np.zeros((2, 5, K * G, 3))
    for b, i, h in np.ndindex(2, 5, K * G):
        visible = [j for j in range(max(0, i - (window or 5) + 1), i + 1) if segments[b, j] == segments[b, i] > 0]
        powers = np.exp(0.3 * np.asarray(k, np.float64)[b, visible, h // G] @ np.asarray(q, np.float64)[b, i, h])
        want[b, i, h] = (
            powers @ np.asarray(v, np.float64)[b, visible, h // G] / (powers.sum() + np.exp(float(sinks[h])))
        )
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)


def test_a_sink_learns():
    config = ModelConfig.model_validate({"vocab_size": 16, "d_model": 8, "n_layers": 2, "n_heads": 2, "d_ff": 8,
                                         "attention_sinks": True})  # fmt: skip
    model = build(config)
    assert model.params["layers"]["attention"]["sinks"].names == ("layers", "heads")
    params = jax.jit(model.init)(jax.random.key(0))
    ids = np.arange(6, dtype=np.int32)[None]
    gradient = jax.jit(jax.grad(lambda p: model.hidden(p, ids, ids, np.ones_like(ids))[0][0, :, 0].sum()))(params)
    assert np.abs(gradient["layers"]["attention"]["sinks"]).min() > 0


@pytest.mark.parametrize(
    ("gate", "up", "want"),
    [
        (0.0, 3.0, 0.0),
        (1.0, 2.0, 3.0 / (1 + np.exp(-1.702))),
        (9.0, 0.0, 7.0 / (1 + np.exp(-1.702 * 7))),  # the gate is clipped from above
        (-9.0, 0.0, -9.0 / (1 + np.exp(1.702 * 9))),  # and not from below
        (1.0, 20.0, 8.0 / (1 + np.exp(-1.702))),
        (1.0, -20.0, -6.0 / (1 + np.exp(-1.702))),
    ],
)
def test_clipped_swiglu(gate, up, want):
    np.testing.assert_allclose(clipped_swiglu(jnp.float32(gate), jnp.float32(up)), want, rtol=1e-5, atol=1e-12)
