"""Hosts with addresses of their own: two network namespaces train together, and a cable is pulled in a step."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.job import Job
from faults.runs import Bench, committed, last_step, rows, wait_until

pytestmark = pytest.mark.prove

NODES = {"jaxtrain-a": "10.77.0.1", "jaxtrain-b": "10.77.0.2"}
TIMEOUT = 8
"""--node-timeout of the launchers, in seconds."""


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True, text=True, timeout=30)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("network"))


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    """Two namespaces joined by a cable; the name of this machine is the namespace's address in each."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs root and the ip command")
    names = list(NODES)
    try:
        for name, address in NODES.items():
            ip("netns", "add", name)
            folder = Path("/etc/netns") / name
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in NODES.items():
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name, check=False)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


def start(bench: Bench, node: int, run: Path) -> Job:
    """The launcher of a node, with one process."""
    name = list(NODES)[node]
    words = ["ip", "netns", "exec", name, *bench.command(run, supervise=True)]
    words += ["--nodes", "2", "--node-rank", str(node), "--coordinator", f"{next(iter(NODES.values()))}:23456"]
    words += ["--node-timeout", str(TIMEOUT), "--node-wait", "120"]
    return bench.start(words, JAXTRAIN_FAULT=json.dumps({"pause": 0.5}))


def test_a_cut_cable_ends_both_sides_and_the_job_goes_on_when_it_is_back(bench: Bench, nodes: list[str]) -> None:
    want, run = bench.reference(2), bench.folder / "cut"
    jobs = [start(bench, node, run) for node in (0, 1)]
    try:
        assert wait_until(lambda: last_step(run) >= 4 and bool(committed(run)), 200, jobs[0]), [j.text for j in jobs]
        ip("-n", nodes[1], "link", "set", "cable", "down")
        began = time.monotonic()

        def no_trainer() -> bool:
            found = subprocess.run(["pgrep", "-f", f"jaxtrain train .*{run}"], capture_output=True, check=False)
            return found.returncode != 0

        assert wait_until(no_trainer, 60), [job.text for job in jobs]
        ended = time.monotonic() - began
        assert ended < TIMEOUT + 5 + 3, f"the processes ended {ended:.1f} s after the cut"
        steps = last_step(run)
        ip("-n", nodes[1], "link", "set", "cable", "up")
        assert [job.wait(300) for job in jobs] == [0, 0], [job.text for job in jobs]
        assert f"is gone: no word for {TIMEOUT} s" in jobs[0].text, jobs[0].text
        assert f"node 1 has lost the rendezvous: no word for {TIMEOUT} s" in jobs[1].text, jobs[1].text
        assert steps < want[-1]["step"] and [row["loss"] for row in rows(run)] == [row["loss"] for row in want]
    finally:
        for job in jobs:
            job.kill()
