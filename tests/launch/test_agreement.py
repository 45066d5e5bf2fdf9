"""Two processes that differ in a setting, a file or a directory end at once, and name it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxtrain.launch.agreement import differences
from jaxtrain.launch.local import free_port

CASES: dict[str, list[str]] = {
    "learning rate": ["optimizer.learning_rate=0.5"],
    "seed": ["train.seed=7"],
    "precision": ["precision.compute=bfloat16"],
    "steps": ["train.steps=3"],
    "a rule": ["data.allow_changed=true"],
    "corpus": [],
    "path": [],
    "directory": [],
    "checkpoints": [],
}
"""Case -> settings that process 1 has beside those of process 0."""

# Both processes go through all cases: each must end in a ConfigError before anything is computed.
BOTH = """
import json, os, sys, time
from pathlib import Path
from jaxtrain.launch.distributed import guard, join
rank, cases = int(sys.argv[1]), json.loads(sys.argv[3])
join(sys.argv[2], 2, rank)
from jaxtrain.config import ConfigError, load_config
from jaxtrain.launch import agreement
from jaxtrain.train.loop import train
agreement.NFS_S = 1.0
def main():
    for case, overrides in cases.items():
        os.chdir(f"host{rank if case in ('corpus', 'directory', 'checkpoints') else 0}")
        config = load_config("run.yaml", overrides if rank else [])
        run = {"path": f"run-{rank}", "directory": "run", "checkpoints": "old"}.get(case, "../shared/run")
        begin = time.monotonic()
        try:
            train(config, Path(run))
        except ConfigError as error:
            print(json.dumps({"case": case, "text": str(error), "seconds": time.monotonic() - begin}), flush=True)
        os.chdir("..")
    return 0
sys.exit(guard(main))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two hosts' folders with the same configuration; a line of one corpus file and the checkpoints differ."""
    folder = tmp_path_factory.mktemp("agreement")
    tree = {
        "model": {"vocab_size": 300, "d_model": 16, "n_layers": 2, "n_heads": 2, "d_ff": 32, "max_seq_len": 32},
        "data": {"sources": [{"text": "corpus"}], "tokenizer": {"vocab_size": 300}, "seq_len": 32, "cache": "cache"},
        "train": {"steps": 6, "global_batch": 8},
    }  # fmt: skip
    for host in ("host0", "host1"):
        (folder / host / "corpus").mkdir(parents=True)
        (folder / host / "run.yaml").write_text(yaml.safe_dump(tree))
        for i in range(9):
            (folder / host / "corpus" / f"{i}.txt").write_text(f"the quick brown fox {i} jumps over the dog\n" * 9)
    (folder / "host1" / "corpus" / "4.txt").write_text("another text\n" * 9)
    # Host 1 sees the same old run (a mount), with one checkpoint more.
    (folder / "host0" / "old" / "checkpoints" / "10").mkdir(parents=True)
    (folder / "host0" / "old" / "config.yaml").write_text(yaml.safe_dump(tree))
    shutil.copytree(folder / "host0" / "old", folder / "host1" / "old")
    (folder / "host1" / "old" / "checkpoints" / "20").mkdir()
    return folder


def run_all(folder: Path, commands: list[list[str]], env: list[dict[str, str]] | None = None) -> list[tuple[int, str]]:
    """(status, output) of processes that run at the same time."""
    common = {**os.environ, "JAX_NUM_CPU_DEVICES": "1", "PYTHONPATH": os.getcwd()}
    processes = [
        subprocess.Popen(
            [sys.executable, *command], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=common | added,
        )
        for command, added in zip(commands, env or [{}] * len(commands), strict=True)
    ]  # fmt: skip
    return [(process.wait(), output) for process in processes for output in [process.communicate(timeout=120)[0]]]


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> list[dict[str, dict[str, Any]]]:
    """{case: message and seconds} of each process."""
    address = f"127.0.0.1:{free_port()}"
    commands = [["-c", BOTH, str(rank), address, json.dumps(CASES)] for rank in range(2)]
    done = run_all(folder, commands)
    assert [status for status, _ in done] == [0, 0], done
    found = []
    for _, output in done:
        lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"case"')]
        found.append({line["case"]: line for line in lines})
    return found


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("learning rate", "optimizer.learning_rate is 0.5 on process 1 (HOST pid"),
        ("seed", "train.seed is 7 on process 1 (HOST pid"),
        ("precision", 'precision.compute is "bfloat16" on process 1 (HOST pid'),
        ("steps", "train.steps is 3 on process 1 (HOST pid"),
        ("a rule", "data.allow_changed is true on process 1 (HOST pid"),
        ("corpus", "corpus (fingerprint) is"),
        ("path", "host0/run-1"),
        ("directory", "host1/run"),
        ("checkpoints", "host1/old"),
    ],
)
def test_the_odd_one_out_is_named_on_both(outcomes: list[dict[str, dict[str, Any]]], case: str, words: str) -> None:
    for found in outcomes:
        assert words.replace("HOST", os.uname().nodename) in found[case]["text"]
        assert "process 1 (" in found[case]["text"]
        assert found[case]["seconds"] < 20


def test_nothing_is_left_behind(outcomes: list[dict[str, dict[str, Any]]], folder: Path) -> None:
    left = [path for path in folder.rglob("*") if path.name.startswith(".jaxtrain") or path.name.startswith("run-")]
    assert not left and not (folder / "shared").exists()


def test_other_devices_end_both_commands_with_status_2(folder: Path) -> None:
    address = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", "2", "--process-id"]
    command = ["-m", "jaxtrain", "train", "host0/run.yaml", "--run", "devices", *address]
    begin = time.monotonic()
    done = run_all(folder, [[*command, "0"], [*command, "1"]], [{}, {"JAX_NUM_CPU_DEVICES": "2"}])
    assert time.monotonic() - begin < 60
    for status, output in done:
        assert status == 2 and "Traceback" not in output, output
        assert "devices of a process is 2 on process 1 (" in output and "1 on process 0 (" in output


def test_the_minority_comes_first() -> None:
    def name(rank: int) -> str:
        return f"p{rank}"

    facts = [{"a": 1, "b": None, "c": [1]}, {"a": 2, "b": None, "c": [1]}, {"a": 1, "b": None}, {"a": 1, "b": None}]
    assert differences(facts, name) == ["a is 2 on p1, 1 on p0, p2, p3", "c is unset on p2, p3, [1] on p0, p1"]
    many = [{"a": 0}] * 9 + [{"a": 1}] * 6
    assert differences(many, name) == ["a is 1 on p9, p10, p11, p12 and 2 more, 0 on p0, p1, p2, p3 and 5 more"]
    assert differences([{"a": 1}, {"a": 1}], name) == []


GROUPS = """
import sys
from jaxtrain.launch.distributed import guard, join
rank = int(sys.argv[1])
join(sys.argv[2], 4, rank)
from jaxtrain.config import validate
from jaxtrain.train.resolve import bind
def main():
    config = validate({"mesh": {"tensor": 2}, "cluster": {"domain_size": 2}})
    groups = bind(config).topology.devices.reshape(2, 2)
    print("groups", [[device.process_index for device in group] for group in groups], flush=True)
    return 0
sys.exit(guard(main))
"""


def test_hosts_in_any_order_give_the_same_mesh(folder: Path) -> None:
    hosts = "baab"
    address = f"127.0.0.1:{free_port()}"
    commands = [["-c", GROUPS, str(rank), address] for rank in range(4)]
    done = run_all(folder, commands, [{"JAXTRAIN_HOST": host} for host in hosts])
    expected = sorted([rank for rank in range(4) if hosts[rank] == host] for host in "ab")
    for status, output in done:
        assert status == 0 and f"groups {expected}" in output, output
