"""Checkpoints hold layers in the model's order: any pipe size, with or without chunks, restores them bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from runs import config_of, setup_of

from jaxtrain.checkpoint import Checkpoints, digest
from jaxtrain.checkpoint.order import CheckpointOrder, shard_bytes
from jaxtrain.program.saving import save_bytes, state_bytes
from jaxtrain.train.resolve import Bound

MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one device": (1, {}),
    "pipe=4, empty slots": (8, {"mesh": {"pipe": 4}, "train": {"accumulation": 4}}),
    "pipe=2, three chunks": (
        4,
        {"mesh": {"pipe": 2}, "train": {"accumulation": 4}, "pipeline": {"schedule": "interleaved", "chunks": 3}},
    ),
    "pipe=2, stages 4 + 2, zero2": (
        8,
        {
            "mesh": {"pipe": 2},
            "pipeline": {"stages": [4, 2], "microbatches": 2},
            "rules": {"preset": ["zero2"]},
        },
    ),
}


def setup_on(name: str, optimizer: str) -> Bound:
    devices, sections = MESHES[name]
    return setup_of(config_of(model={"n_layers": 6}, optimizer={"name": optimizer}, **sections), devices)


@pytest.mark.parametrize("name", MESHES)
def test_a_save_needs_the_state_and_its_largest_reordered_leaf_again(name: str) -> None:
    setup = setup_on(name, "adamw")
    added = save_bytes(setup) - state_bytes(setup)
    order = CheckpointOrder(setup)
    leaves = zip(*map(jax.tree.leaves, (setup.abstract, order.model_order, order._reordered)), strict=True)
    reordered = [(shard_bytes(leaf), shard_bytes(wanted)) for leaf, wanted, stack in leaves if stack]
    if not reordered:
        assert added == 0
        return
    largest = max(reordered)[1]
    # The result, and what the collectives of the reordering hold: at most the gathered layers.
    assert largest <= added <= (1 + 2 * setup.topology.sizes["pipe"]) * largest < state_bytes(setup)


def full_state(setup: Bound) -> Any:
    """A state with random leaves, moments included, and zero in empty slots."""
    layout = CheckpointOrder(setup).checkpoint_layout
    leaves = jax.tree.leaves(layout)
    rng = np.random.default_rng(0)
    values = [jax.device_put(rng.integers(1, 100, leaf.shape).astype(leaf.dtype), leaf.sharding) for leaf in leaves]
    return CheckpointOrder(setup).from_checkpoint(jax.tree.unflatten(jax.tree.structure(layout), values))


@pytest.mark.parametrize(
    ("source", "optimizer"),
    [
        ("pipe=4, empty slots", "adafactor"),
        pytest.param("pipe=2, three chunks", "adamw", marks=pytest.mark.prove),
        pytest.param("pipe=4, empty slots", "adamw", marks=pytest.mark.prove),
        pytest.param("pipe=4, empty slots", "muon", marks=pytest.mark.prove),
        pytest.param("pipe=2, three chunks", "adafactor", marks=pytest.mark.prove),
    ],
)
def test_every_mesh_restores_the_checkpoints_of_the_others(tmp_path: Path, source: str, optimizer: str) -> None:
    setup = setup_on(source, optimizer)
    state = full_state(setup)
    assert any(jax.tree.leaves(CheckpointOrder(setup)._reordered)), "this layout needs no reordering: choose another"
    checkpoints = Checkpoints(tmp_path / "checkpoints", setup.config.checkpoint)
    checkpoints.save(1, CheckpointOrder(setup).to_checkpoint(state), {}, {})
    digests = digest(CheckpointOrder(setup).to_checkpoint(state))
    for name in MESHES:
        other = setup_on(name, optimizer)
        found = checkpoints.restore(CheckpointOrder(other).checkpoint_layout)
        assert found is not None and digest(found.state) == digests
        restored = CheckpointOrder(other).from_checkpoint(found.state)
        for leaf, want in zip(jax.tree.leaves(restored), jax.tree.leaves(other.abstract), strict=True):
            assert leaf.shape == want.shape and leaf.sharding == want.sharding
        for got, want in zip(
            jax.tree.leaves(CheckpointOrder(other).to_checkpoint(restored)),
            jax.tree.leaves(CheckpointOrder(setup).to_checkpoint(state)),
            strict=True,
        ):
            np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    checkpoints.close()


def test_a_save_reorders_one_leaf_at_a_time_into_host_memory() -> None:
    """Bytes on the devices beyond the state, by the compiler: of the program of all leaves, and of each leaf."""
    setup = setup_on("pipe=2, three chunks", "adamw")
    order = CheckpointOrder(setup)
    stacks = order._reordered

    def reorder_all(state: Any) -> Any:
        return jax.tree.map(lambda x, stack: setup.model.from_stack(stack, x) if stack else x, state, stacks)

    def added(program: Any) -> int:
        found = program.memory_analysis()
        return int(found.temp_size_in_bytes + found.output_size_in_bytes)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, order.model_order)
    whole = added(jax.jit(reorder_all, out_shardings=shardings).lower(setup.abstract).compile())
    leaves = zip(*map(jax.tree.leaves, (stacks, setup.abstract, shardings)), strict=True)
    programs = {(stack, leaf.shape, to): leaf for stack, leaf, to in leaves if stack}
    each = [added(order._reorderer("from_stack", k[0], k[2]).lower(v).compile()) for k, v in programs.items()]
    print(f"reordering all leaves adds {whole:,} bytes a device, one leaf at most {max(each):,}")
    assert 5 * max(each) < whole
    saved = order.to_checkpoint(full_state(setup))
    kinds = {
        stack: leaf.sharding.memory_kind for stack, leaf in zip(*map(jax.tree.leaves, (stacks, saved)), strict=True)
    }
    assert kinds.pop("") == "device" and set(kinds.values()) == {"pinned_host"}


@pytest.mark.prove
def test_an_initial_state_equals_that_of_one_device() -> None:
    want = setup_on("one device", "adamw").init_state()["params"]
    setup = setup_on("pipe=4, empty slots", "adamw")
    got = CheckpointOrder(setup).to_checkpoint(setup.init_state())["params"]
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-6, atol=1e-8)


def start(folder: Path, run: str, devices: int, *overrides: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "jaxtrain",
        "train",
        str(folder / "run.yaml"),
        "--run",
        str(folder / run),
        *overrides,
    ]
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output
    return output


def kill_after(process: subprocess.Popen[str], checkpoint: Path) -> None:
    """Send SIGKILL when a checkpoint is on disk."""
    deadline = time.time() + 900
    while not checkpoint.is_dir():
        assert process.poll() is None and time.time() < deadline, process.communicate()[0]
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.mark.prove
def test_killed_runs_resume_with_other_pipelines(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    for n in range(40):
        text = "\n".join(f"def f{n}_{i}(x):\n    return x + {i * n}  # {'abc' * (i % 5)}\n" for i in range(9))
        (tmp_path / "corpus" / f"{n}.py").write_text(text)
    tree = {
        "model": {"vocab_size": 320, "d_model": 32, "n_layers": 6, "n_heads": 2, "d_ff": 64, "max_seq_len": 32},
        "data": {
            "sources": [{"text": str(tmp_path / "corpus")}], "tokenizer": {"vocab_size": 320}, "seq_len": 32,
            "cache": str(tmp_path / "cache"), "held_out": 0.2,
        },
        "train": {"steps": 9, "global_batch": 8, "accumulation": 4, "sample_tokens": 4},
        "optimizer": {"learning_rate": 1e-2, "warmup": 2, "total": 9},
        "checkpoint": {"every": 3},
        "eval": {"every": 3, "batches": 1},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    finish(start(tmp_path, "unbroken", 1))
    kill_after(start(tmp_path, "piped", 8, "--mesh.pipe=4"), tmp_path / "piped" / "checkpoints" / "3")
    piped = "--mesh.pipe=2", "--pipeline.schedule=interleaved", "--pipeline.chunks=3"
    kill_after(start(tmp_path, "piped", 4, *piped), tmp_path / "piped" / "checkpoints" / "6")
    finish(start(tmp_path, "piped", 1))
    want, got = (
        {row["step"]: row for row in map(json.loads, (tmp_path / run / "metrics.jsonl").read_text().splitlines())}
        for run in ("unbroken", "piped")
    )
    assert sorted(want) == sorted(got) == list(range(1, 10))
    for step, row in want.items():
        assert got[step]["loss"] == pytest.approx(row["loss"], rel=2e-5)
        assert got[step]["scored_tokens"] == row["scored_tokens"]
        if "eval_loss" in row:
            assert got[step]["eval_loss"] == pytest.approx(row["eval_loss"], rel=2e-5)
