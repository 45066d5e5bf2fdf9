"""Several supervisors on addresses of the loopback: meeting, failing together, coming back."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxtrain.cli.launch import Launch, slurm_nodes
from jaxtrain.config import ConfigError
from jaxtrain.launch.node import Nodes
from jaxtrain.launch.ports import free_port

NODE = """
import json, os, sys
from jaxtrain.launch.local import launch
from jaxtrain.launch.node import Nodes
from jaxtrain.launch.watchdog import Limits
count, rank, port, processes, timeout, events, *command = sys.argv[1:]
def record(kind, **values):
    with open(events, "a") as file:
        file.write(json.dumps({"kind": kind, **values}) + "\\n")
try:
    nodes = Nodes(int(count), int(rank), ("127.0.0.1", int(port)), timeout=float(timeout), wait=20)
    limits = Limits(floors={"input": 1.0, "step": 1.0})
    sys.exit(launch(command, int(processes), settle=1, restarts=5, limits=limits, record=record, nodes=nodes))
except Exception as error:
    print(type(error).__name__, error)
    sys.exit(2)
"""
# Ends when the file `go` appears; a step has 20 ms.
TRAINER = """
import os, signal, sys, time
from jaxtrain.launch.heartbeat import report_phase
rank, generation = int(os.environ["JAXTRAIN_RANK"]), int(os.environ["JAXTRAIN_GENERATION"])
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print(f"rank {rank} of {words['--processes']} pid {os.getpid()} at {words['--coordinator']}.", flush=True)
signal.signal(signal.SIGTERM, lambda *_: os._exit(75))
step = 0
while not os.path.exists("go"):
    step += 1
    report_phase("input", step)
    while os.path.exists(f"hang{rank}"):
        time.sleep(0.1)
    report_phase("step", step)
    time.sleep(0.02)
"""


class Job:
    """Supervisors of two nodes in a folder, their output in files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        (folder / "trainer.py").write_text(TRAINER)

    def start(self, node: int, processes: int = 1, timeout: float = 2.0, command: str = "trainer.py") -> None:
        words = [2, node, self.port, processes, timeout, "events", sys.executable, command]
        env = {**os.environ, "PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu"}
        with open(self.folder / f"out{node}", "a") as output:
            self.nodes[node] = subprocess.Popen(
                [sys.executable, "-c", NODE, *map(str, words)], cwd=self.folder, env=env, stdout=output,
                stderr=subprocess.STDOUT,
            )  # fmt: skip

    def output(self, node: int) -> str:
        return (self.folder / f"out{node}").read_text()

    def ranks(self, node: int) -> list[tuple[int, int, str]]:
        """(rank, pid, coordinator) of each process that a node ever started."""
        found = re.findall(r"rank (\d+) of \d+ pid (\d+) at (\S+)\.", self.output(node))
        return [(int(rank), int(pid), where) for rank, pid, where in found]

    def until(self, condition: Callable[[], bool], seconds: float = 15.0) -> float:
        begin = time.monotonic()
        while not condition():
            assert time.monotonic() - begin < seconds, f"{self.output(0)}\n---\n{self.output(1)}"
            time.sleep(0.02)
        return time.monotonic() - begin

    def until_started(self, *times: int) -> None:
        """Until node i has started times[i] processes, in the same generation on all nodes."""
        self.until(lambda: all(len(self.ranks(node)) >= count for node, count in enumerate(times)))

    def events(self, kind: str) -> list[dict[str, Any]]:
        lines = (self.folder / "events").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["kind"] == kind]

    def finish(self) -> None:
        """Let the trainers end; all supervisors return 0."""
        (self.folder / "go").touch()
        for node, process in self.nodes.items():
            assert process.wait(timeout=15) == 0, self.output(node)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    found = Job(tmp_path)
    yield found
    for process in found.nodes.values():
        process.kill()
        process.wait()
    pids = [pid for node in found.nodes for _, pid, _ in found.ranks(node)]
    found.until(lambda: not any(map(runs, pids)))


def runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_killed_worker_starts_all_nodes_again_at_another_coordinator(job: Job) -> None:
    job.start(1, processes=2)
    time.sleep(0.5)  # the rendezvous is not there yet
    job.start(0)
    job.until_started(1, 2)
    (zero,) = job.ranks(0)
    one, two = sorted(job.ranks(1))
    assert [zero[0], one[0], two[0]] == [0, 1, 2] and zero[2] == one[2] == two[2]
    os.kill(two[1], signal.SIGKILL)
    job.until_started(2, 4)
    assert not any(runs(pid) for _, pid, _ in (zero, one, two))
    assert len({where for _, _, where in [*job.ranks(0), *job.ranks(1)]}) == 2
    job.finish()
    failure = job.events("failure")[0]
    assert (failure["rank"], failure["status"], failure["cause"]) == (2, 137, "killed by SIGKILL")
    assert "process 2 of 3 ended with status 137" in job.output(0)


@pytest.mark.prove
def test_a_killed_supervisor_of_node_1_is_replaced(job: Job) -> None:
    job.start(0)
    job.start(1)
    job.until_started(1, 1)
    before = [pid for node in (0, 1) for _, pid, _ in job.ranks(node)]
    job.nodes[1].kill()
    assert job.until(lambda: not any(map(runs, before))) < 5
    job.start(1)
    job.until_started(2, 2)
    job.finish()
    assert job.events("failure")[0]["cause"] == "node lost" and "node 1 (" in job.output(0)


def test_a_killed_supervisor_of_node_0_is_replaced(job: Job) -> None:
    job.start(0)
    job.start(1)
    job.until_started(1, 1)
    before = [pid for node in (0, 1) for _, pid, _ in job.ranks(node)]
    job.nodes[0].kill()
    assert job.until(lambda: not any(map(runs, before))) < 5
    job.start(0)
    job.until_started(2, 2)
    job.finish()
    assert "node 1 has lost the rendezvous" in job.output(1)


@pytest.mark.prove
def test_a_node_that_is_cut_off_ends_the_generation_on_both_sides_in_time(job: Job) -> None:
    job.start(0, timeout=2)
    job.start(1, timeout=2)
    job.until_started(1, 1)
    (zero,), (one,) = job.ranks(0), job.ranks(1)
    # Silence without an end of the connection, as when a cable is pulled; its process goes on.
    job.nodes[1].send_signal(signal.SIGSTOP)
    assert 1.0 < job.until(lambda: not runs(zero[1])) < 2 + 1 + 2
    assert runs(one[1])
    job.nodes[1].send_signal(signal.SIGCONT)
    assert job.until(lambda: not runs(one[1])) < 5
    job.until_started(2, 2)
    job.finish()
    assert "no word for 2 s" in job.output(0)


@pytest.mark.prove
def test_the_rank_that_all_nodes_wait_for_is_named(job: Job) -> None:
    job.start(0)
    job.start(1)
    job.until_started(1, 1)
    time.sleep(0.5)
    (job.folder / "hang1").touch()
    job.until(lambda: "the stacks of all ranks follow" in job.output(1))
    (job.folder / "hang1").unlink()
    job.until_started(2, 2)
    job.finish()
    failure = job.events("failure")[0]
    assert (failure["cause"], failure["rank"], failure["phase"], failure["status"]) == ("stuck", 1, "input", 14)
    assert "trainer.py" in job.output(1) and "most recent call first" in job.output(1)


def test_signals_to_the_launchers_end_the_job(job: Job) -> None:
    job.start(0)
    job.start(1)
    job.until_started(1, 1)
    for node in (1, 0):
        job.nodes[node].send_signal(signal.SIGTERM)
    assert [job.nodes[node].wait(timeout=10) for node in (0, 1)] == [75, 75], job.output(0) + job.output(1)
    assert len(job.ranks(0)) == len(job.ranks(1)) == 1


@pytest.mark.prove
def test_another_job_and_a_second_holder_of_a_rank_are_refused(job: Job) -> None:
    job.start(0)
    job.start(1)
    job.until_started(1, 1)
    real = job.nodes[1]
    job.start(1, command="other.py")
    assert job.nodes[1].wait(timeout=10) == 2 and "refuses node 1: the job there is" in job.output(1)
    job.start(1)
    time.sleep(1.0)
    assert job.nodes[1].poll() is None and len(job.ranks(1)) == 1  # it waits for the place
    job.nodes[1].kill()
    job.nodes[1].wait()
    job.nodes[1] = real
    job.finish()


def test_nodes_from_options_and_from_srun() -> None:
    step = {
        "SLURM_STEP_NODELIST": "gpu[3-4]", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NODEID": "1", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0",
    }  # fmt: skip
    assert slurm_nodes(step) == (2, 1, "gpu3:57351")
    assert slurm_nodes({**step, "SLURM_STEP_NUM_TASKS": "16"}) is None and slurm_nodes({}) is None
    with pytest.raises(ConfigError, match="needs --coordinator too"):
        Launch("tiny", processes=1, nodes=2, node_rank=0)([])
    with pytest.raises(ConfigError, match="--node-rank 2 of --nodes 2"):
        Nodes(2, 2, ("127.0.0.1", 1))
