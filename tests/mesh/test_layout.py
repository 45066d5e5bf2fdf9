"""ZeRO stages as shardings: closed forms, what jax itself stores, random shapes and rules."""

import math

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.config import (
    AXES,
    ClusterConfig,
    ConfigError,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RulesConfig,
)  # fmt: skip
from jaxtrain.mesh.layout import build_layout, bytes_per_device, extend_spec, flatten_paths, local_shape
from jaxtrain.mesh.param import Param, spec_axes
from jaxtrain.mesh.rules import PRESETS, resolve_rules
from jaxtrain.mesh.topology import build_topology
from jaxtrain.nn.model import build
from jaxtrain.optim import build_optimizer


def sizes(**given):
    return dict.fromkeys(AXES, 1) | given


def plan(params, preset, given, separate_master_params=True, **entries):
    rules = resolve_rules(RulesConfig(preset=preset, **entries))
    return build_layout(params, rules, sizes(**given), separate_master_params)


# 8e9 elements; every dimension that FSDP cuts divides by 64.
EIGHT_BILLION = {
    "embed": {"tokens": Param((128_000, 6_400), ("vocab", "embed"))},
    "layers": {
        "up": Param((25, 6_400, 44_864), ("layers", "embed", "mlp")),
        "norm": Param((25, 6_400), ("layers", "norm")),
    },
    "rest": Param((2_400_000,), ("embed",)),
}


@pytest.mark.parametrize(
    ("preset", "data", "gigabytes"),
    [("ddp", 8, 128), ("zero1", 8, 44), ("zero2", 8, 30), ("fsdp", 8, 16), ("zero3", 64, 2), ("ddp", 1, 128)],
)
def test_bytes_of_the_8b_table(preset, data, gigabytes):
    """Requirements 3: weight 2 + gradient 2 + master 4 + moments 8 bytes a parameter."""
    assert sum(param.size for param in jax.tree.leaves(EIGHT_BILLION)) == 8_000_000_000
    layout = plan(EIGHT_BILLION, [preset], {"data": data})
    parts = [(layout.weights, 2), (layout.gradients, 2), (layout.master_params, 4), (layout.optimizer, 8)]
    total = sum(bytes_per_device(EIGHT_BILLION, specs, layout.sizes, size) for specs, size in parts)
    assert total == gigabytes * 10**9


def test_without_separate_masters_weights_are_stored_as_used():
    layout = plan(EIGHT_BILLION, ["zero1"], {"data": 8}, separate_master_params=False)
    assert layout.master_params == layout.weights
    assert plan(EIGHT_BILLION, ["zero1"], {"data": 8}).master_params == layout.optimizer


@pytest.mark.parametrize(
    ("preset", "given", "batch", "deferred"),
    [
        (["ddp"], {"data": 8}, ("data",), ("data",)),
        (["zero2"], {"data": 4, "tensor": 2}, ("data",), ("data",)),
        (["fsdp"], {"data": 8}, ("data",), ()),
        (["hybrid_fsdp"], {"data": 2, "tensor": 4}, ("data", "tensor"), ("data",)),
        (["tensor"], {"data": 2, "tensor": 4}, ("data",), ("data",)),
        (["fsdp", "tensor"], {"data": 2, "tensor": 4}, ("data",), ()),
        (["fsdp"], {"data": 2, "expert": 4}, ("data", "expert"), ("expert",)),
        (["ddp"], {"tensor": 8}, (), ()),
    ],
)
def test_gradients_are_deferred_over_batch_axes_that_shard_no_weight(preset, given, batch, deferred):
    layout = plan(EIGHT_BILLION, preset, given, replicated_limit=10**7)
    assert layout.batch_axes == batch and layout.deferred_axes == deferred


# ---- where an extra axis goes


@pytest.mark.parametrize(
    ("param", "spec", "axes", "expected"),
    [
        # the largest whole dimension
        (Param((32, 256, 512), ("layers", "embed", "mlp")), P(None, None, None), ("data",), P(None, None, "data")),
        # a whole dimension before a larger sharded one
        (Param((32, 256, 512), ("layers", "embed", "mlp")), P(None, None, "tensor"), ("data",),
         P(None, "data", "tensor")),
        # a sharded one where only that divides
        (Param((32, 255, 512), ("layers", "embed", "mlp")), P(None, None, "tensor"), ("data",),
         P(None, None, ("tensor", "data"))),
        # stacked layers last, though larger
        (Param((512, 8), ("layers", "norm")), P(None, None), ("data",), P(None, "data")),
        (Param((512, 7), ("layers", "norm")), P(None, None), ("data",), P("data", None)),
        # axes already in use are not added again
        (Param((256, 512), ("embed", "mlp")), P("data", None), ("data",), P("data", None)),
        (Param((256, 512), ("embed", "mlp")), P("data", None), ("data", "tensor"), P("data", "tensor")),
        (Param((7,), ("norm",)), P(None), ("data",), None),
    ],
)  # fmt: skip
def test_an_extra_axis_takes_the_best_dimension(param, spec, axes, expected):
    assert extend_spec(param, spec, axes, sizes(data=8, tensor=2)) == expected


def test_state_that_cannot_be_sharded_is_a_finding_when_large():
    odd = {"w": Param((1001, 1003), ("embed", "mlp"))}
    with pytest.raises(ConfigError, match=r"w \(1001, 1003\): preset zero1 cannot shard its optimizer"):
        plan(odd, ["zero1"], {"data": 8})
    assert plan(odd, ["zero1"], {"data": 8}, allow=["state:w"]).optimizer == {"w": P(None, None)}
    assert plan({"w": Param((7,), ("norm",))}, ["zero2"], {"data": 8}).gradients == {"w": P(None)}


# ---- optimizer state

MODEL = ModelConfig(
    vocab_size=512, d_model=256, n_layers=3, n_heads=8, n_kv_heads=2, d_ff=384, qkv_bias=True, head_dim=32
)  # fmt: skip


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "muon"])
def test_every_leaf_of_an_optimizer_state_has_a_spec_that_divides(name):
    params = build(MODEL).params
    layout = plan(params, ["tensor", "zero1"], {"data": 2, "tensor": 4})
    arrays = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), params)
    optimizer = build_optimizer(OptimizerConfig(name=name), params)
    state = jax.eval_shape(optimizer.init, arrays)
    specs = layout.optimizer_specs(state, params)
    mesh = build_topology(MeshConfig(data=2, tensor=4), ClusterConfig()).mesh()
    shardings = jax.tree.map(lambda _, spec: NamedSharding(mesh, spec), state, specs)
    # jax refuses a sharding that does not divide; what it stores is the closed form.
    born = jax.jit(
        lambda: optimizer.init(jax.tree.map(lambda p: jnp.zeros(p.shape), params)), out_shardings=shardings
    )()
    device = jax.devices()[0]
    stored = sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(born)
        for shard in leaf.addressable_shards
        if shard.device == device
    )
    assert stored == bytes_per_device(state, specs, layout.sizes)
    moments = {"adamw": 2, "lion": 1}.get(name)
    if moments:
        assert stored - 4 * (name in ("adamw", "lion")) == moments * bytes_per_device(
            params, layout.optimizer, layout.sizes, 4
        )


def test_moments_take_the_parameters_optimizer_spec():
    params = {"layers": {"up": Param((4, 256, 512), ("layers", "embed", "mlp"))}, "norm": Param((256,), ("norm",))}
    layout = plan(params, ["tensor", "zero1"], {"data": 2, "tensor": 4})
    arrays = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), params)
    adam = layout.optimizer_specs(jax.eval_shape(optax.scale_by_adam().init, arrays), params)
    assert adam.count == P() and adam.mu == adam.nu == layout.optimizer
    assert adam.mu["layers"]["up"] == P(None, "data", "tensor") and adam.mu["norm"] == P("data")
    factored = layout.optimizer_specs(jax.eval_shape(optax.scale_by_factored_rms().init, arrays), params)
    assert factored.v_row["layers"]["up"] == P(None, "data")
    assert factored.v_col["layers"]["up"] == P(None, "tensor")
    assert factored.v["norm"] == P("data") and factored.v["layers"]["up"] == P()
    masked = {"layers": {"up": jax.ShapeDtypeStruct((4, 1, 512), jnp.float32)}}
    assert layout.optimizer_specs(masked, params) == {"layers": {"up": P(None, None, "tensor")}}


def test_an_unrecognised_leaf_is_a_finding():
    params = {"w": Param((256, 512), ("embed", "mlp"))}
    layout = plan(params, ["zero1"], {"data": 8})
    stray = {"mu": {"w": jax.ShapeDtypeStruct((512, 256), jnp.float32)}}
    with pytest.raises(ConfigError, match=r"optimizer state mu/w \(512, 256\) belongs to no parameter"):
        layout.optimizer_specs(stray, params)
    with pytest.raises(ConfigError, match="optimizer state other"):
        layout.optimizer_specs({"other": jax.ShapeDtypeStruct((4096,), jnp.float32)}, params)
    allowed = plan(params, ["zero1"], {"data": 8}, allow=["state:mu/*"])
    assert allowed.optimizer_specs(stray, params) == {"mu": {"w": P()}}


# ---- any shape, any rules

NAME = st.sampled_from(["embed", "norm", "heads", "kv_heads", "head_dim", "mlp", "vocab", "layers"])
AXES_SET = st.lists(st.sampled_from(AXES), unique=True, max_size=3)


@given(
    dims=st.lists(st.tuples(NAME, st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24])), min_size=1, max_size=4),
    given_sizes=st.sampled_from([(8, 1, 1, 1, 1), (2, 1, 4, 1, 1), (2, 2, 2, 1, 1), (1, 2, 2, 2, 1), (2, 1, 2, 1, 2)]),
    preset=st.lists(st.sampled_from(sorted(PRESETS)), max_size=3),
    entries=st.dictionaries(st.sampled_from(["embed", "mlp", "heads", "optimizer", "gradients"]), AXES_SET, max_size=3),
)
@settings(max_examples=150, deadline=None)
def test_specs_never_use_an_axis_twice_and_always_divide(dims, given_sizes, preset, entries):
    param = Param(tuple(n for _, n in dims), tuple(name for name, _ in dims))
    mesh_sizes = dict(zip(AXES, given_sizes, strict=True))
    allow = ["indivisible:*", "twice:*", "unmatched:*", "replicated:*", "state:*"]
    try:
        layout = plan({"w": param}, preset, mesh_sizes, allow=allow, **entries)
    except ConfigError as error:
        assert str(error).startswith("activation")
        assume(False)
    topology = build_topology(MeshConfig(**mesh_sizes, allow_cross_domain=["tensor", "expert"]), ClusterConfig())
    for part in ("weights", "masters", "gradients", "optimizer"):
        spec = layout.parts[part]["w"]
        axes = [axis for dim in spec_axes(spec, len(dims)) for axis in dim]
        assert len(axes) == len(set(axes))
        assert all(mesh_sizes[axis] > 1 for axis in axes)
        # NamedSharding itself refuses duplicates and sizes that do not divide
        local = NamedSharding(topology.mesh(), spec).shard_shape(param.shape)
        assert local == local_shape(param.shape, spec, mesh_sizes)
        assert math.prod(local) * math.prod(mesh_sizes[axis] for axis in axes) == param.size
    used = {axis for dim in spec_axes(layout.weights["w"], len(dims)) for axis in dim}
    assert set(layout.deferred_axes) == set(layout.batch_axes) - used


def test_flat_paths_join_nested_keys():
    params = build(MODEL).params
    assert flatten_paths(params)["embed/tokens"] == params["embed"]["tokens"]
    assert [leaf.shape for leaf in flatten_paths(params).values()] == [p.shape for p in jax.tree.leaves(params)]
