"""What the partitioner invents, and what it only carries out."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from runs import config_of, setup_of
from texts import llama

from jaxtrain.program.collectives import Collective, Links, read_collectives
from jaxtrain.program.hlo import read_program
from jaxtrain.program.partitioner import Rematerialization, inserted_resharding, read_rematerializations
from jaxtrain.train.step import compile_step

MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))
FLAT = np.zeros((2, 1, 4, 1, 1), int)
LINKS = Links(1e9, 1e9, 1e9)


def cut(x: jax.Array, *spec: str | None) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P(*spec)))


def program_text(f: Callable[..., jax.Array], *specs: P) -> str:
    shapes = [jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(MESH, spec)) for spec in specs]
    return jax.jit(f).lower(*shapes).compile().as_text() or ""


def inserted(f: Callable[..., jax.Array], *specs: P) -> list[tuple[str, str]]:
    program = read_program(program_text(f, *specs))
    collectives = read_collectives(program, FLAT, LINKS)
    assert collectives
    return [(one.kind, one.source) for one in inserted_resharding(program, collectives)]


def line_of(f: Callable[..., jax.Array], text: str) -> str:
    lines, first = inspect.getsourcelines(f)
    return f"{__file__}:{first + next(i for i, line in enumerate(lines) if text in line)}"


def rolled(x: jax.Array) -> jax.Array:
    y = cut(jnp.tanh(x), "b", None)
    return cut(jnp.sin(jnp.roll(y, 3, axis=0)), "b", None)


def shuffled(x: jax.Array) -> jax.Array:
    y = cut(jnp.tanh(x), "b", None)
    z = y.reshape(4, 16, 64).swapaxes(0, 1)
    return cut(jnp.sin(z.reshape(64, 64)), "b", None)


@pytest.mark.parametrize(
    ("f", "text", "kind"), [(rolled, "jnp.roll", "collective-permute"), (shuffled, "swapaxes", "all-gather")]
)
@pytest.mark.usefixtures("lines_in_the_cache_key")
def test_resharding_that_nobody_asked_for_is_named_with_its_line(
    f: Callable[..., jax.Array], text: str, kind: str
) -> None:
    """Rows move along a sharded dimension, to other devices."""
    assert inserted(f, P("b")) == [(kind, line_of(f, text))]


def test_constraints_and_hand_written_collectives_are_asked_for() -> None:
    assert inserted(lambda x: jnp.sin(cut(jnp.tanh(x), None, None)), P("b")) == []

    def by_hand(x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(jnp.tanh(x), "b").sum(0) + jax.lax.ppermute(jnp.sin(x), "b", [(0, 1), (1, 0)])

    assert inserted(jax.shard_map(by_hand, mesh=MESH, in_specs=P("b"), out_specs=P("b"), check_vma=False), P("b")) == []


def real_step(**sections: dict[str, Any]) -> tuple[tuple[Collective, ...], tuple[Collective, ...]]:
    """Collectives of the real step on 8 simulated devices, and those that the partitioner inserted, over data alone."""
    setup = setup_of(config_of(**sections))
    program = read_program(compile_step(setup.step, setup.abstract, setup.abstract_batch).as_text())
    found = read_collectives(program, setup.topology.domain, LINKS)
    return tuple(
        [one for one in some if one.axes == ("data",)] for some in (found, inserted_resharding(program, found))
    )  # type: ignore[return-value]


def test_gathering_stored_weights_is_asked_for() -> None:
    """Under fsdp x tensor on 4 x 2 devices each weight is gathered where it is used, in both scans of 4 layers."""
    found, inserted_collectives = real_step(rules={"preset": ["fsdp", "tensor"]}, mesh={"tensor": 2})
    assert len([one for one in found if one.kind == "all-gather" and one.calls == 4]) >= 2 * 7
    assert inserted_collectives == []


def test_gathering_new_weights_is_asked_for() -> None:
    """Under zero1 in float32 the moments are sharded and the weights are not: new weights are gathered once."""
    found, inserted_collectives = real_step(rules={"preset": "zero1"})
    assert len([one for one in found if one.kind == "all-gather" and one.calls == 1]) >= 1
    assert inserted_collectives == []


def test_the_8b_step_has_no_inserted_resharding() -> None:
    domain = np.repeat(np.arange(8), 8).reshape(8, 1, 8, 1, 1)
    assert inserted_resharding(llama(), read_collectives(llama(), domain, LINKS)) == ()


def test_full_rematerialization_is_read_from_the_compilers_own_words() -> None:
    """In a separate process without a cache: a cached program prints nothing."""
    script = f"from test_partitioner import *; print(program_text({shuffled.__name__}, P('b')))"
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false", "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment, timeout=120
    )
    [one] = read_rematerializations(ran.stderr, read_program(ran.stdout))
    assert (one.shape, one.op_name) == ("f32[16,1,64]", "jit(shuffled)/transpose")
    assert one.source == line_of(shuffled, "swapaxes")
    assert one.before == "{mesh['a'=2,'b'=4], [{}, {'b'}, {}]}"
    assert one.after == "{devices=[4,1,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}"


OLD = (
    "2025-04-14 17:55:24.092274: E external/xla/xla/service/spmd/spmd_partitioner.cc:621] [spmd] Involuntary full "
    "rematerialization. The compiler was not able to go from sharding {devices=[1,1,2,2]<=[4] last_tile_dim_replicate} "
    "to {devices=[2,2]<=[2,2]T(1,0) last_tile_dim_replicate} without doing a full rematerialization of the tensor for "
    "HLO operation: %pad = f64[96]{0} pad(%broadcast.690, %constant), padding=8_7, sharding={devices=[1,1,2,2]<=[4] "
    'last_tile_dim_replicate}, metadata={op_name="jit(f)/pad" source_file="a.py" source_line=12}. You probably want to '
    "enrich the sharding annotations to prevent this from happening."
)
SHORT = (
    "E0531 spmd_partitioner.cc:569] [spmd] Involuntary full rematerialization. The compiler was not able to go from "
    "sharding {devices=[2,1,4]<=[4,2]T(1,0)} to {devices=[1,8,1]<=[8]} without doing a full rematerialization of the "
    "tensor. You probably want to enrich the sharding annotations to prevent this from happening."
)


def test_other_versions_words_are_read_and_repeats_count_once() -> None:
    stderr = "\n".join(["W0000 something else", OLD, SHORT, OLD])
    assert read_rematerializations(stderr) == (
        Rematerialization(
            "pad",
            "f64[96]",
            "jit(f)/pad",
            "a.py:12",
            "{devices=[1,1,2,2]<=[4] last_tile_dim_replicate}",
            "{devices=[2,2]<=[2,2]T(1,0) last_tile_dim_replicate}",
        ),
        Rematerialization("", "", "", "", "{devices=[2,1,4]<=[4,2]T(1,0)}", "{devices=[1,8,1]<=[8]}"),
    )
    assert read_rematerializations("") == ()
