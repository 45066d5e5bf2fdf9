"""Logical names to mesh axes: precedence, strictness, activation constraints."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.config import AXES, ClusterConfig, ConfigError, MeshConfig, RulesConfig, replace, validate
from jaxtrain.mesh.constraints import constrain, use_rules
from jaxtrain.mesh.layout import build_layout
from jaxtrain.mesh.param import Param
from jaxtrain.mesh.resolution import spec_for
from jaxtrain.mesh.rules import CONSTRAINED_ACTIVATIONS, NAMES, PRESETS, resolve_rules
from jaxtrain.mesh.topology import build_topology


def sizes(**given):
    return dict.fromkeys(AXES, 1) | given


def rules(*preset, **entries):
    return resolve_rules(RulesConfig(preset=list(preset), **entries))


def plan(params, table, **given):
    return build_layout(params, table, sizes(**given), separate_master_params=True)


UP = Param((32, 4096, 14336), ("layers", "embed", "mlp"))


# ---- precedence


def test_later_presets_win_and_single_entries_win_over_all():
    table = rules("fsdp", "tensor", embed="tensor", mlp=["data", "seq"])
    assert table.axes("embed") == ("tensor",)
    assert table.axes("mlp") == ("data", "seq")
    assert table.entry("embed").origin == "rules.embed"
    assert table.entry("embed").losers == (("preset fsdp", ("data",)),)
    assert table.explain("mlp") == "mlp -> data x seq by rules.mlp; overrules preset tensor (tensor)"
    assert rules("tensor_sequence", "hybrid_fsdp").axes("residual_seq") == ("seq", "tensor")
    assert table.axes("head_dim") == () and table.entry("head_dim").origin == "no rule"


def test_null_overrules_a_preset_and_unset_does_not():
    assert rules("tensor").axes("mlp") == ("tensor",)
    table = rules("tensor", mlp=None)
    assert table.axes("mlp") == () and table.entry("mlp").origin == "rules.mlp"


def test_unset_and_null_survive_overrides():
    config = validate({"rules": {"preset": ["tensor"]}})
    assert resolve_rules(replace(config, "train.seed=1").rules).axes("mlp") == ("tensor",)
    assert resolve_rules(replace(config, "rules.mlp=null").rules).axes("mlp") == ()


def test_the_base_table_lies_below():
    table = rules("ddp")
    assert table.axes("batch") == ("data", "expert")
    assert table.axes("seq_len") == table.axes("residual_seq") == ("seq",)
    assert table.axes("layers") == ("pipe",) and table.axes("experts") == ("expert",)
    assert {name for preset in PRESETS.values() for name in preset} <= {*NAMES, "optimizer", "gradients"}


# ---- specs, by Megatron and ZeRO


@pytest.mark.parametrize(
    ("preset", "spec"),
    [
        (["ddp"], P(None, None, None)),
        (["fsdp"], P(None, "data", None)),
        (["zero3"], P(None, "data", None)),
        (["hybrid_fsdp"], P(None, "tensor", None)),
        (["tensor"], P(None, None, "tensor")),
        (["fsdp", "tensor"], P(None, "data", "tensor")),
    ],
)
def test_presets_on_a_column_split(preset, spec):
    assert spec_for(UP, rules(*preset), sizes(data=8, tensor=8)).spec == spec


def test_axes_of_size_one_never_trouble():
    table = rules("fsdp", mlp=["data", "tensor"])
    odd = Param((3, 7), ("embed", "mlp"))
    assert spec_for(odd, table, sizes()).spec == P(None, None)
    assert spec_for(odd, table, sizes()).findings == ()


def test_reasons_name_the_rule_of_each_dimension():
    reasons = spec_for(UP, rules("tensor", mlp="data"), sizes(data=2, pipe=2, tensor=2)).reasons
    assert [(r.name, r.axes, r.origin) for r in reasons] == [
        ("layers", ("pipe",), "base"),
        ("embed", (), "no rule"),
        ("mlp", ("data",), "rules.mlp"),
    ]
    assert reasons[2].losers == (("preset tensor", ("tensor",)),)


def test_few_kv_heads_are_replicated_and_noted():
    key = Param((4096, 2, 128), ("embed", "kv_heads", "head_dim"))
    resolved = spec_for(key, rules("tensor"), sizes(tensor=8), "key")
    assert resolved.spec == P(None, None, None) and resolved.findings == ()
    layout = plan({"key": key, "up": UP}, rules("tensor"), tensor=8)
    assert layout.notes == ("key: replicated: 2 kv heads on tensor of size 8",)
    assert spec_for(key, rules("tensor"), sizes(tensor=2)).spec == P(None, "tensor", None)


# ---- strictness: each a ConfigError that names the parameter, the dimension, the mend


def refused(params, table, *words, **given):
    with pytest.raises(ConfigError) as error:
        plan(params, table, **given)
    for word in words:
        assert word in str(error.value), f"{word!r} not in {error.value}"


def test_unknown_preset_and_axis_and_name():
    with pytest.raises(ConfigError, match=r"'fspd' is unknown \(did you mean fsdp\?\)"):
        rules("fspd")
    with pytest.raises(ConfigError, match=r"rules\.mlp is 'tensr'.*'tensor'"):
        validate({"rules": {"mlp": "tensr"}})
    with pytest.raises(ConfigError, match=r"unknown setting rules\.mpl \(did you mean rules\.mlp\?\)"):
        validate({"rules": {"mpl": "tensor"}})
    with pytest.raises(ConfigError, match=r"unknown logical name 'mpl' \(did you mean mlp\?\)"):
        rules("ddp").axes("mpl")
    refused({"w": Param((4, 4), ("embed", "mpl"))}, rules("ddp"), "w (4, 4): dimension 1", "'mpl' (did you mean mlp?)")


def test_one_axis_twice():
    refused({"up": UP}, rules("tensor", embed="tensor"), "up (32, 4096, 14336), spec (-, tensor, tensor)",
            "dimension 2 (mlp",
            "embed already uses tensor", "set rules.mlp or rules.embed", "['twice:up']", tensor=2)  # fmt: skip
    with pytest.raises(ConfigError, match=r"rules\.mlp is \[data, data\]: one axis twice"):
        rules("ddp", mlp=["data", "data"])
    allowed = plan({"up": UP}, rules("tensor", embed="tensor", allow=["twice:*"]), tensor=2)
    assert allowed.weights["up"] == P(None, "tensor", None) and "allowed twice:up" in allowed.notes[0]


def test_one_axis_twice_in_an_activation():
    refused({"up": UP}, rules("tensor", "hybrid_fsdp", embed=None, norm=None),
            "activation feed-forward ('batch', 'seq_len', 'mlp'): batch and mlp both use tensor", tensor=2)  # fmt: skip


def test_a_dimension_that_does_not_divide():
    params = {"layers": {"up": Param((4, 256, 300), ("layers", "embed", "mlp"))}}
    refused(params, rules("tensor"), "layers/up (4, 256, 300), spec (-, -, tensor): ",
            "dimension 2 (mlp, 300)", "tensor by preset tensor",
            "8 does not divide", "rules.mlp to null", "rules.allow: ['indivisible:mlp']", tensor=8)  # fmt: skip
    allowed = plan(params, rules("tensor", allow=["indivisible:layers/*"]), tensor=8)
    assert allowed.weights["layers"]["up"] == P(None, None, None)


def test_an_entry_that_matches_nothing():
    refused({"up": UP}, rules("ddp", experts="expert"), "rules.experts is expert but no parameter",
            "in use: embed, mlp, layers", "rules.allow: ['unmatched:experts']")  # fmt: skip
    plan({"up": UP}, rules("ddp", experts="expert", allow=["unmatched:experts"]))
    plan({"up": UP}, rules("ddp", experts=None, residual_seq="seq"))


def test_a_large_parameter_left_whole():
    table = Param((2048, 12288), ("positions", "embed"))
    refused({"positions": table, "up": UP}, rules("tensor"), "positions (2048, 12288)", "25,165,824 elements",
            "rules.positions, rules.embed", "rules.allow: ['replicated:positions']", tensor=8)  # fmt: skip
    plan({"positions": table, "up": UP}, rules("tensor", positions="tensor"), tensor=8)
    plan({"positions": table, "up": UP}, rules("tensor", positions=None), tensor=8)
    plan({"positions": table, "up": UP}, rules("tensor", replicated_limit=30_000_000), tensor=8)


def test_replicas_are_the_point_of_data_parallelism():
    for preset in ("ddp", "zero1", "zero2"):
        plan({"up": UP, "embed": Param((128256, 4096), ("vocab", "embed"))}, rules(preset), data=8, pipe=2)


def test_a_stack_of_small_parameters_is_small():
    plan({"norm": Param((126, 16384), ("layers", "norm")), "up": UP}, rules("tensor"), tensor=8)


def test_all_findings_come_in_one_error():
    params = {"a": Param((5, 7), ("embed", "mlp")), "b": Param((9, 4), ("mlp", "mpl"))}
    with pytest.raises(ConfigError) as error:
        plan(params, rules("fsdp", "tensor", experts="expert"), data=2, tensor=2)
    lines = str(error.value).splitlines()
    assert len(lines) == 5
    assert [line.split()[0] for line in lines] == ["a", "a", "b", "b", "rules.experts"]


def test_the_printed_allow_entry_is_the_one_that_works():
    params = {"a": Param((5, 7), ("embed", "mlp"))}
    with pytest.raises(ConfigError) as error:
        plan(params, rules("tensor"), tensor=2)
    entry = str(error.value).split("rules.allow: ['")[1].split("'")[0]
    assert plan(params, rules("tensor", allow=[entry]), tensor=2).weights == {"a": P(None, None)}


def test_allow_entries_are_checked():
    for entry in ("indivisble:x", "mlp"):
        with pytest.raises(ConfigError, match=r"rules\.allow entry"):
            rules("ddp", allow=[entry])


# ---- constrain


def mesh_of(**given):
    return build_topology(MeshConfig(**given), ClusterConfig()).mesh()


def spec_of(x):
    assert isinstance(x.sharding, NamedSharding)
    return x.sharding.spec


def pinned(table, mesh, x, *names, without=()):
    with use_rules(table, mesh, without):
        return jax.jit(lambda y: constrain(y, *names))(x)


def test_constrain_is_the_identity_without_a_context():
    x = jnp.ones((3, 5))
    assert constrain(x, "batch", "hidden") is x


def test_constrain_shards_by_name():
    mesh = mesh_of(data=2, tensor=2, seq=2)
    x = jnp.arange(4 * 8 * 6, dtype=jnp.float32).reshape(4, 8, 6)
    y = pinned(rules("tensor_sequence"), mesh, x, "batch", "residual_seq", "hidden")
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("data", ("seq", "tensor"), None)), 3)
    np.testing.assert_array_equal(x, y)
    y = pinned(rules("tensor"), mesh, x, "batch", "seq_len", "mlp")
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "seq", "tensor")), 3)


def test_an_activation_that_no_rule_shards_is_pinned_whole():
    mesh = mesh_of(data=1, tensor=8)
    x = jax.device_put(jnp.ones((8, 8, 8)), NamedSharding(mesh, P("tensor")))
    y = pinned(rules("tensor"), mesh, x, "batch", "residual_seq", "hidden")
    assert y.sharding.is_fully_replicated


def test_kv_heads_that_do_not_divide_stay_whole_and_others_raise():
    mesh = mesh_of(data=2, tensor=4)
    x = jnp.ones((2, 4, 2, 8))
    y = pinned(rules("tensor"), mesh, x, "batch", "seq_len", "kv_heads", None)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 4)
    with pytest.raises(ConfigError, match=r"dimension 2 \(heads, 2\) is not divisible by tensor = 4"):
        pinned(rules("tensor"), mesh, x, "batch", "seq_len", "heads", None)
    y = pinned(rules("tensor", allow=["indivisible:heads"]), mesh, x, "batch", "seq_len", "heads", None)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 4)
    with pytest.raises(ConfigError, match="one mesh axis twice"):
        pinned(rules("tensor", seq_len="tensor"), mesh, x, "batch", "seq_len", None, "mlp")


def test_axes_of_an_enclosing_vmap_are_left_out():
    mesh = mesh_of(data=4, tensor=2)
    x = jnp.arange(4 * 6 * 8, dtype=jnp.float32).reshape(4, 6, 8)

    def one(row):
        return constrain(row * 2, "batch", "mlp")

    with use_rules(rules("tensor"), mesh, without=("data",)):
        y = jax.jit(jax.vmap(one, spmd_axis_name=("data",)))(x)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("data", None, "tensor")), 3)


def test_constrain_lowers_on_a_mesh_without_devices():
    mesh = AbstractMesh((64, 1, 8, 1, 1), AXES, axis_types=(AxisType.Auto,) * 5)

    def f(x):
        with use_rules(rules("tensor"), mesh):
            return constrain(x, "batch", "seq_len", "mlp")

    x = jax.ShapeDtypeStruct((64, 16, 32), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    text = jax.jit(f).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert "sharding_constraint" in text and '{"tensor"}' in text


def test_a_context_ends_with_its_block():
    with pytest.raises(RuntimeError), use_rules(rules("ddp"), mesh_of()):
        raise RuntimeError
    assert constrain(jnp.ones(3), "mpl") is not None
    assert set().union(*CONSTRAINED_ACTIVATIONS.values()) <= set(NAMES)
