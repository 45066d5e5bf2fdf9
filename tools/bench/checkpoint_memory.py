"""Resident memory of a process that saves checkpoints: after 20, 100 and 200 asynchronous saves of 52 MB.

python tools/bench/checkpoint_memory.py [SAVES] [MEGABYTES]
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from jaxtrain.checkpoint import Checkpoints
from jaxtrain.config import CheckpointConfig


def resident_mb() -> float:
    """Resident memory of this process now, in MB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 / 1e6


def measure(folder: Path, saves: int, megabytes: float, asynchronous: bool = True) -> dict[int, float]:
    """{number of saves: resident MB after them} of a state of incompressible numbers that changes every time."""
    leaves = 13
    key, shape = jax.random.key(0), (int(megabytes * 1e6 / 4 / leaves) // 1024, 1024)
    state = {f"w{i}": jax.random.normal(jax.random.fold_in(key, i), shape) for i in range(leaves)}
    bump = jax.jit(lambda tree: jax.tree.map(lambda leaf: jnp.sin(leaf + 1), tree), donate_argnums=0)
    checkpoints = Checkpoints(folder, CheckpointConfig(keep=1, asynchronous=asynchronous))
    resident = {}
    with contextlib.closing(checkpoints):
        for save in range(1, saves + 1):
            state = bump(state)
            checkpoints.save(save, state, {}, {})
            if save in {5, 10, 20, 50, 100, 150, 200, saves}:
                checkpoints.wait()
                resident[save] = resident_mb()
                print(f"{save:4d} saves: {resident[save]:7.1f} MB resident", flush=True)
    return resident


def main() -> None:
    """Save, and print the resident memory on the way."""
    saves, megabytes = (float(text) for text in [*sys.argv[1:], *("200", "52")[len(sys.argv) - 1 :]][:2])
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), int(saves), megabytes)


if __name__ == "__main__":
    main()
