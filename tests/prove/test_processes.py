"""The number of processes changes no loss: on every axis, and across restarts with another number."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from faults.runs import FLAGS, Bench, last_step, rows, wait_until

pytestmark = pytest.mark.prove

AXES: dict[str, dict[str, Any]] = {
    "data": {"mesh": {"data": 4}, "rules": {"preset": ["fsdp"]}},
    "tensor": {"mesh": {"data": 1, "tensor": 4}, "rules": {"preset": ["tensor_sequence"]}},
    "seq": {"mesh": {"data": 1, "seq": 4}},
    "pipe": {"mesh": {"data": 1, "pipe": 4}, "train": {"accumulation": 4}},
    "expert": {"mesh": {"data": 1, "expert": 4}, "model": {"moe": {"experts": 4, "top_k": 2, "balance_weight": 0.02}}},
}
STEPS = 4


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("processes"))


def losses(bench: Bench, name: str, config: Path, processes: int) -> list[dict[str, Any]]:
    """Rows of a run of four devices in so many processes."""
    run = bench.folder / "runs" / f"{name}-{processes}"
    command = bench.command(run, processes, (), config)
    if processes > 1:
        command[command.index("--devices-per-process") + 1] = str(4 // processes)
    job = bench.start(command, JAX_NUM_CPU_DEVICES=str(4 // processes), NPROC="32", XLA_FLAGS=f"{FLAGS} {SCHEDULER}")
    status = job.wait(400)
    assert status == 0, job.text
    return rows(run)


# Without it independent collectives of one program may run in different order on different devices and deadlock.
SCHEDULER = "--xla_cpu_enable_concurrency_optimized_scheduler=false"


@pytest.mark.parametrize("axis", AXES)
def test_one_two_and_four_processes_have_the_same_losses(bench: Bench, axis: str) -> None:
    sections = AXES[axis]
    model = {"d_model": 32, "n_layers": 4, "n_heads": 4, "d_ff": 64, **sections.get("model", {})}
    train = {"steps": STEPS, **sections.get("train", {})}
    rules = {"replicated_limit": 10**9, **sections.get("rules", {})}
    other = {key: value for key, value in sections.items() if key not in ("model", "train", "rules")}
    # Each process is a fast domain of its own.
    other["mesh"] = {**other["mesh"], "allow_cross_domain": ["tensor", "expert"]}
    config = bench.write_config(f"{axis}.yaml", model=model, train=train, rules=rules, **other)
    want = losses(bench, axis, config, 1)
    assert [row["step"] for row in want] == list(range(1, STEPS + 1))
    for processes in (2, 4):
        got = losses(bench, axis, config, processes)
        for a, b in zip(got, want, strict=True):
            assert a["scored_tokens"] == b["scored_tokens"]
            assert a["loss"] == pytest.approx(b["loss"], rel=2e-5)


def batches(run: Path) -> list[tuple[Any, ...]]:
    """Step, digest of the global batch and counts of each row: equal where the global batches are."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [
        (row["step"], row["batch_digest"], row["scored_tokens"], row["tokens_total"]) for row in map(json.loads, lines)
    ]


def test_two_four_one_processes_across_restarts_read_the_same_global_batches(bench: Bench) -> None:
    """Packing, two weighted sources, a schedule of sequence lengths, an epoch border; a kill and a signal."""
    data = {
        "sources": [
            {"text": "{folder}/corpus", "include": ["file1*.py"], "weight": 2.0},
            {"text": "{folder}/corpus", "exclude": ["file1*.py"]},
        ],
        "packing": "best_fit", "packing_bins": 4, "held_out": 0.1,
        "schedule": [{"start": 0, "seq_len": 16}, {"start": 7, "seq_len": 32}],
    }  # fmt: skip
    train = {"steps": 24, "metrics": ["batch_digest"]}
    config = bench.write_config("moves.yaml", data=data, train=train, checkpoint={"every": 2})
    whole, run = bench.folder / "runs" / "whole", bench.folder / "runs" / "moves"
    job = bench.start(bench.command(whole, 1, (), config))
    assert job.wait(200) == 0, job.text
    assert any(float(epochs) > 1 for epochs in re.findall(r"([\d.]+) epochs", job.text)), job.text
    pause = {"JAXTRAIN_FAULT": json.dumps({"pause": 0.2})}
    for processes, until, signum in ((2, 5, signal.SIGKILL), (4, 13, signal.SIGTERM)):
        job = bench.start(bench.command(run, processes, (), config), **pause)
        assert wait_until(lambda until=until: last_step(run) >= until, 400, job), job.text  # type: ignore[misc]
        job.signal(signum)
        assert job.wait(200) not in (0, None), job.text
    job = bench.start(bench.command(run, 1, (), config))
    assert job.wait(200) == 0, job.text
    assert re.search(r"resumed at step 1[2-9]", job.text), job.text
    assert batches(run) == batches(whole)
    for a, b in zip(rows(run), rows(whole), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=2e-5)


def test_two_processes_save_by_the_wall_clock_at_the_same_step(bench: Bench) -> None:
    """Process 0's clock decides for all: a checkpoint of a step that only one saved would never be committed."""
    config = bench.write_config("clock.yaml", checkpoint={"every": None, "every_minutes": 0.02, "keep": 20})
    run = bench.folder / "runs" / "clock"
    job = bench.start(bench.command(run, 2, (), config), JAXTRAIN_FAULT=json.dumps({"pause": 0.4}))
    assert job.wait(300) == 0, job.text
    found = sorted(int(path.name) for path in (run / "checkpoints").iterdir())
    assert len(found) >= 3 and found[-1] == 12 and found != list(range(1, 13)), found
    assert [row["loss"] for row in rows(run)] == [row["loss"] for row in bench.reference(2)]
