"""Host memory of saving and restoring, in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SAVES = """
import json, sys
from pathlib import Path
sys.path.insert(0, "tools/bench")
from checkpoint_memory import measure
print(json.dumps(measure(Path(sys.argv[1]), 200, 26)))
"""

RESTORE = """
import json, resource, sys
from pathlib import Path
import jax, jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from jaxtrain.checkpoint import CheckpointReader, Checkpoints
from jaxtrain.config import CheckpointConfig
LEAF, LEAVES = 16 << 20, 16
names = [f"w{i}" for i in range(LEAVES)]
here = SingleDeviceSharding(jax.devices()[0])
abstract = {name: jax.ShapeDtypeStruct((LEAF // 4,), jnp.float32, sharding=here) for name in names}
if sys.argv[2] == "save":
    state = {name: jax.random.normal(jax.random.key(i), (LEAF // 4,)) for i, name in enumerate(names)}
    checkpoints = Checkpoints(Path(sys.argv[1]), CheckpointConfig())
    checkpoints.save(1, state, {}, {})
    checkpoints.close()
else:
    reader = CheckpointReader(Path(sys.argv[1]))
    reader.restore({"w0": abstract["w0"]}, subset=True)
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    before = peak()
    restored = reader.restore(abstract)
    print(json.dumps({"over_state_in_leaves": (peak() - before - LEAVES * LEAF) / LEAF}))
"""


def run(source, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1"}
    command = [sys.executable, "-c", source, *map(str, arguments)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.prove
def test_restoring_needs_the_state_and_a_few_of_its_largest_leaves(tmp_path):
    """Beyond the state: what is read of a leaf, decoded, and its copy."""
    run(RESTORE, tmp_path, "save")
    over = json.loads(run(RESTORE, tmp_path, "restore")[-1])["over_state_in_leaves"]
    assert over < 4, over


@pytest.mark.prove
def test_resident_memory_is_flat_over_200_asynchronous_saves(tmp_path):
    resident = {int(saves): mb for saves, mb in json.loads(run(SAVES, tmp_path)[-1]).items()}
    assert max(resident.values()) - resident[20] < 26, resident
