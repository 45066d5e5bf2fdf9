"""Checkpoints of several processes: readers beside a writer, kill -9, two processes that save."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from stores import DATA, ROOT, abstract, assert_equal_trees, mesh_of, state_of, store

from jaxtrain.checkpoint import CheckpointReader, digest, gather_json
from jaxtrain.checkpoint.gather import merge_nested

# The array reader leaves unawaited coroutines when a file is damaged.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

SAVES = """
import itertools, sys, time
from pathlib import Path
from stores import *
checkpoints = store(Path(sys.argv[1]) / "checkpoints", keep=1)
for step in itertools.count(1):
    checkpoints.save(step, state_of(step), DATA, {"step": step})
    if (Path(sys.argv[1]) / "enough").exists():
        break
    time.sleep(0.02 * (step % 8))
checkpoints.close()
print(step, flush=True)
"""


def test_a_reader_while_another_process_saves_harms_nobody(tmp_path):
    """Every save removes the checkpoint before it."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    process = python(SAVES, tmp_path)
    reader, read = CheckpointReader(folder), []
    while process.poll() is None:
        restored = reader.restore(abstract(state_of(0)))
        if restored is not None:
            read.append(restored.step)
            assert restored.meta == {"step": restored.step}
            assert_equal_trees(restored.state, state_of(restored.step))
        if len(set(read)) > 4:
            (tmp_path / "enough").touch()
    assert process.wait() == 0 and read == sorted(read)
    assert [p.name for p in folder.iterdir()] == [process.stdout.read().strip()]


def python(source, *arguments, **environment):
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}", **environment}
    return subprocess.Popen(
        [sys.executable, "-c", source, *map(str, arguments)], env=env, stdout=subprocess.PIPE, text=True
    )


KILLED = """
import sys
from pathlib import Path
from stores import *
checkpoints = store(Path(sys.argv[1]))
checkpoints.save(1, state_of(1, width=100_000), DATA, META)
checkpoints.wait()
checkpoints.save(2, state_of(2, width=100_000), DATA, META)
print("saving", flush=True)
import time; time.sleep(60)
"""


def test_killing_a_save_leaves_the_previous_checkpoint(tmp_path):
    process = python(KILLED, tmp_path)
    assert process.stdout.readline() == "saving\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    names = [p.name for p in tmp_path.iterdir()]
    assert any("tmp" in name for name in names), f"killed after the save had finished: {names}"
    checkpoints = store(tmp_path)
    assert checkpoints.latest() == 1
    step, state = checkpoints.restore(abstract(state_of(0, width=100_000)))[:2]
    checkpoints.close()
    assert step == 1
    assert_equal_trees(state, state_of(1, width=100_000))
    assert not any("tmp" in p.name for p in tmp_path.iterdir())


TWO = """
import sys
from pathlib import Path
import jax
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))
import json
from jaxtrain.checkpoint import digest, gather_json
from stores import *
me = jax.process_index()
data = gather_json({"shards": {str(me): {"document": 10 ** (3 * me)}}, "epoch": 1})
try:
    gather_json({"epoch": me})
    clash = ""
except ValueError as error:
    clash = str(error)
state = state_of(4, mesh_of(8, 1))
checkpoints = store(Path(sys.argv[1]))
checkpoints.save(4, state, data, META)
checkpoints.save(5, state, data, META)
checkpoints.wait()
if me == 0:
    flip(largest_file(Path(sys.argv[1]) / "5" / "state"))
from jaxtrain.launch.coordination import wait_for_all
wait_for_all("flipped")
step, restored, read = checkpoints.restore(abstract(state))[:3]
checkpoints.save(5, restored, data, META)
checkpoints.close()
print(json.dumps({"step": step, "data": read, "digest": digest(restored), "clash": clash}), flush=True)
"""


def test_two_processes_save_and_one_restores(tmp_path):
    with socket.socket() as s:
        s.bind(("localhost", 0))
        address = f"localhost:{s.getsockname()[1]}"
    processes = [python(TWO, tmp_path, address, i, JAX_NUM_CPU_DEVICES="4") for i in range(2)]
    outputs = [json.loads(p.communicate(timeout=120)[0].splitlines()[-1]) for p in processes]
    assert [p.returncode for p in processes] == [0, 0] and outputs[0] == outputs[1]
    assert outputs[0]["step"] == 4
    assert outputs[0]["data"] == {"shards": {"0": {"document": 1}, "1": {"document": 1000}}, "epoch": 1}
    assert outputs[0]["digest"] == digest(state_of(4))
    assert outputs[0]["clash"] == "processes disagree on epoch: 0 and 1"
    checkpoints = store(tmp_path)
    step, state, data = checkpoints.restore(abstract(state_of(0, mesh_of(2, 1))))[:3]
    checkpoints.close()
    assert step == 5 and data == outputs[0]["data"]
    assert_equal_trees(state, state_of(4))
    assert (tmp_path / "damaged-5-0").is_dir()


def test_gather_in_one_process_returns_its_input_and_merging_is_recursive():
    assert gather_json(DATA) == DATA
    assert merge_nested({"a": {"x": 1}, "c": 3}, {"a": {"y": 2}, "c": 3}) == {"a": {"x": 1, "y": 2}, "c": 3}
    with pytest.raises(ValueError, match="disagree on a/x: 1 and 2"):
        merge_nested({"a": {"x": 1}}, {"a": {"x": 2}})
