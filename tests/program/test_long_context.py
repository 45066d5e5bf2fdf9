"""Long sequences compiled for 64 H100: overlap and memory of the ring."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.config import load_config
from jaxtrain.program.collectives import _find
from jaxtrain.program.compile import make_request, run_worker
from jaxtrain.program.hlo import Instruction, Program, read_program

pytestmark = pytest.mark.prove


def runs_kernel(program: Program, one: Instruction) -> bool:
    """Whether an instruction is the attention kernel, or a fusion around it."""
    inner = [i for name in one.runs if name in program.computations for i in program.computations[name].instructions]
    return any("mosaic_gpu" in i.attributes.get("custom_call_target", "") for i in (one, *inner))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Program]:
    folder = tmp_path_factory.mktemp("program")
    config = load_config("llama3_8b_128k.yaml", ["model.n_layers=4"])
    answer, _ = run_worker({**make_request(config, None, "cuda"), "folder": str(folder)}, 1500)
    return answer, read_program((folder / "program.txt").read_text())


def test_every_transfer_of_the_loop_runs_beside_the_kernel(compiled: tuple[dict, Program]) -> None:
    _, program = compiled
    loops = []
    for found in _find(program):
        if found.inner.kind == "collective-permute" and program.executions[found.computation.name] == 4 * 7:
            (shape,) = (s for o in found.inner_computation.operands(found.inner) for s in o.shapes)
            assert found.start.phase == "start" and not found.start.is_sync
            assert any(runs_kernel(program, one) for one in found.between), (found.computation.name, shape)
            loops.append((shape.dtype, shape.elements))
    # Keys and values packed: forward, computed again, backward; their gradients: backward. 16,384 tokens a device.
    packed = 16384 * 8 * (128 + 128)
    assert sorted(loops) == [("bf16", packed)] * 3 + [("f32", packed)]


def test_a_device_holds_its_part_of_a_sequence(compiled: tuple[dict, Program]) -> None:
    answer, _ = compiled
    assert answer["sizes"] == {"data": 8, "pipe": 1, "tensor": 1, "seq": 8, "expert": 1}
    assert answer["memory"]["peak_memory_in_bytes"] < 80e9 / 4


RING = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtrain.config import AXES, RulesConfig, load_config
from jaxtrain.mesh.constraints import use_rules
from jaxtrain.mesh.rules import resolve_rules
from jaxtrain.ops import context
from jaxtrain.ops.blocks import TokenPositions
from jaxtrain.ops.kernels import MOSAIC, ScoreOptions
from jaxtrain.program.compile import make_request
from jaxtrain.program.worker import _set_attention_device, compile_only_devices

config = load_config("llama3_8b_128k.yaml")
devices = compile_only_devices(make_request(config, None, "cuda"))
_set_attention_device(devices[0])
mesh, rules = Mesh(np.array(devices).reshape(8, 1, 1, 8, 1), AXES), resolve_rules(RulesConfig())

def total(q, k, v, places):
    with use_rules(rules, mesh):
        options = ScoreOptions(None, None, 128**-0.5)
        out = context.attend_sharded(q, k, v, TokenPositions(places, places), options, None, "ring", MOSAIC)
    return jnp.sum(jnp.square(out.astype(jnp.float32)))

def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P("data", "seq")))

q, k = array(8, 65536, 32, 128), array(8, 65536, 8, 128)
lowered = jax.jit(jax.grad(total, (0, 1, 2))).lower(q, k, k, array(8, 65536, dtype=jnp.int32))
print("bytes", lowered.compile(compiler_options=config.xla).memory_analysis().temp_size_in_bytes)
"""


def test_temporaries_of_a_ring_of_eight() -> None:
    root = str(Path(__file__).resolve().parents[2])
    env = {"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "PYTHONPATH": root}
    done = subprocess.run([sys.executable, "-c", RING], env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("bytes"))
    assert int(line.split()[1]) < 700 * 2**20
