"""Jobs of several nodes on this machine that lose a process and its node's disk: local steps come from the peers."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from faults.job import Job
from faults.runs import Bench, committed, last_step, read_events, rows, wait_until

pytestmark = pytest.mark.prove

EVERY, DURABLE, STEPS = 2, 9, 16
PAUSE = '{"pause": 0.2}'
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"rules": {"preset": ["fsdp"], "replicated_limit": 10**9}},
    "ddp": {"rules": {"preset": ["ddp"]}},
    "tensor": {
        "mesh": {"data": -1, "tensor": 2, "allow_cross_domain": ["tensor"]},
        "rules": {"preset": ["tensor"], "replicated_limit": 10**9},
    },
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("local_tier"))


def write(bench: Bench, name: str, local: bool = True, **sections: Any) -> Path:
    """A configuration whose local directory is another one for each node."""
    checkpoint: dict[str, Any] = {"every": DURABLE}
    if local:
        checkpoint["local"] = {"directory": f"{bench.folder}/{name}/$JAXTRAIN_HOST", "every": EVERY}
    sections = {"train": {"steps": STEPS}, "optimizer": {"total": STEPS}, **sections}
    return bench.write_config(f"{name}{'' if local else '-unbroken'}.yaml", checkpoint=checkpoint, **sections)


def end(jobs: list[Job], limit: float = 200) -> list[int | None]:
    """The statuses of all processes, which all have ended."""
    statuses = [job.wait(limit) for job in jobs]
    for job in jobs:
        job.kill()
    return statuses


def unbroken(bench: Bench, nodes: int, config: Path) -> list[dict[str, Any]]:
    run = bench.folder / "runs" / config.stem
    jobs = bench.start_nodes(run, nodes, config)
    assert end(jobs) == [0] * nodes, jobs[0].text
    return rows(run)


def kill_one(bench: Bench, run: Path, nodes: int, config: Path, after: int, victim: int) -> int:
    """Train until a local save of a step beyond `after` is on all disks, then kill one process; the step reached."""
    jobs = bench.start_nodes(run, nodes, config, JAXTRAIN_FAULT=PAUSE)
    saved = lambda: [e["step"] for e in read_events(run) if e["kind"] == "local_checkpoint"]  # noqa: E731
    assert wait_until(lambda: max(saved(), default=0) > after, 200, jobs[0]), jobs[0].text
    reached = last_step(run)
    jobs[victim].signal(signal.SIGKILL)
    statuses = end(jobs)
    assert statuses[victim] == 137 and 0 not in statuses, jobs[0].text
    return max(reached, last_step(run))


@pytest.mark.parametrize(("nodes", "layout"), [(2, "fsdp"), (2, "ddp"), (4, "fsdp"), (4, "tensor")])
def test_a_killed_process_and_its_lost_disk_are_restored_from_peers(bench: Bench, nodes: int, layout: str) -> None:
    name, sections = f"{layout}{nodes}", LAYOUTS[layout]
    want = unbroken(bench, nodes, write(bench, name, local=False, **sections))
    config, run = write(bench, name, **sections), bench.folder / "runs" / name
    # Before the first durable checkpoint, and after it; process 0 is lost too.
    for after, victim in ((5, nodes - 1), (DURABLE + 1, 0)):
        reached = kill_one(bench, run, nodes, config, after, victim)
        shutil.rmtree(bench.folder / name / f"node{victim}")
        jobs = bench.start_nodes(run, nodes, config, JAXTRAIN_FAULT=PAUSE if after == 5 else "{}")
        assert wait_until(lambda job=jobs[0]: job.said("resumed at step"), 200, jobs[0]), jobs[0].text
        found = re.search(r"resumed at step (\d+) of \d+ from the local disks", jobs[0].text)
        assert found, jobs[0].text
        step = int(found[1])
        # One save may have been in flight.
        assert after < step and reached - step < 2 * EVERY, (reached, step)
        assert re.search(
            r"node of process \d+ .*had lost [\d,]+ of its shards' bytes, its peers gave them", jobs[0].text
        )
        if after == 5:
            assert committed(run) == []
            # Both disks hold everything again: another loss is restored as well.
            wait_until(lambda step=step: last_step(run) > step, 200, jobs[0])  # type: ignore[misc]
            jobs[victim].signal(signal.SIGKILL)
            end(jobs)
        else:
            assert end(jobs) == [0] * nodes, jobs[0].text
    assert rows(run) == want
    assert not list((bench.folder / name).rglob("*.shards")), "a finished run needs none"
    restored = [(e["tier"], e["step"]) for e in read_events(run) if e["kind"] == "restored"]
    assert all(tier == "local" for tier, _ in restored) and len(restored) >= 3
    sent = {e["copied"] for e in read_events(run) if e["kind"] == "local_checkpoint"}
    # Replicas of other nodes are the copies: of the whole state, or of the shards of a tensor group.
    assert len(sent) == 1 and (sent == {0}) == (layout != "fsdp")


def test_more_lost_disks_than_copies_fall_back_to_the_durable_checkpoint(bench: Bench) -> None:
    sections = LAYOUTS["fsdp"]
    want = unbroken(bench, 4, write(bench, "beyond", local=False, **sections))
    config, run = write(bench, "beyond", **sections), bench.folder / "runs" / "beyond"
    kill_one(bench, run, 4, config, DURABLE + 1, 1)
    for node in (1, 2):
        # Node 2 has the copies of node 1.
        shutil.rmtree(bench.folder / "beyond" / f"node{node}")
    jobs = bench.start_nodes(run, 4, config)
    assert end(jobs) == [0] * 4, jobs[0].text
    assert f"resumed at step {DURABLE} of" in jobs[0].text and "from the local disks" not in jobs[0].text
    assert "are not complete on the disks that are left: the durable one is used" in jobs[0].text
    assert rows(run) == want


def test_altered_files_come_from_the_copy_and_another_mesh_uses_the_durable_checkpoint(bench: Bench) -> None:
    sections = LAYOUTS["fsdp"]
    want = unbroken(bench, 2, write(bench, "altered", local=False, **sections))
    config, run = write(bench, "altered", **sections), bench.folder / "runs" / "altered"
    kill_one(bench, run, 2, config, DURABLE + 1, 1)
    files = sorted((bench.folder / "altered" / "node0").glob("*/*/*.shards"), key=lambda path: path.stat().st_mtime)
    for path in files[-3:]:
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
    jobs = bench.start_nodes(run, 2, config, JAXTRAIN_FAULT=PAUSE)
    assert wait_until(lambda: last_step(run) > DURABLE + 3 or jobs[0].process.poll() is not None, 200)
    text = jobs[0].text
    assert "altered bytes" in text and "from the local disks" in text, text
    jobs[1].signal(signal.SIGKILL)
    end(jobs)
    # The same directory and another number of processes.
    jobs = bench.start_nodes(run, 1, config)
    assert end(jobs) == [0], jobs[0].text
    assert f"resumed at step {DURABLE} of" in jobs[0].text
    for a, b in zip(rows(run), want, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-5)
