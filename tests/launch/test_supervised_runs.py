"""Real training under the launcher: stopped, killed and killed again, it ends with the losses of the unbroken run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_resume import config_tree, write_corpus

from jaxtrain.cli import main
from jaxtrain.observe.events import read_events

pytestmark = pytest.mark.prove


class Runs:
    """Runs of one configuration in a folder, each by a launcher of two processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_corpus(folder / "corpus")
        tree = config_tree(folder) | {
            "checkpoint": {"every": 20},
            "eval": {"every": None},
            "watchdog": {"floors": {"input": 15, "step": 15, "checkpoint": 30}},
        }
        tree["train"]["steps"] = 300
        (folder / "run.yaml").write_text(yaml.safe_dump(tree))

    def start(self, name: str) -> subprocess.Popen[bytes]:
        words = ["launch", str(self.folder / "run.yaml"), "--run", str(self.folder / name), "--processes", "2"]
        with open(self.folder / f"{name}.out", "ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "jaxtrain", *words, "--devices-per-process", "1"],
                env={**os.environ, "JAX_PLATFORMS": "cpu"}, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def output(self, name: str) -> str:
        return (self.folder / f"{name}.out").read_text()

    def rows(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name / "metrics.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [{key: row[key] for key in ("step", "loss", "tokens_total")} for row in map(json.loads, lines)]

    def until_rows(self, name: str, launcher: subprocess.Popen[bytes], reached: Callable[[int], bool]) -> int:
        deadline = time.monotonic() + 240
        while not reached(count := len(self.rows(name))):
            assert launcher.poll() is None and time.monotonic() < deadline, self.output(name)
            time.sleep(0.02)
        return count


def worker_of(launcher: subprocess.Popen[bytes], rank: int) -> int:
    """The pid of a rank's process."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_text().split("\0")
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == launcher.pid and words[words.index("--process-id") + 1] == str(rank):
            return int(path.name)
    raise AssertionError(f"no process of rank {rank}")


def test_stopped_killed_and_without_its_launcher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = Runs(tmp_path)
    unbroken = runs.start("unbroken")
    assert unbroken.wait(timeout=400) == 0, runs.output("unbroken")
    launcher = runs.start("broken")
    runs.until_rows("broken", launcher, lambda count: count >= 50)
    os.kill(worker_of(launcher, 1), signal.SIGSTOP)
    count = runs.until_rows("broken", launcher, lambda count: count < 50)  # it has resumed
    runs.until_rows("broken", launcher, lambda now: now > max(count, 90))
    os.kill(worker_of(launcher, 0), signal.SIGKILL)
    count = runs.until_rows("broken", launcher, lambda count: count < 90)
    runs.until_rows("broken", launcher, lambda now: now > max(count, 130))
    launcher.kill()
    launcher.wait()
    launcher = runs.start("broken")
    assert launcher.wait(timeout=400) == 0, runs.output("broken")
    assert runs.rows("broken") == runs.rows("unbroken")

    events = read_events(tmp_path / "broken")
    stuck, killed = [event for event in events if event["kind"] == "failure"]
    assert (stuck["status"], stuck["cause"], stuck["rank"]) == (14, "stuck", 1) and 15 <= stuck["since_s"] < 25
    assert (killed["status"], killed["rank"]) == (137, 0)
    text = runs.output("broken")
    assert "rank 1 (" in text and "held by a signal (SIGSTOP)" in text
    assert "most recent call first" in text and "train/loop.py" in text  # rank 0, which waited in native code
    assert main(["report", str(tmp_path / "broken"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert sum(report["seconds"].values()) == pytest.approx(report["wall_s"])
    assert report["wall_s"] == pytest.approx(events[-1]["time"] - events[0]["began"], abs=1.0)
    assert len(report["restarts"]) == 3 and report["restarts"][0]["downtime_s"] > 15
    assert 0 < report["steps_lost"] <= 3 * 25 and report["seconds"]["productive"] > 0
