"""Stacks of several kinds of layers: order, residual stream, windows, segments of remat."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from jaxtrain.config import ConfigError, ModelConfig, RematConfig
from jaxtrain.nn.block import Block
from jaxtrain.nn.layer_table import LayerData, LayerSlot, layer_runs, layer_table, layers_of, mixture_layers
from jaxtrain.nn.layers import BatchContext
from jaxtrain.nn.model import build
from jaxtrain.ops import rope
from jaxtrain.ops.norm import rms_norm

TINY = {
    "vocab_size": 32, "d_model": 16, "n_layers": 6, "n_heads": 2, "head_dim": 8, "d_ff": 24, "max_seq_len": 16,
    "init_std": 0.3,
}  # fmt: skip
MOE = {"experts": 4, "top_k": 2, "d_ff": 12}


def config_of(**changes):
    moe = {**MOE, **changes.pop("moe", {})}
    return ModelConfig.model_validate({**TINY, "moe": moe, **changes})


def batch(seed=0, B=2, L=10):
    tokens = np.random.default_rng(seed).integers(0, 32, (B, L)).astype(np.int32)
    segments = np.broadcast_to(np.array([1] * 6 + [2] * 3 + [0], np.int32), (B, L))
    positions = np.broadcast_to(np.array([*range(6), *range(3), 0], np.int32), (B, L))
    return tokens, positions, segments


@given(first=st.integers(0, 4), every=st.integers(1, 4), periods=st.integers(1, 3))
def test_order_is_that_of_the_settings(first, every, periods):
    n = first + every * periods
    config = config_of(n_layers=n, windows=[3, None], moe={"first_dense": first, "every": every})
    order = []
    for run in layer_runs(config):
        rows_of = {stack: np.arange(layers_of(config, stack)) for stack, _ in run.pattern}
        assert all(len(rows_of[stack][rows]) == run.periods for stack, rows in run.pattern)
        order += [(stack, rows_of[stack][rows][p]) for p in range(run.periods) for stack, rows in run.pattern]
    mixture = [i >= first and (i - first) % every == every - 1 for i in range(n)]
    assert [stack == "layers" for stack, _ in order] == mixture
    for stack in ("layers", "dense_layers"):
        assert [row for name, row in order if name == stack] == list(range(layers_of(config, stack)))
    table = layer_table(config)
    assert [(slot.stack, slot.row) for slot in table] == order
    assert [slot.window for slot in table] == [[3, None][i % 2] for i in range(n)]
    assert [slot.mixture for slot in table if slot.mixture is not None] == list(range(periods))


def test_a_dense_model_is_one_stack():
    params = build(ModelConfig.model_validate(TINY)).params
    assert {"layers", "embed", "norm", "head"} == {*params}
    assert params["layers"]["mlp"]["up"]["weight"].shape == (6, 16, 24)


def test_the_last_layer_is_a_mixture():
    with pytest.raises(ConfigError, match=r"model\.moe\.first_dense 1.*model\.moe\.every 2.*n_layers 6"):
        build(config_of(moe={"first_dense": 1, "every": 2}))
    with pytest.raises(ConfigError, match=r"first_dense 6"):
        build(config_of(moe={"first_dense": 6}))


@pytest.mark.parametrize("moe", [{"first_dense": 2, "every": 2}])
def test_layers_run_in_their_order(moe):
    """The stream equals blocks applied one by one, each with its row of its stack and its window."""
    config = config_of(windows=[3, None, 2, 1], moe=moe)
    model = build(config)
    params = jax.jit(model.init)(jax.random.key(0))
    tokens, positions, segments = batch()
    first, every = config.moe.first_dense, config.moe.every
    mixtures = [i >= first and (i - first) % every == every - 1 for i in range(6)]
    graphs = {
        mixture: nnx.split(Block(config, nnx.Rngs(0), LayerSlot("", 0, None, 0 if mixture else None)))[0]
        for mixture in (False, True)
    }

    def by_hand(params):
        context = BatchContext(segments, positions, rope.tables(positions, rope.frequencies(8, 10_000.0)))
        taken, loads = {False: 0, True: 0}, []
        x = params["embed"]["tokens"][tokens]
        for i, mixture in enumerate(mixtures):
            layer = jax.tree.map(lambda a, row=taken[mixture]: a[row], params["layers" if mixture else "dense_layers"])
            x, report = nnx.merge(graphs[mixture], layer)(x, context, LayerData([3, None, 2, 1][i % 4]))
            taken[mixture] += 1
            loads += [report["load"]] if mixture else []
            assert bool(report) == mixture
        return rms_norm(x, params["norm"]["scale"], config.norm_eps), jnp.stack(loads)

    got, stats = jax.jit(model.hidden)(params, tokens, positions, segments)
    x, loads = jax.jit(by_hand)(params)
    np.testing.assert_allclose(got, x, rtol=2e-4, atol=2e-5)
    np.testing.assert_array_equal(stats["load"], loads)
    assert mixture_layers(config) == {("layers", "mlp"): sum(mixtures)}


@pytest.mark.parametrize(
    ("moe", "remat"),
    [
        ({"every": 2}, RematConfig(policy="full", every=2)),
        ({"first_dense": 2}, RematConfig(policy="dots", every=2)),
        ({"first_dense": 1}, RematConfig(policy="names", names=["qkv", "attention_residual"])),
    ],
)
def test_remat_changes_no_gradient(moe, remat):
    model = build(config_of(moe={**moe, "balance_weight": 0.1}))
    params = jax.jit(model.init)(jax.random.key(0))

    def loss(params, remat):
        x, stats = model.hidden(params, *batch(), remat)
        return jnp.sum(jnp.cos(x)) + jnp.sum(stats["objective"])

    grad = jax.value_and_grad(loss)
    value, gradient = jax.jit(lambda p: grad(p, RematConfig()))(params)
    again, other = jax.jit(lambda p: grad(p, remat))(params)
    np.testing.assert_allclose(again, value, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(other), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize(("moe", "every"), [({"every": 2}, 3), ({"first_dense": 2}, 3), ({"first_dense": 1}, 2)])
def test_remat_segments_divide_runs(moe, every):
    model = build(config_of(moe=moe))
    with pytest.raises(ConfigError, match=rf"remat\.every {every}.*use remat\.every 1"):
        model.hidden(model.params, *batch(), RematConfig(policy="full", every=every))


@pytest.mark.parametrize("remat", [{"policy": "full"}, {"policy": "dots"}, {"policy": "names", "names": ["qkv"]}])
def test_the_backward_pass_uses_the_choice_of_the_forward(remat):
    """Experts are chosen once: the program of the gradient has as many top_k as without rematerialisation."""
    model = build(config_of(n_layers=2))
    params = jax.eval_shape(model.init, jax.random.key(0))

    def choices(remat):
        def total(params):
            return jnp.sum(model.hidden(params, *batch(), RematConfig.model_validate(remat))[0])

        return str(jax.make_jaxpr(jax.grad(total))(params)).count(" top_k[")

    assert choices(remat) == choices({"policy": "none"}) > 0
