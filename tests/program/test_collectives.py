"""Collectives of programs whose traffic is known by construction."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from runs import config_of, setup_of
from texts import ADD, llama, module

from jaxtrain.config import AXES
from jaxtrain.mesh.topology import TIGHT as MESH_TIGHT
from jaxtrain.program import collectives as module_under_test
from jaxtrain.program.collectives import (
    Collective,
    Links,
    Reductions,
    coverage,
    gradient_reductions,
    prove_tight,
    read_collectives,
    unread_collectives,
)
from jaxtrain.program.hlo import Program, read_program
from jaxtrain.train.step import compile_step

LINKS = Links(fast=400e9, network=50e9, peak=1e12)
FLAT = np.zeros((2, 1, 4, 1, 1), int)


def test_axes_are_those_of_the_mesh() -> None:
    assert module_under_test.AXES == AXES
    assert module_under_test.TIGHT == MESH_TIGHT


def compiled(f: object, *shapes: tuple[int, ...], mesh: tuple[int, ...] = (2, 4)) -> Program:
    """`f` in a shard_map over 'a' and 'b', its arguments sharded along the first dimension over both."""
    grid = Mesh(np.array(jax.devices()).reshape(mesh), ("a", "b"))
    body = jax.shard_map(f, mesh=grid, in_specs=P(("a", "b")), out_specs=P(("a", "b")), check_vma=False)  # type: ignore[arg-type]
    arguments = [jnp.ones(shape) for shape in shapes]
    return read_program(jax.jit(body).lower(*arguments).compile().as_text())


def in_a_scan(body: object, trips: int) -> object:
    return lambda x: jax.lax.scan(lambda c, _: (body(c), None), x, None, length=trips)[0]  # type: ignore[operator]


PERMUTE = [(0, 1), (1, 2), (2, 3), (3, 0)]


@pytest.mark.parametrize(
    ("body", "kind", "payload", "bytes_sent", "axes"),
    [
        (lambda x: jax.lax.psum(x, "b") * 0.1, "all-reduce", 4096, 6144, ("tensor",)),
        (lambda x: jax.lax.psum(x, "a") * 0.1, "all-reduce", 4096, 4096, ("data",)),
        (lambda x: jax.lax.psum(x, ("a", "b")) * 0.1, "all-reduce", 4096, 7168, ("data", "tensor")),
        (lambda x: jax.lax.all_gather(x, "b").sum(0) * 0.1, "all-gather", 4 * 4096, 3 * 4096, ("tensor",)),
        (lambda x: jnp.tile(jax.lax.psum_scatter(x, "b", tiled=True), (4, 1)), "reduce-scatter", 4096, 3072,
         ("tensor",)),
        (lambda x: jax.lax.ppermute(x, "b", PERMUTE) + 1, "collective-permute", 4096, 4096, ("tensor",)),
        (lambda x: jax.lax.all_to_all(x.reshape(4, 4, 64), "b", 0, 0).reshape(16, 64) + 1, "all-to-all", 4096, 3072,
         ("tensor",)),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("lines_in_the_cache_key")
def test_kind_bytes_calls_and_axes(
    body: object, kind: str, payload: int, bytes_sent: int, axes: tuple[str, ...]
) -> None:
    """x [16, 64] float32 on each of 2 x 4 devices, 4,096 bytes, in a scan of 5; bytes sent by the ring formulas."""
    program = compiled(in_a_scan(body, 5), (128, 64))
    assert program.unknown == () and unread_collectives(program) == ()
    [one] = read_collectives(program, FLAT, LINKS)
    assert (one.kind, one.calls, one.payload, one.bytes_sent, one.axes) == (kind, 5, payload, bytes_sent, axes)
    assert one.exact and not one.crosses and not one.asynchronous and one.covered == 0.0
    assert one.seconds == pytest.approx(bytes_sent / LINKS.fast)
    assert one.source.startswith(__file__)
    assert (one.dtypes, one.conditional) == (("f32",), False)


def test_nested_scans_multiply_calls() -> None:
    program = compiled(in_a_scan(in_a_scan(lambda x: jax.lax.psum(x, "b") * 0.1, 3), 5), (128, 64))
    assert [one.calls for one in read_collectives(program, FLAT, LINKS)] == [15]


def test_a_collective_in_a_branch_is_marked() -> None:
    def f(x: jax.Array) -> jax.Array:
        return jax.lax.cond(jax.lax.pmax(x.sum(), ("a", "b")) > 0, lambda x: jax.lax.psum(x, "a"), jnp.tanh, x)

    found = read_collectives(compiled(f, (128, 64)), FLAT, LINKS)
    assert {one.reduction: one.conditional for one in found} == {"maximum": False, "add": True}


# Two domains of four devices; tensor 4 inside each.
DOMAIN = np.repeat([0, 1], 4).reshape(2, 1, 4, 1, 1)


def collective(text: str, domain: np.ndarray = DOMAIN, links: Links = LINKS) -> tuple[Collective, ...]:
    program = read_program(text)
    assert program.unknown == ()
    return read_collectives(program, domain, links)


def reduce_over(groups: str, shape: str = "f32[1000,100]") -> str:
    return module(f"""
        %a = {shape} parameter(0)
        ROOT %r = {shape} all-reduce(%a), replica_groups={groups}, to_apply=%add
    """)


@pytest.mark.parametrize(
    ("groups", "axes", "exact", "domains", "bytes_sent", "seconds"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ("tensor",), True, 1, 600_000, 600e3 / 400e9),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("data",), True, 2, 400_000, 400e3 / 50e9),
        # 8 in 2 domains: half of 2 x 400 kB passes the border, four devices share it.
        ("{{0,1,2,3,4,5,6,7}}", ("data", "tensor"), True, 2, 100_000, 100e3 / 50e9),
        ("{{0,1},{2,3},{4,5},{6,7}}", ("tensor",), False, 1, 400_000, 400e3 / 400e9),
        ("{{0,5},{1,4},{2,7},{3,6}}", ("data", "tensor"), False, 2, 400_000, 400e3 / 50e9),
        ("{{0},{1},{2},{3},{4},{5},{6},{7}}", (), True, 1, 0, 0.0),
    ],
)
def test_groups_axes_and_domains(
    groups: str, axes: tuple[str, ...], exact: bool, domains: int, bytes_sent: int, seconds: float
) -> None:
    [one] = collective(reduce_over(groups))
    assert (one.axes, one.exact, one.domains, one.payload) == (axes, exact, domains, 400_000)
    assert one.bytes_sent == bytes_sent
    assert one.seconds == pytest.approx(seconds)
    assert one.link == ("network" if domains > 1 else "fast")
    assert one.axes_label == ("" if exact else "part of ") + ("+".join(axes) or "no axis")


def test_a_mesh_that_is_too_small_is_an_error() -> None:
    with pytest.raises(ValueError, match="8 devices, the mesh has 4"):
        collective(reduce_over("{{0,1,2,3,4,5,6,7}}"), np.zeros((4, 1, 1, 1, 1), int))


# Between start and done: one product of 2 x 100 x 200 x 50 = 2,000,000 FLOPs, three times; the other one is outside.
OVERLAP = """
    %a = f32[100,50] parameter(0)
    %w = f32[50,200] parameter(1)
    %before = f32[100,200] dot(%a, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    %start = START
    %one = f32[100,200] dot(%a, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    %two = f32[100,200] fusion(%a, %w), kind=kCustom, calls=%product
    %three = f32[100,200] call(%a, %w), to_apply=%product
    %done = f32[400,50] DONE(%start)
    ROOT %after = f32[100,200] dot(%a, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
"""
PRODUCT = """%product (x: f32[100,50], y: f32[50,200]) -> f32[100,200] {
  %x.1 = f32[100,50] parameter(0)
  %y.1 = f32[50,200] parameter(1)
  ROOT %d.1 = f32[100,200] dot(%x.1, %y.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%wrapped (p: f32[100,50]) -> f32[400,50] {
  %p = f32[100,50] parameter(0)
  ROOT %g.1 = f32[400,50] all-gather(%p), dimensions={0}, GROUPS
}
"""
GROUPS = "replica_groups=[2,4]<=[8]"
SYNC = '"collective_backend_config":{"is_sync":true}'
STARTS = {
    "tuple": ("(f32[100,50], f32[400,50]) all-gather-start(%a), dimensions={0}, GROUPS", "all-gather-done"),
    "sugar": ("((f32[100,50]), f32[400,50]) all-gather-start(%a), dimensions={0}, GROUPS", "all-gather-done"),
    "async": ("((f32[100,50]), f32[400,50], u32[]) async-start(%a), calls=%wrapped", "async-done"),
    "fused": ("((f32[100,50]), f32[400,50], u32[]) fusion-start(%a), kind=kCustom, calls=%wrapped", "fusion-done"),
}


def overlap(form: str) -> str:
    start, done = STARTS[form]
    entry = OVERLAP.replace("START", start).replace("DONE", done).replace("GROUPS", GROUPS)
    return module(entry, PRODUCT.replace("GROUPS", GROUPS))


@pytest.mark.parametrize("form", STARTS)
@pytest.mark.parametrize(("peak", "covered"), [(6e6 / 0.15e-6, 1.0), (6e6 / 0.075e-6, 0.5), (1e30, 0.0)])
def test_matmuls_between_start_and_done_cover_the_transfer(form: str, peak: float, covered: float) -> None:
    """80,000 bytes gathered by 4: 60,000 are sent, 0.15 us at 400 GB/s, under 6 MFLOP of work."""
    [one] = collective(overlap(form), links=dataclasses.replace(LINKS, peak=peak))
    assert (one.kind, one.calls, one.payload, one.bytes_sent) == ("all-gather", 1, 80_000, 60_000)
    assert one.asynchronous and one.flops_between == 6_000_000
    assert one.seconds == pytest.approx(0.15e-6)
    assert one.covered == pytest.approx(covered, abs=1e-6)
    assert coverage([one]) == {"fast": pytest.approx(covered, abs=1e-6)}


def test_a_start_that_the_backend_runs_in_line_hides_nothing() -> None:
    text = overlap("tuple").replace(GROUPS, f"{GROUPS}, backend_config={{{SYNC}}}", 2)
    [one] = collective(text)
    assert not one.asynchronous and one.flops_between == 0 and one.covered == 0.0


def test_a_fused_collective_in_line_is_found() -> None:
    text = module(
        """
        %a = f32[100,50] parameter(0)
        ROOT %f = f32[400,50] fusion(%a), kind=kCustom, calls=%wrapped
        """,
        PRODUCT.replace("GROUPS", GROUPS),
    )
    [one] = collective(text)
    assert (one.name, one.kind, one.payload, one.asynchronous) == ("f", "all-gather", 80_000, False)


def test_a_start_without_its_end_is_reported() -> None:
    start = STARTS["tuple"][0].replace("GROUPS", GROUPS)
    program = read_program(module(f"%a = f32[100,50] parameter(0)\nROOT %start = {start}"))
    assert [one.where for one in unread_collectives(program)] == ["main: start"]


def test_work_of_a_loop_between_start_and_done_counts_its_trips() -> None:
    body = """%body (t: (s32[], f32[100,50])) -> (s32[], f32[100,50]) {
      %t = (s32[], f32[100,50]) parameter(0)
      %i = s32[] get-tuple-element(%t), index=0
      %v = f32[100,50] get-tuple-element(%t), index=1
      %m = f32[50,50] dot(%v, %v), lhs_contracting_dims={0}, rhs_contracting_dims={0}
      ROOT %o = (s32[], f32[100,50]) tuple(%i, %v)
    }
    %test (t2: (s32[], f32[100,50])) -> pred[] {
      %t2 = (s32[], f32[100,50]) parameter(0)
      ROOT %yes = pred[] constant(true)
    }
    """.replace("\n    ", "\n")
    entry = OVERLAP.replace("START", STARTS["tuple"][0]).replace("DONE", "all-gather-done").replace(
        "%one = f32[100,200] dot(%a, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        "%zero = s32[] constant(0)\n%in = (s32[], f32[100,50]) tuple(%zero, %a)\n"
        "%one = (s32[], f32[100,50]) while(%in), condition=%test, body=%body, "
        'backend_config={"known_trip_count":{"n":"7"}}',
    )  # fmt: skip
    [one] = collective(module(entry, PRODUCT + body).replace("GROUPS", GROUPS))
    assert one.flops_between == 7 * 2 * 50 * 50 * 100 + 2 * 2_000_000


def test_a_collective_that_lost_its_name_takes_that_of_its_operand() -> None:
    text = module("""
        %a = f32[100,50] parameter(0)
        %t = f32[100,50] tanh(%a), metadata={op_name="jit(f)/tanh" source_file="f.py" source_line=3}
        %b = f32[5000] bitcast(%t)
        ROOT %r = f32[20000] all-gather(%b), replica_groups=[2,4]<=[8], metadata={op_name="reshape.167"}
    """)
    [one] = collective(text)
    assert (one.op_name, one.source) == ("jit(f)/tanh", "f.py:3")


def test_a_ragged_exchange_counts_the_buffer_it_sends() -> None:
    text = module("""
        %a = bf16[64,8] parameter(0)
        %b = bf16[128,8] parameter(1)
        %s = s32[4] parameter(2)
        ROOT %r = bf16[128,8] ragged-all-to-all(%a, %b, %s, %s, %s, %s), replica_groups={{0,1,2,3},{4,5,6,7}}
    """)
    [one] = collective(text)
    assert (one.kind, one.payload, one.bytes_sent, one.dtypes) == ("ragged-all-to-all", 1024, 768, ("bf16",))


def test_the_proof_names_the_groups_that_span_domains() -> None:
    found = collective(reduce_over("{{0,1,2,3},{4,5,6,7}}"))
    assert prove_tight(found, DOMAIN).holds
    spanning = np.array([0, 0, 0, 1, 1, 1, 0, 1]).reshape(DOMAIN.shape)
    proof = prove_tight(collective(reduce_over("{{0,1,2,3},{4,5,6,7}}"), spanning), spanning)
    assert not proof.holds
    assert [(one.name, groups) for one, groups in proof.guilty] == [("r", ((0, 1, 2, 3), (4, 5, 6, 7)))]
    half = np.array([0, 0, 0, 0, 1, 1, 2, 2]).reshape(DOMAIN.shape)
    [(_, groups)] = prove_tight(collective(reduce_over("{{0,1,2,3},{4,5,6,7}}"), half), half).guilty
    assert groups == ((4, 5, 6, 7),)


def test_groups_over_data_and_tensor_are_judged_by_their_tensor_parts() -> None:
    """A norm over all devices is no tensor traffic; a large tensor over both spans domains and is reported."""
    everything = "{{0,1,2,3,4,5,6,7}}"
    norm, large = (collective(reduce_over(everything, shape)) for shape in ("f32[5]", "f32[1000]"))
    assert prove_tight(norm, DOMAIN) == module_under_test.DomainProof(True, (), ())
    assert prove_tight(large, DOMAIN) == module_under_test.DomainProof(True, (), large)
    spanning = DOMAIN.ravel()[[0, 1, 2, 4, 3, 5, 6, 7]].reshape(DOMAIN.shape)
    assert not prove_tight(collective(reduce_over(everything), spanning), spanning).holds
    assert prove_tight(collective(reduce_over("{{0,4},{1,5},{2,6},{3,7}}"), spanning), spanning).holds


def reductions(*lines: str) -> list[str]:
    entry = "%a = f32[1000,100] parameter(0)\n%h = bf16[65] parameter(1)\n%m = f32[64] parameter(2)\n"
    entry += "%n = s32[1000] parameter(3)\n" + "\n".join(lines) + "\nROOT %z = f32[1000,100] negate(%a)"
    return [one.name for one in gradient_reductions(collective(module(entry, LARGER)), ("data",)).found]


LARGER = ADD.replace("%add ", "%larger ").replace("%sum = f32[] add", "%sum = f32[] maximum")


def test_what_counts_as_a_gradient() -> None:
    over_data, over_tensor = "replica_groups=[4,2]<=[2,4]T(1,0)", "replica_groups=[2,4]<=[8]"
    found = reductions(
        f"%yes = f32[1000,100] all-reduce(%a), {over_data}, to_apply=%add",
        f"%half = bf16[65] all-reduce(%h), {over_data}, to_apply=%add",
        f"%scattered = f32[500,100] reduce-scatter(%a), {over_data}, dimensions={{0}}, to_apply=%add",
        "%both = f32[1000,100] all-reduce(%a), replica_groups={}, to_apply=%add",
        f"%largest = f32[1000,100] all-reduce(%a), {over_data}, to_apply=%larger",
        f"%metrics = f32[64] all-reduce(%m), {over_data}, to_apply=%add",
        f"%counts = s32[1000] all-reduce(%n), {over_data}, to_apply=%add",
        f"%activation = f32[1000,100] all-reduce(%a), {over_tensor}, to_apply=%add",
        f"%gathered = f32[2000,100] all-gather(%a), {over_data}, dimensions={{0}}",
    )
    assert found == ["yes", "half", "scattered", "both"]


def real_step(preset: str, microbatches: int) -> tuple[Reductions, int]:
    """Gradient reductions of the real step on 8 simulated devices, and its number of parameters."""
    batch = {"global_batch": 8 * microbatches, "microbatch": 1}
    setup = setup_of(config_of(rules={"preset": preset}, train=batch))
    assert setup.batch_shape.accumulation == microbatches
    program = read_program(compile_step(setup.step, setup.abstract, setup.abstract_batch).as_text())
    assert program.unknown == ()
    found = read_collectives(program, setup.topology.domain, LINKS)
    assert {one.axes for one in found} == {("data",)}
    return gradient_reductions(found, setup.layout.batch_axes, least=33), setup.model.count()


@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero2"])
def test_accumulation_adds_no_gradient_reduction(preset: str) -> None:
    (one, count), (eight, _) = (real_step(preset, microbatches) for microbatches in (1, 8))
    assert eight.calls <= one.calls
    # All float32 gradients once, and no more than the few metrics that are bundled with them.
    assert 4 * count <= eight.bytes <= one.bytes <= 4 * count + 1024


def test_under_fsdp_each_microbatch_reduces_and_is_counted() -> None:
    eight, count = real_step("fsdp", 8)
    assert eight.bytes >= 8 * 4 * count


def test_the_8b_step_on_64_gpus() -> None:
    domain = np.repeat(np.arange(8), 8).reshape(8, 1, 8, 1, 1)
    found = read_collectives(llama(), domain, LINKS)
    assert unread_collectives(llama()) == ()
    assert all(one.exact for one in found)
    assert {one.axes for one in found} == {("data",), ("tensor",), ("data", "tensor")}
    assert all(one.crosses == ("data" in one.axes) for one in found)
    # Sequence parallelism: a layer gathers [8, 4096, 4096] bf16 twice forward and four times backward.
    gathers = [one for one in found if one.kind == "all-gather" and one.axes == ("tensor",) and one.calls == 32]
    assert [one.payload for one in gathers] == [2 * 8 * 4096 * 4096] * 6
    assert all(one.source.startswith("jaxtrain/") for one in gathers)
    # fsdp: gradients of one layer's matrices are scattered each layer, in bfloat16.
    reduced = gradient_reductions(found, ("data",))
    layer = 2 * 4096 * 32 * 128 + 2 * 4096 * 8 * 128 + 3 * 4096 * 14336
    [of_layers] = [one for one in reduced.found if one.calls == 32 and one.dtypes == ("bf16",)]
    assert of_layers.payload == 2 * layer // 8
    assert {one.kind for one in reduced.found} == {"reduce-scatter"}
    assert prove_tight(found, domain).holds and not prove_tight(found, domain).mixed
    transposed = np.tile(np.arange(8), 8).reshape(domain.shape)
    proof = prove_tight(read_collectives(llama(), transposed, LINKS), transposed)
    assert not proof.holds
    assert {len(groups) for one, groups in proof.guilty if one.axes == ("tensor",)} == {8}
    assert {axis for one, _ in proof.guilty for axis in one.axes} == {"data", "tensor"}
