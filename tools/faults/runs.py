"""Runs of the campaign: a tiny model and corpus, unbroken references, and copies of an interrupted run."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from faults.job import Job
from faults.processes import MARK, marked

ROOT = Path(__file__).resolve().parents[2]
STEPS, EVERY = 12, 3
"""Steps of a run; steps between two checkpoints."""
KEYS = ("step", "loss", "grad_norm", "learning_rate", "scored_tokens", "tokens_total", "eval_loss", "loss_scale")
FLAGS = "--xla_backend_optimization_level=0"
"""Compile the tiny step in half the time."""
LIMIT = 150.0
"""Seconds after which a command counts as hung."""

CONFIG: dict[str, Any] = {
    "model": {"vocab_size": 320, "d_model": 32, "n_layers": 2, "n_heads": 2, "d_ff": 128, "max_seq_len": 32},
    "data": {"tokenizer": {"vocab_size": 320}, "seq_len": 32, "held_out": 0.2},
    "train": {"steps": STEPS, "global_batch": 8, "sample_prompt": ""},
    "optimizer": {"learning_rate": 1e-2, "warmup": 2, "total": STEPS},
    "checkpoint": {"every": EVERY},
    "eval": {"every": 4, "batches": 1},
    "observe": {"tensorboard": False, "progress": False},
}


class Bench:
    """One folder with a corpus, a configuration, references and runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.mark = f"{os.getpid()}-{time.time_ns()}"
        write_corpus(self.folder / "corpus")
        write_records(self.folder / "records.jsonl")
        version = self.folder / "versions" / "optax-0.0.1.dist-info"
        version.mkdir(parents=True, exist_ok=True)
        (version / "METADATA").write_text("Metadata-Version: 2.1\nName: optax\nVersion: 0.0.1\n")
        self.config = self.write_config("run.yaml")

    def write_config(self, name: str, **sections: dict[str, Any]) -> Path:
        """A configuration file: CONFIG with sections merged over it."""
        tree = {key: {**CONFIG.get(key, {}), **sections.get(key, {})} for key in {**CONFIG, **sections}}
        tree["data"] = {
            "sources": [{"text": str(self.folder / "corpus")}], "cache": str(self.folder / "cache"), **tree["data"]
        }  # fmt: skip
        path = self.folder / name
        path.write_text(yaml.safe_dump(tree, width=10**6).replace("{folder}", str(self.folder)))
        return path

    @cached_property
    def shim(self) -> Path | None:
        """The library of shim.c, None where there is no C compiler."""
        compiler = shutil.which("cc")
        if compiler is None:
            return None
        library = self.folder / "shim.so"
        source = Path(__file__).with_name("shim.c")
        subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
        return library

    def environment(self, **added: str) -> dict[str, str]:
        """The environment of every command; temporary files go to a folder that is looked at afterwards."""
        cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(self.folder / "compiled"))
        temporary = self.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        base = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "NPROC")}
        return {
            **base, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "PYTHONPATH": f"{Path(__file__).with_name('plant')}:{ROOT}", "PYTHONUNBUFFERED": "1", "MPLBACKEND": "agg",
            "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1", MARK: self.mark,
            "JAXTRAIN_FAULT": '{"pause": 0.0}', "XLA_FLAGS": FLAGS, **added,
        }  # fmt: skip

    def command(
        self,
        run: Path,
        processes: int = 1,
        overrides: Sequence[str] = (),
        config: Path | None = None,
        supervise: bool = False,
    ) -> list[str]:
        """What a user types: train for one process, else launch."""
        words = [sys.executable, "-m", "jaxtrain", "launch" if supervise or processes > 1 else "train"]
        words += [str(config or self.config), "--run", str(run)]
        if supervise or processes > 1:
            words += ["--processes", str(processes), "--devices-per-process", "1"]
        return [*words, *(f"--{override}" for override in overrides)]

    def start(self, command: Sequence[str], **env: str) -> Job:
        """Start a command with planted faults in `env`."""
        return Job(command, self.environment(**env), self.folder)

    def start_nodes(self, run: Path, nodes: int, config: Path, **env: str) -> list[Job]:
        """One trainer for each of so many nodes of this machine; JAXTRAIN_HOST tells them apart."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        words = [sys.executable, "-m", "jaxtrain", "train", str(config), "--run", str(run)]
        words += ["--coordinator", f"127.0.0.1:{port}", "--processes", str(nodes), "--process-id"]
        return [self.start([*words, str(i)], JAXTRAIN_HOST=f"node{i}", **env) for i in range(nodes)]

    def reference(self, processes: int, config: Path | None = None) -> list[dict[str, Any]]:
        """Rows of the unbroken run, trained once."""
        name = f"unbroken-{processes}-{hashlib.sha256((config or self.config).read_bytes()).hexdigest()[:8]}"
        run = self.folder / name
        if not (run / "summary.json").exists():
            job = self.start(self.command(run, processes, (), config))
            status = job.wait(2 * LIMIT)
            if status != 0:
                job.kill()
                raise RuntimeError(f"the unbroken run ended with {status}: {job.text[-300:]}")
        return rows(run)

    def interrupted(self, processes: int) -> Path:
        """A run killed after its checkpoints 6 and 9; to be copied."""
        run = self.folder / f"interrupted-{processes}"
        if run.exists():
            return run
        plan = json.dumps({"pause": 0.3})
        job = self.start(self.command(run, processes), JAXTRAIN_FAULT=plan)
        wait_until(lambda: last_step(run) >= 10 and 9 in committed(run), LIMIT, job)
        job.kill()
        kill_marked(self.mark)
        assert committed(run) == [6, 9], committed(run)
        return run

    def copy_interrupted(self, name: str, processes: int = 1) -> Path:
        """A copy of the interrupted run, as a run of its own."""
        run = self.folder / name
        shutil.copytree(self.interrupted(processes), run, symlinks=True)
        return run


class Watch:
    """Samples a run directory: when which step was recorded, and when which checkpoint was committed."""

    def __init__(self, run: Path) -> None:
        self.run, self.steps, self.commits = run, [(time.time(), last_step(run))], [(time.time(), committed(run))]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stop.wait(0.02):
            step, commits = last_step(self.run), committed(self.run)
            if step != self.steps[-1][1]:
                self.steps.append((time.time(), step))
            if commits != self.commits[-1][1]:
                self.commits.append((time.time(), commits))

    def close(self) -> None:
        """Stop sampling."""
        self._stop.set()
        self._thread.join()

    def step_at(self, moment: float) -> int:
        """The last step recorded at a moment."""
        return next((step for when, step in reversed(self.steps) if when <= moment), 0)

    def committed_at(self, moment: float) -> int:
        """The newest checkpoint at a moment, 0 if there was none."""
        found = next((commits for when, commits in reversed(self.commits) if when <= moment), [])
        return max(found, default=0)

    def first_after(self, moment: float, step: int) -> float | None:
        """When a step beyond `step` was recorded after a moment."""
        return next((when for when, at in self.steps if when > moment and at > step), None)


def write_corpus(folder: Path) -> None:
    """40 small files of Python, the same each time."""
    folder.mkdir(exist_ok=True)
    for number in range(40):
        functions = (f"def f{number}_{i}(x):\n    return x + {i * number}  # {'abc' * (i % 5)}\n" for i in range(9))
        (folder / f"file{number}.py").write_text("\n".join(functions))


def write_records(path: Path) -> None:
    """JSON lines, one of which is cut."""
    lines = [json.dumps({"text": f"def g{n}(x):\n    return x * {n}  # {'xyz' * (n % 7)}\n" * 4}) for n in range(120)]
    lines[50] = lines[50][:30]
    path.write_text("\n".join(lines) + "\n")


def rows(run: Path) -> list[dict[str, Any]]:
    """What must be the same in an interrupted and an unbroken run, for each step."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    # A NaN equals itself here.
    parsed = (json.loads(line, parse_constant=str) for line in lines)
    return [{key: row[key] for key in KEYS if key in row} for row in parsed]


def read_events(run: Path) -> list[dict[str, Any]]:
    """The events of a run; lines that are none are left out."""
    try:
        lines = (run / "events.jsonl").read_text(errors="replace").splitlines()
    except OSError:
        return []
    events = []
    for line in lines:
        with suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and "kind" in event and "time" in event:
                events.append(event)
    return events


def last_step(run: Path) -> int:
    """The last step in metrics.jsonl, 0 where there is none."""
    try:
        lines = (run / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
        return int(json.loads(lines[-1])["step"]) if lines else 0
    except (OSError, ValueError, KeyError):
        return 0


def committed(run: Path) -> list[int]:
    """Steps of the committed checkpoints."""
    try:
        return sorted(int(name) for name in os.listdir(run / "checkpoints") if name.isdigit())
    except OSError:
        return []


def wait_until(ready: Callable[[], object], limit: float, job: Job | None = None) -> bool:
    """Poll until `ready` or the job has ended; False if neither came within `limit` seconds, or it ended unready."""
    deadline = time.monotonic() + limit
    while not ready():
        if time.monotonic() > deadline or (job is not None and job.process.poll() is not None):
            return bool(ready())
        time.sleep(0.003)
    return True


def kill_marked(mark: str) -> None:
    """End every process of the campaign that still lives."""
    for pid in marked(mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
