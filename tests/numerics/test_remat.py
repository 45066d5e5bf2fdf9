"""Remat policies: same gradients, different residuals; names without effect are errors."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.config import ConfigError, ModelConfig, RematConfig
from jaxtrain.nn.activations import ACTIVATIONS
from jaxtrain.nn.model import build
from jaxtrain.numerics.remat import NAMES, check_remat, names_of

CONFIG = ModelConfig(vocab_size=64, d_model=32, n_layers=4, n_heads=4, n_kv_heads=2, d_ff=48, max_seq_len=16)
POLICIES = {
    "none": RematConfig(),
    "dots": RematConfig(policy="dots"),
    "names": RematConfig(policy="names", names=["qkv", "mlp_up"]),
    "full": RematConfig(policy="full"),
    "full, two layers": RematConfig(policy="full", every=2),
    "names, two layers": RematConfig(policy="names", names=["attention_residual"], every=2),
}


@pytest.fixture(scope="module")
def setting():
    model = build(CONFIG)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 64, (2, 16))
    positions_and_segments = (np.tile(np.arange(8), (2, 2)), np.repeat([[1, 2], [1, 0]], 8, axis=1))
    params = model.init(jax.random.key(0))

    def loss(remat):
        return lambda params: jnp.sum(jnp.sin(model.hidden(params, tokens, *positions_and_segments, remat)[0]))

    return params, loss


@pytest.mark.parametrize("name", list(POLICIES)[1:])
def test_gradients_are_the_same(setting, name):
    params, loss = setting
    expected = jax.jit(jax.grad(loss(RematConfig())))(params)
    actual = jax.jit(jax.grad(loss(POLICIES[name])))(params)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * np.abs(b).max())


def test_each_policy_saves_a_different_amount(setting):
    params, loss = setting
    # The leaves of a pullback are its residuals.
    saved = {
        name: sum(leaf.size for leaf in jax.tree.leaves(jax.vjp(loss(remat), params)[1]))
        for name, remat in POLICIES.items()
    }
    order = ["none", "dots", "names", "full", "full, two layers"]
    assert all(saved[a] > saved[b] for a, b in itertools.pairwise(order)), saved
    # More than full: q, k, v (32 + 16 + 16 per token) and mlp_up (48), for 2 x 16 tokens and 4 layers.
    assert saved["names"] - saved["full"] == 2 * 16 * 4 * (32 + 16 + 16 + 48)


@pytest.mark.parametrize(
    "changes",
    [
        *({"activation": name, "qk_norm": True} for name in ("swiglu", "gelu", "relu2", "swiglu_oss")),
        {"moe": {"experts": 4}},
        {"moe": {"experts": 4, "first_dense": 1}, "n_kv_heads": None, "mla": {"kv_rank": 8, "q_rank": 8}},
    ],
)
def test_names_of_are_the_names_that_the_blocks_produce(changes):
    config = ModelConfig.model_validate({**CONFIG.model_dump(), **changes})
    model = build(config)
    ids = jnp.zeros((1, 4), jnp.int32)
    params = jax.eval_shape(model.init, jax.random.key(0))
    jaxpr = jax.make_jaxpr(lambda p: model.hidden(p, ids, ids, ids))(params)
    assert {*names_of(config, ACTIVATIONS[config.activation].gated)} == {
        name for name in NAMES if f"name={name}\n" in f"{jaxpr}".replace("]", "\n")
    }


@pytest.mark.parametrize(
    ("remat", "model", "words"),
    [
        (RematConfig(policy="names"), CONFIG, ["remat.names is empty", "qkv"]),
        (RematConfig(policy="names", names=["mlp_upp"]), CONFIG, ["'mlp_upp'", "did you mean mlp_up?"]),
        (RematConfig(policy="full", names=["qkv"]), CONFIG, ["remat.names", "no effect", "full"]),
        (
            RematConfig(policy="names", names=["mlp_gate"]),
            ModelConfig(activation="gelu"),
            ["'mlp_gate'", "model.activation gelu", "mlp_up"],
        ),
    ],
)
def test_names_without_effect_are_errors(remat, model, words):
    with pytest.raises(ConfigError) as caught:
        check_remat(remat, model, ACTIVATIONS[model.activation].gated)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_hidden_checks_the_names(setting):
    _, loss = setting
    with pytest.raises(ConfigError, match=r"remat\.names is empty"):
        loss(RematConfig(policy="names"))({})
