"""Replay: a flipped bit is named by device and leaf before its step is saved; replayed steps compute the same."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from runs import config_of, packed_rows, setup_of

from jaxtrain.config import CorruptionError, load_config, to_tree
from jaxtrain.launch.local import free_port
from jaxtrain.observe.events import read_events
from jaxtrain.train.batch import shard_batch
from jaxtrain.train.loop import train
from jaxtrain.train.replay import Replay
from jaxtrain.train.run import Run
from jaxtrain.train.step import compile_step


def flipped(array: jax.Array, device: int, bit: int = 7) -> jax.Array:
    """A float32 array with one bit of one element changed in the shard of one device."""
    shards = []
    for shard in array.addressable_shards:
        values = np.array(shard.data)
        if shard.device.id == device:
            values.view(np.uint32).ravel()[3] ^= np.uint32(1 << bit)
        shards.append(jax.device_put(values, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


class Flip:
    """Flips a bit of one device's copy of the embedding after a step."""

    def __init__(self, step: int, device: int) -> None:
        self.at, self.device = step, device

    def due(self, run: Run) -> bool:
        return run.step == self.at

    def __call__(self, run: Run) -> None:
        embed = run.state["params"]["embed"]
        embed["tokens"] = flipped(embed["tokens"], self.device)


def write_config(folder: Path) -> Path:
    (folder / "corpus").mkdir()
    for i in range(20):
        (folder / "corpus" / f"{i}.txt").write_text(f"the quick brown fox {i} jumps over the lazy dog\n" * 9)
    tree = {
        "model": {"vocab_size": 300, "d_model": 16, "n_layers": 2, "n_heads": 2, "d_ff": 32, "max_seq_len": 32},
        "data": {
            "sources": [{"text": str(folder / "corpus")}], "tokenizer": {"vocab_size": 260}, "seq_len": 32,
            "cache": str(folder / "cache"),
        },
        "train": {"steps": 6, "global_batch": 8, "sample_prompt": ""},
        "eval": {"every": None},
        "checkpoint": {"every": 2},
        "observe": {"tensorboard": False},
        "guard": {"replay_every": 2},
    }  # fmt: skip
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def test_a_flipped_bit_is_named_and_its_step_is_not_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(write_config(tmp_path))
    assert to_tree(config)["guard"]["replay_every"] == 2
    with pytest.raises(CorruptionError) as caught:
        train(config, tmp_path / "flip", hooks=[Flip(3, device=5)])
    text = str(caught.value)
    assert text.startswith("step 4 is not saved") and caught.value.status == 4
    where = f"device 5 of {socket.gethostname()}"
    assert f"params/embed/tokens, before the step, differs from its replicas on {where}" in text
    assert f"params/embed/tokens, after the step, differs from its replicas on {where}" in text
    assert "computed twice" not in text
    assert "replay: one step in 2 is computed twice" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "flip" / "checkpoints").iterdir() if path.name.isdecimal()] == ["2"]
    assert [e["status"] for e in read_events(tmp_path / "flip") if e["kind"] == "end"] == [4]

    # Resumed without the fault it ends as a run without replays.
    train(config, tmp_path / "flip", quiet=True)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "flip" / "metrics.jsonl").read_text().splitlines()]
    train(load_config(tmp_path / "run.yaml", ["guard.replay_every=null"]), tmp_path / "plain", quiet=True)
    plain = [json.loads(line)["loss"] for line in (tmp_path / "plain" / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 6 and losses == plain


@pytest.mark.parametrize("preset", ["ddp", pytest.param("fsdp", marks=pytest.mark.prove)])
def test_a_device_that_computes_other_bits_the_second_time_is_named(preset: str) -> None:
    setup = setup_of(config_of(rules={"preset": [preset]}))
    program = compile_step(setup.step, setup.abstract, setup.abstract_batch, donate=False)
    batch = shard_batch(packed_rows(0), 0, setup.batch_shape, setup.batch_sharding)
    calls = []

    def unsteady(state: Any, batch: Any) -> Any:
        state, metrics = program(state, batch)
        calls.append(0)
        if len(calls) == 4:
            up = state["params"]["layers"]["mlp"]["up"]
            up["weight"] = flipped(up["weight"], device=2, bit=0)
        return state, metrics

    replay = Replay(unsteady, every=5)
    assert replay.due(5) and not replay.due(6)
    state, metrics = replay(setup.init_state(), batch, 5)
    assert int(state["steps"]) == 1 and bool(metrics["applied"])
    with pytest.raises(CorruptionError) as caught:
        replay(state, batch, 10)
    found = [line.strip() for line in str(caught.value).splitlines()[1:-1]]
    where = f"device 2 of {socket.gethostname()}"
    replicas = [f"params/layers/mlp/up/weight, after the step, differs from its replicas on {where}"]
    assert found == [
        f"params/layers/mlp/up/weight, computed twice, differs on {where}", *(replicas if preset == "ddp" else [])
    ]  # fmt: skip


SCRIPT = """
import sys
from pathlib import Path
from jaxtrain.launch.distributed import guard, join
from test_replay import Flip
port, rank, folder = sys.argv[1:]
join(f"127.0.0.1:{port}", 2, int(rank))
def main():
    from jaxtrain.config import load_config
    from jaxtrain.train.loop import train
    import jax
    # Device 1 of process 1 holds the bit.
    train(load_config(Path(folder) / "run.yaml"), Path(folder) / "two", hooks=[Flip(3, jax.devices()[3].id)])
    return 0
sys.exit(guard(main))
"""


@pytest.mark.prove
def test_two_processes_both_name_the_device_and_its_process(tmp_path: Path) -> None:
    write_config(tmp_path)
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": "2", "PYTHONPATH": f"{Path(__file__).parent}:{os.getcwd()}"}
    command = [sys.executable, "-c", SCRIPT, str(free_port())]
    workers = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=240)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert [worker.returncode for worker in workers] == [4, 4], outputs
    for output in outputs:
        assert "params/embed/tokens, before the step, differs from its replicas on device" in output
        assert f"of process 1 ({socket.gethostname()} pid {workers[1].pid})" in output
    assert [path.name for path in (tmp_path / "two" / "checkpoints").iterdir() if path.name.isdecimal()] == ["2"]
