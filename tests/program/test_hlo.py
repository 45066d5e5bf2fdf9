"""The reader of compiled text: groups, trip counts, sources, and that nothing unknown passes in silence."""

from __future__ import annotations

import inspect
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from texts import llama, module

from jaxtrain.program.groups import read_groups, read_pairs
from jaxtrain.program.hlo import read_program

pytestmark = pytest.mark.usefixtures("lines_in_the_cache_key")


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{{3,1},{0},{2}}", ((3, 1), (0,), (2,))),
        ("{}", (tuple(range(8)),)),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[2,4]<=[2,2,2]T(1,0,2)", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=2,'b'=4] {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=4] {'a','b'}", (tuple(range(8)),)),
        ("mesh['a'=2,'b'=4] {'b','a'}", ((0, 4, 1, 5, 2, 6, 3, 7),)),
        ("mesh['a'=8] {'a':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=8] {'a':(4)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}", ((3, 1), (2, 0))),
    ],
)
def test_groups_of_every_notation(text: str, groups: tuple[tuple[int, ...], ...]) -> None:
    assert read_groups(text, 8) == groups


def test_transposed_groups_of_64() -> None:
    got = read_groups("[8,8]<=[8,8]T(1,0)", 64)
    assert got == tuple(tuple(range(first, 64, 8)) for first in range(8))
    assert read_groups("[8,8]<=[64]", 64)[3] == tuple(range(24, 32))


@pytest.mark.parametrize("text", ["[2,4]<=8", "mesh{'a'}", "0,1", "mesh['a'=4], device_ids=(odd) {'a'}"])
def test_an_unknown_notation_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="notation"):
        read_groups(text, 8)


def test_pairs() -> None:
    assert read_pairs("{{0,4},{4,0}}") == ((0, 4), (4, 0))
    with pytest.raises(ValueError, match="notation"):
        read_pairs("ring(8)")


AXES = ("p", "q", "r")


@pytest.mark.parametrize("axes", [axes for n in (1, 2, 3) for axes in combinations(AXES, n)])
@pytest.mark.parametrize("order", [range(8), (0, 4, 1, 5, 2, 6, 3, 7)])
def test_groups_are_those_that_run(axes: tuple[str, ...], order: range | tuple[int, ...]) -> None:
    """Partition p holds 2^p; the sum over a group identifies its members."""
    mesh = Mesh(np.array(jax.devices())[list(order)].reshape(2, 2, 2), AXES)
    f = jax.shard_map(lambda x: jax.lax.psum(x, axes), mesh=mesh, in_specs=P(AXES), out_specs=P(AXES), check_vma=False)
    powers = (2.0 ** np.arange(8)).astype(np.float32)
    compiled = jax.jit(f).lower(powers).compile()
    sums = np.asarray(compiled(powers)).astype(int)
    program = read_program(compiled.as_text())
    reduce = next(one for _, one in program.instructions() if one.kind == "all-reduce")
    groups = reduce.groups(program.partitions)
    assert sorted(member for group in groups for member in group) == list(range(8))
    for group in groups:
        assert {sums[member] for member in group} == {sum(2**member for member in group)}


def nested(x: jax.Array) -> jax.Array:
    def inner(c: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.tanh(c @ x), None

    def outer(c: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jax.lax.scan(inner, c, None, length=5)[0], None

    return jax.lax.scan(outer, x, None, length=3)[0]


def test_trip_counts_multiply_and_the_source_line_is_found() -> None:
    program = read_program(jax.jit(nested).lower(jnp.ones((16, 16))).compile().as_text())
    assert program.unknown == ()
    [(computation, dot)] = [(c, one) for c, one in program.instructions() if one.kind == "dot"]
    assert program.executions[computation.name] == 15
    lines, first = inspect.getsourcelines(nested)
    calls = ["c @ x", "lax.scan(inner", "lax.scan(outer"]
    expected = [f"{__file__}:{first + next(i for i, text in enumerate(lines) if call in text)}" for call in calls]
    assert dot.source == expected[0]
    assert [line for line in dot.stack if line in expected] == expected
    assert dot.op_name.endswith("dot_general")


def test_a_loop_without_a_trip_count_counts_once_and_is_reported() -> None:
    def f(x: jax.Array, n: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda c: c.sum() < n, lambda c: c @ x, x)

    program = read_program(jax.jit(f).lower(jnp.ones((16, 16)), 3.0).compile().as_text())
    [(computation, _)] = [(c, one) for c, one in program.instructions() if one.kind == "dot"]
    assert program.executions[computation.name] == 1
    assert ["known trip count" in one.what for one in program.unknown] == [True]


def test_conditional_branches_and_calls_run() -> None:
    def f(x: jax.Array, n: jax.Array) -> jax.Array:
        return jax.lax.switch(n, [lambda x: x @ x, jnp.tanh, lambda x: (x * 2) @ x], x)

    program = read_program(jax.jit(f).lower(jnp.ones((16, 16)), 1).compile().as_text())
    assert program.unknown == ()
    assert sum(one.kind == "dot" for _, one in program.instructions()) == 2


PARAMETER = "%a = f32[4]{0} parameter(0)"


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("ROOT %b = f32[4]{0} frobnicate(%a)", "opcode frobnicate"),
        ("ROOT %b = f7[4]{0} negate(%a)", "element type f7"),
        ("ROOT %b = f32[4]{0} negate(%gone)", "operand gone"),
        ("ROOT %b = f32[4]{0} all-reduce(%a), replica_groups=ring(8), to_apply=%add", "replica groups ring(8)"),
        ("ROOT %b = f32[4]{0} collective-permute(%a), source_target_pairs=ring", "source and target pairs ring"),
        ("ROOT %b = f32[4]{0} fusion(%a), kind=kLoop, calls=%gone", "computation gone"),
        ("ROOT %b is something else", "instruction"),
        ("ROOT %b = f32[4]{0} negate(%a", "instruction"),
    ],
)
def test_unknown_lines_are_reported(line: str, what: str) -> None:
    program = read_program(module(f"{PARAMETER}\n{line}"))
    assert [one.what.startswith(what) for one in program.unknown] == [True], program.unknown
    assert "main" in program.unknown[0].where


def test_a_strange_line_outside_a_computation_is_reported() -> None:
    program = read_program(module(f"{PARAMETER}\nROOT %b = f32[4] negate(%a)", others="Moonshine 7"))
    assert [(one.what, one.where) for one in program.unknown] == [("line", "Moonshine 7")]


@pytest.mark.parametrize(
    "text", ["", "module @jit_f {", module(PARAMETER).replace("ENTRY ", ""), module(PARAMETER)[:-3]]
)
def test_not_a_whole_compiled_module(text: str) -> None:
    with pytest.raises(ValueError, match=r"HloModule|ENTRY"):
        read_program(text)


def test_older_formats() -> None:
    """Types before operands, no percent signs, source lines in the metadata, quoted JSON."""
    text = module(
        r"""a = f32[4,8]{1,0:T(8,128)S(5)} parameter(0)
        ROOT b = (f32[4,8]{1,0}, s4[3]) custom-call(f32[4,8]{1,0} a, (f32[], /*index=1*/f32[4]) %c), """
        r"""metadata={op_name="jit(f)/a[\"b\"]" source_file="f.py" source_line=7}, """
        r"""backend_config="{\"known_trip_count\":{\"n\":\"5\"}}" """
    )
    program = read_program(text)
    one = program.computations["main"].root
    assert one.operands == ("a", "c")
    assert one.source == "f.py:7"
    assert one.op_name == 'jit(f)/a["b"]'
    assert one.trip_count == 5
    assert [(shape.dtype, shape.dims, shape.bytes) for shape in one.shapes] == [("f32", (4, 8), 128), ("s4", (3,), 2)]
    assert program.computations["main"].instructions[0].shapes[0].memory == 5


def test_a_real_program_for_64_gpus_is_read_without_unknowns() -> None:
    program = llama()
    assert program.unknown == ()
    assert (program.partitions, program.scheduled) == (64, True)
    # 32 layers forward and backward, 4 blocks of the loss.
    counts = sorted(times for name, times in program.executions.items() if name.startswith("region") and times > 1)
    assert counts == [4, 5, 32, 32, 33, 33]
    assert {one.source.split(":")[0] for _, one in program.instructions() if one.kind == "dot"} == {
        "jaxtrain/nn/layers.py",
        "jaxtrain/ops/attention.py",
        "jaxtrain/ops/loss.py",
    }
