"""Seconds of a save and a restore of a state of 200 MB: local disks with peer copies, and the durable checkpoint.

Each node is a process of its own on this machine, with a folder as its disk. A job trains, is killed, loses the disk of
one node, and starts again; then all local files are removed, and the durable checkpoint is restored.

python tools/bench/local_tier.py [NODES ...]
"""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from faults.job import Job
from faults.runs import Bench, read_events, wait_until

STEPS, EVERY, DURABLE = 12, 2, 5
MODEL = {"vocab_size": 320, "d_model": 512, "n_layers": 4, "n_heads": 8, "d_ff": 2048, "max_seq_len": 32}
LIMIT = 600.0


def measure(bench: Bench, nodes: int, preset: str) -> list[str]:
    """Rows of the table for so many nodes."""
    name = f"{preset}{nodes}"
    disks = bench.folder / name
    config = bench.write_config(
        f"{name}.yaml",
        model=MODEL,
        train={"steps": STEPS, "global_batch": 4},
        eval={"every": None},
        rules={"preset": [preset], "replicated_limit": 10**9},
        checkpoint={"every": DURABLE, "local": {"directory": f"{disks}/$JAXTRAIN_HOST", "every": EVERY}},
    )
    run = bench.folder / "runs" / name
    train_until(bench, run, nodes, config, "local_checkpoint", 6)
    shutil.rmtree(disks / f"node{nodes - 1}")
    train_until(bench, run, nodes, config, "local_checkpoint", 8)
    train_until(bench, run, nodes, config, "restored", 8)
    shutil.rmtree(disks)
    train_until(bench, run, nodes, config, "restored", DURABLE)
    events = read_events(run)
    shutil.rmtree(run)
    shutil.rmtree(disks)
    lost, whole, durable = [event["seconds"] for event in events if event["kind"] == "restored"]
    # The first save of a start compiles the digests.
    saves = [e for e in events if e["kind"] == "local_checkpoint" and e["step"] in (4, 6)]
    stored = [e for e in events if e["kind"] == "checkpoint"]
    head = f"| {nodes} nodes, {preset}"
    megabytes = stored[0]["bytes"] / 1e6
    return [
        f"{head}: local save, {saves[0]['bytes'] / 1e6:.0f} MB, {saves[0]['copied'] / 1e6:.0f} of them copied "
        f"| {mean(saves, 'blocked_s'):.2f} | {mean(saves, 'write_s'):.2f} |",
        f"{head}: durable save, {megabytes:.0f} MB | {mean(stored, 'blocked_s'):.2f} | {mean(stored, 'write_s'):.2f} |",
        f"{head}: restore, all disks there | {whole:.2f} | |",
        f"{head}: restore, one disk lost | {lost:.2f} | |",
        f"{head}: restore of the durable checkpoint | {durable:.2f} | |",
    ]


def train_until(bench: Bench, run: Path, nodes: int, config: Path, kind: str, step: int) -> None:
    """Start a job and kill it after an event of a step, or a later one."""
    before = len(read_events(run))
    jobs = bench.start_nodes(run, nodes, config)
    try:
        if not wait_until(lambda: _happened(run, before, kind, step), LIMIT, jobs[0]):
            raise RuntimeError(f"no {kind} of step {step}: {jobs[0].text[-2000:]}")
    finally:
        kill(jobs)


def kill(jobs: list[Job]) -> None:
    """End all processes with SIGKILL."""
    for job in jobs:
        job.signal(signal.SIGKILL)
    for job in jobs:
        job.kill()


def mean(events: list[dict[str, Any]], key: str) -> float:
    """The mean of a value."""
    return float(sum(event[key] for event in events) / len(events))


def _happened(run: Path, before: int, kind: str, step: int) -> bool:
    return any(event["kind"] == kind and event["step"] >= step for event in read_events(run)[before:])


def main() -> None:
    """Print the table."""
    counts = [int(word) for word in sys.argv[1:]] or [2, 4]
    print("| | training waits, or restore, s | written in the background, s |\n|---|--:|--:|")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder))
        for nodes in counts:
            for preset in ("fsdp", "ddp"):
                print("\n".join(measure(bench, nodes, preset)), flush=True)


if __name__ == "__main__":
    main()
