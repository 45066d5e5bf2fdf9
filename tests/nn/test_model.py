"""The model as a whole: published sizes, initialisation, packing, layer patterns, equal values on any mesh."""

import math
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from jaxtrain.config import AXES, CONFIG_ROOT, ModelConfig, RematConfig, RulesConfig, load_config
from jaxtrain.mesh.constraints import use_rules
from jaxtrain.mesh.resolution import spec_for
from jaxtrain.mesh.rules import NAMES, resolve_rules
from jaxtrain.nn.model import build
from jaxtrain.ops.loss import cross_entropy

TINY = ModelConfig(vocab_size=64, d_model=32, n_layers=4, n_heads=8, n_kv_heads=2, head_dim=4, d_ff=48, max_seq_len=32)
PUBLISHED = {
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "qwen3_8b": 8_190_735_360,
    "mistral_7b": 7_241_732_096,
    "gpt2": 124_439_808,
    # 12 n d^2 + 13 n d + (V + P) d + 2 d
    "gpt3_175b": 12 * 96 * 12288**2 + 13 * 96 * 12288 + (50257 + 2048) * 12288 + 2 * 12288,
    "mixtral_8x7b": 46_702_792_704,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    # The released main model, and its block of multi-token prediction: 11.6 billion (printed as 11.5) without the
    # embedding and head that it shares.
    "deepseek_v3": 671_026_419_200 + 11_610_068_224,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
}


def variant(**changes):
    return ModelConfig.model_validate({**TINY.model_dump(), **changes})


def batch(seed=0, B=8, L=16):
    tokens = np.random.default_rng(seed).integers(0, TINY.vocab_size, (B, L)).astype(np.int32)
    segments = np.repeat([[1, 2, 2, 0]], L // 4, axis=1).repeat(B, axis=0).astype(np.int32)
    positions = np.concatenate([np.arange(L // 4), np.arange(L // 2), np.zeros(L // 4)]).astype(np.int32)
    return tokens, np.broadcast_to(positions, (B, L)), segments


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameter_counts(name):
    config = load_config(f"models/{name}").model
    assert build(config).count() == PUBLISHED[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_shipped_run_fits_its_mesh_and_memory(name):
    """Every parameter's spec is free of findings, and 16 bytes a parameter fit the devices."""
    config = load_config(name)
    rules, params = resolve_rules(config.rules), build(config.model).params
    devices = config.mesh.data * config.mesh.tensor * config.mesh.expert
    assert devices == config.cluster.nodes * config.cluster.devices_per_node
    for path, param in jax.tree.leaves_with_path(params):
        assert not spec_for(param, rules, config.mesh.sizes, jax.tree_util.keystr(path)).findings
    assert 16 * build(config.model).count() / devices < 0.6e9 * config.cluster.memory_gb


def test_every_model_has_a_published_count():
    assert {path.stem for path in Path(CONFIG_ROOT, "models").glob("*.yaml")} == {*PUBLISHED}


def test_names_are_those_of_the_rules():
    config = variant(positions="learned", norm="layernorm", qkv_bias=True, out_bias=True, mlp_bias=True, qk_norm=True)
    params = build(config).params
    assert {name for p in jax.tree.leaves(params) for name in p.names} <= {*NAMES}
    attention = params["layers"]["attention"]
    assert attention["query"]["bias"].names == ("layers", "heads", "head_dim")
    assert attention["key"]["weight"].names == ("layers", "embed", "kv_heads", "head_dim")
    assert attention["key"]["weight"].shape == (4, 32, 2, 4)
    assert attention["out"]["bias"].names == ("layers", "norm")
    assert attention["query_norm"]["scale"].names == ("layers", "head_dim")
    assert params["embed"]["positions"].names == ("positions", "embed")
    assert params["head"]["weight"].names == ("embed", "vocab")


def test_initialisation():
    model = build(variant(d_model=64, vocab_size=512, mlp_bias=True))
    params = jax.jit(model.init)(jax.random.key(0))
    shapes = jax.tree.map(
        lambda array, param: (array.shape, array.dtype) == (param.shape, "float32"), params, model.params
    )
    assert all(jax.tree.leaves(shapes))
    layers = params["layers"]
    np.testing.assert_allclose(np.std(params["embed"]["tokens"]), 0.02, rtol=0.05)
    np.testing.assert_allclose(np.std(layers["mlp"]["up"]["weight"]), 0.02, rtol=0.05)
    np.testing.assert_allclose(np.std(layers["mlp"]["down"]["weight"]), 0.02 / math.sqrt(8), rtol=0.05)
    assert (layers["mlp"]["up"]["bias"] == 0).all() and (layers["mlp_norm"]["scale"] == 1).all()
    up = np.asarray(layers["mlp"]["up"]["weight"]).reshape(4, -1)
    assert np.abs(np.corrcoef(up) - np.eye(4)).max() < 0.1  # no layer repeats another
    other = model.init(jax.random.key(1))
    assert not np.allclose(other["head"]["weight"], params["head"]["weight"])


def test_tied_head_is_the_transposed_embedding():
    model = build(variant(tied_head=True))
    params = model.init(jax.random.key(0))
    assert "head" not in params
    np.testing.assert_array_equal(model.head(params), params["embed"]["tokens"].T)


@pytest.mark.parametrize("positions", ["rope", "learned", "none"])
def test_a_packed_sequence_equals_its_documents_alone(positions):
    model = build(variant(positions=positions, activation="relu2", logit_softcap=5.0, attention_softcap=3.0))
    params = model.init(jax.random.key(0))
    tokens, positions_BL, segments = batch(B=1)
    packed = model.logits(params, tokens, positions_BL, segments)
    for span in (slice(0, 4), slice(4, 12)):
        ids = tokens[:, span]
        alone = model.logits(params, ids, np.arange(ids.shape[1])[None], np.ones_like(ids))
        np.testing.assert_allclose(packed[:, span], alone, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(("windows", "reach"), [([3, 1, 1], 4), ([2], 4), ([1], 0), ([1, None], 15)])
def test_window_pattern_repeats_over_layers(windows, reach):
    """A layer of window w reaches w - 1 tokens back; four layers reach as far as their sum, and not one further."""
    model = build(variant(windows=windows, init_std=0.2))
    params = model.init(jax.random.key(0))
    tokens, last = batch(B=1)[0], 15
    ids = (np.arange(16)[None], np.ones((1, 16), np.int32))
    hidden = jax.jit(model.hidden)
    before = hidden(params, tokens, *ids)[0][0, last]
    for distance in range(16):
        changed = tokens.copy()
        changed[0, last - distance] ^= 1
        moved = np.abs(hidden(params, changed, *ids)[0][0, last] - before).max()
        assert (moved > 0) == (distance <= reach), (distance, moved)


MESHES = {
    "fsdp": ({"data": 8}, ["fsdp"]),
    "tensor": ({"data": 2, "tensor": 4}, ["tensor"]),
    "tensor_sequence": ({"data": 2, "tensor": 4}, ["tensor_sequence"]),
    "fsdp x tensor_sequence": ({"data": 4, "tensor": 2}, ["fsdp", "tensor_sequence"]),
    "hybrid_fsdp": ({"data": 4, "tensor": 2}, ["hybrid_fsdp"]),
}


@pytest.fixture(scope="module")
def single():
    model = build(TINY)
    params = jax.jit(model.init)(jax.random.key(0))
    return model, params, jax.jit(jax.value_and_grad(_loss(model)))(params)


def _loss(model):
    tokens, positions, segments = batch()
    labels = np.where(np.roll(segments, -1, 1) == segments, np.roll(tokens, -1, 1), -1)
    labels = np.where(segments == 0, -1, labels)

    def loss(params):
        x, _ = model.hidden(params, tokens, positions, segments, RematConfig(policy="full"))
        total, count = cross_entropy(x, model.head(params), labels)
        return total / count

    return loss


@pytest.mark.parametrize("name", MESHES)
def test_equal_parameters_loss_and_gradient_on_any_mesh(single, name):
    model, params, expected = single
    wanted, preset = MESHES[name]
    sizes = {axis: wanted.get(axis, 1) for axis in AXES}
    mesh, rules = (
        Mesh(np.array(jax.devices()).reshape(*sizes.values()), AXES),
        resolve_rules(RulesConfig(preset=preset)),
    )
    specs = jax.tree.map(lambda p: NamedSharding(mesh, spec_for(p, rules, sizes).spec), model.params)
    initial = jax.jit(model.init, out_shardings=specs)(jax.random.key(0))
    # The same random bits; erfinv may round the last bit otherwise where a shard's loop ends.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), initial, params)

    def step(params):
        with use_rules(rules, mesh):
            return jax.value_and_grad(_loss(model))(params)

    loss, gradient = jax.jit(step, out_shardings=(None, specs))(initial)
    np.testing.assert_allclose(loss, expected[0], rtol=2e-6)
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * np.abs(b).max())
