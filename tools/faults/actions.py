"""What is done to a run: signals, files, disks, and other commands beside it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from faults.fault import Action, NotRunError, Scene
from faults.runs import committed, last_step, wait_until

KINDS = {
    "record": "record/metadata",
    "tree of the state": "state/_METADATA",
    "shardings": "state/_sharding",
    "array metadata": "state/array_metadatas/process_0",
    "merged manifest": "state/manifest.ocdbt",
    "merged data": "state/d/*",
    "manifest of a process": "state/ocdbt.process_0/manifest.ocdbt",
    "array data": "state/ocdbt.process_0/d/*",
}
"""The files of a checkpoint by kind; of several, the largest."""


# Moments.


def step(number: int) -> Callable[[Scene], bool]:
    """When so many steps are recorded."""
    return lambda scene: last_step(scene.run) >= number


def saved(number: int) -> Callable[[Scene], bool]:
    """When this checkpoint is committed."""
    return lambda scene: number in committed(scene.run)


def printed(pattern: str) -> Callable[[Scene], bool]:
    """When a line matches."""
    return lambda scene: scene.job is not None and scene.job.said(pattern) is not None


def seconds(number: float) -> Callable[[Scene], bool]:
    """So many seconds after the start."""
    return lambda scene: scene.job is not None and time.time() - scene.job.began >= number


def exists(name: str) -> Callable[[Scene], bool]:
    """When a file matches below the run directory."""
    return lambda scene: any(scene.run.glob(name))


def measuring_memory(ready: Callable[[Scene], bool]) -> Callable[[Scene], bool]:
    """A moment until which the largest private memory of the command is noted."""

    def moment(scene: Scene) -> bool:
        assert scene.job is not None
        with suppress(OSError, ValueError):
            status = Path(f"/proc/{scene.job.process.pid}/status").read_text()
            scene.memory_kib = max(scene.memory_kib, int(status.partition("VmData:")[2].split()[0]))
        return ready(scene)

    return moment


def memory_limit(share: float) -> Callable[[Scene], list[str]]:
    """Words that limit a command to a share of the noted memory."""

    def words(scene: Scene) -> list[str]:
        scene.notes.append(f"{scene.memory_kib >> 10} MiB of private memory before the kill")
        return ["prlimit", f"--data={int(scene.memory_kib * 1024 * share)}"]

    return words


# Signals.


def send(signum: int, rank: int | None = None) -> Action:
    """A signal to the trainer of a rank, or to the command itself."""

    def act(scene: Scene) -> None:
        assert scene.job is not None
        scene.job.signal(signum, rank)

    return act


def send_twice(signum: int, pause: float) -> Action:
    """The same signal twice."""

    def act(scene: Scene) -> None:
        send(signum)(scene)
        time.sleep(pause)
        send(signum)(scene)

    return act


def stop_for(duration: float, rank: int | None = None) -> Action:
    """SIGSTOP, and SIGCONT after some seconds."""

    def act(scene: Scene) -> None:
        send(signal.SIGSTOP, rank)(scene)
        time.sleep(duration)
        send(signal.SIGCONT, rank)(scene)

    return act


# Files.


def newest(scene: Scene) -> Path:
    """The folder of the newest checkpoint."""
    return scene.run / "checkpoints" / str(max(committed(scene.run)))


def file_of(scene: Scene, kind: str) -> Path:
    """The file of a kind in the newest checkpoint, or a file of the run directory; NotRunError if there is none."""
    root = newest(scene) if kind in KINDS else scene.run
    found = sorted(root.glob(KINDS.get(kind, kind)), key=lambda path: path.stat().st_size)
    if not found:
        raise NotRunError(f"there is no file {KINDS.get(kind, kind)}")
    return found[-1]


def flip(kind: str, where: float = 0.5) -> Action:
    """One bit of one byte of a file; at the share `where` of its length."""

    def act(scene: Scene) -> None:
        path = file_of(scene, kind)
        data = bytearray(path.read_bytes())
        if not data:
            raise NotRunError(f"{path.name} is empty")
        at = min(int(len(data) * where), len(data) - 1)
        data[at] ^= 0x10
        path.write_bytes(data)
        scene.notes.append(f"byte {at} of {len(data)} of {path.relative_to(scene.run)}")

    return act


def flip_every(kind: str) -> Action:
    """One bit in each of all files of a kind."""

    def act(scene: Scene) -> None:
        for path in newest(scene).glob(KINDS[kind]):
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 0x10
            path.write_bytes(data)

    return act


def truncate(kind: str, share: float = 0.5) -> Action:
    """Keep the first part of a file."""

    def act(scene: Scene) -> None:
        path = file_of(scene, kind)
        size = path.stat().st_size
        os.truncate(path, int(size * share))
        scene.notes.append(f"{path.relative_to(scene.run)}: {int(size * share)} of {size} bytes")

    return act


def remove(kind: str) -> Action:
    """Remove a file, or a folder."""

    def act(scene: Scene) -> None:
        path = file_of(scene, kind)
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return act


def remove_in_checkpoint(name: str) -> Action:
    """Remove a file or folder of the newest checkpoint ('.' the whole)."""

    def act(scene: Scene) -> None:
        shutil.rmtree(newest(scene) / name)

    return act


def write(name: str, contents: bytes) -> Action:
    """Write a file below the run directory."""

    def act(scene: Scene) -> None:
        (scene.run / name).parent.mkdir(parents=True, exist_ok=True)
        (scene.run / name).write_bytes(contents)

    return act


def append(name: str, contents: bytes) -> Action:
    """Append to a file of the run directory."""

    def act(scene: Scene) -> None:
        with (scene.run / name).open("ab") as file:
            file.write(contents)

    return act


def drop_bad_rows(scene: Scene) -> None:
    """Remove the lines of metrics.jsonl that cannot be read, as the message says."""
    path = scene.run / "metrics.jsonl"
    good = []
    for line in path.read_bytes().splitlines():
        with suppress(ValueError):
            if "step" in json.loads(line):
                good.append(line)
    path.write_bytes(b"".join(line + b"\n" for line in good))


def stale_folders(scene: Scene) -> None:
    """A half-written and a half-removed checkpoint, as killed processes have left them."""
    folder = scene.run / "checkpoints"
    for name in ("12.tmp", "3.removed"):
        shutil.copytree(newest(scene), folder / name)
        shutil.rmtree(folder / name / "record")


def both(*actions: Action) -> Action:
    """Several actions, one after another."""

    def act(scene: Scene) -> None:
        for action in actions:
            action(scene)

    return act


# Disks.


def on_small_disk(size: str) -> Action:
    """The run directory is a file system of its own, in memory."""

    def act(scene: Scene) -> None:
        if os.geteuid():
            raise NotRunError("mounting needs root")
        scene.run.mkdir(parents=True, exist_ok=True)
        kept = list(scene.run.iterdir())
        aside = scene.run.with_suffix(".aside")
        if kept:
            scene.run.rename(aside)
            scene.run.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "faults", str(scene.run)], capture_output=True, text=True
        )
        if done.returncode:
            raise NotRunError(f"mount: {done.stderr.strip()}")
        scene.undo.append(lambda: unmount(scene.run))
        if kept:
            shutil.copytree(aside, scene.run, dirs_exist_ok=True)
            shutil.rmtree(aside)

    return act


def unmount(folder: Path) -> None:
    """Copy a mounted run directory to the disk below it and unmount."""
    aside = folder.with_suffix(".kept")
    shutil.copytree(folder, aside, dirs_exist_ok=True)
    subprocess.run(["umount", "-l", str(folder)], check=True)
    shutil.copytree(aside, folder, dirs_exist_ok=True)
    shutil.rmtree(aside)


def fill_disk(scene: Scene) -> None:
    """Another program takes all space that is left."""
    ballast = os.open(scene.run / "ballast", os.O_WRONLY | os.O_CREAT)
    for size in (1 << 20, 4096, 1):
        with suppress(OSError):
            while True:
                os.write(ballast, b"x" * size)
    os.close(ballast)


def free_disk(scene: Scene) -> None:
    """The user removes what filled the disk."""
    (scene.run / "ballast").unlink()


def make_read_only(scene: Scene) -> None:
    """The folder of checkpoints becomes a read-only mount."""
    if os.geteuid():
        raise NotRunError("mounting needs root")
    folder = str(scene.run / "checkpoints")
    scene.undo.append(lambda: make_writable(scene))
    for words in (["--bind", folder, folder], ["-o", "remount,bind,ro", folder]):
        done = subprocess.run(["mount", *words], capture_output=True, text=True)
        if done.returncode:
            raise NotRunError(f"mount: {done.stderr.strip()}")


def make_writable(scene: Scene) -> None:
    """Take the read-only mount away, if it is there."""
    subprocess.run(["umount", "-l", str(scene.run / "checkpoints")], capture_output=True)


# Other commands.


def beside(*words: str, times: int = 1, wait: bool = True, statuses: tuple[int, ...] = (0,)) -> Action:
    """Run a verb on the run directory beside the command; '{run}' is the directory, '{new}' a fresh folder."""

    def act(scene: Scene) -> None:
        for number in range(times):
            fill = {"run": str(scene.run), "new": f"{scene.run}.new{number}", "config": str(scene.bench.config)}
            command = [sys.executable, "-m", "jaxtrain", *(word.format(**fill) for word in words)]
            job = scene.bench.start(command)
            scene.others.append(job)
            if not wait:
                continue
            status = job.wait(90)
            last = (job.text.splitlines() or [""])[-1][:200]
            scene.notes.append(f"{words[0]}: status {status}, {last}")
            if status not in statuses:
                raise AssertionError(f"{words[0]} beside the run ended with {status}: {last}")

    return act


def wait_for(ready: Callable[[Scene], object], limit: float = 60) -> Action:
    """Wait inside an action."""

    def act(scene: Scene) -> None:
        if not wait_until(lambda: ready(scene), limit, scene.job):
            raise AssertionError("the moment never came")

    return act


def remove_run(scene: Scene) -> None:
    """Remove the run directory while it is in use."""
    shutil.rmtree(scene.run, ignore_errors=True)


def foreign_lease(scene: Scene) -> None:
    """The lease of a process on a host that is gone."""
    claim = {"token": "gone", "host": "node17", "user": "ada", "pid": 4242, "start": "1", "boot": "another",
        "namespace": "x", "since": time.time() - 1000, "beat": 3, "boottime": 5.0, "clock": "boottime"}  # fmt: skip
    (scene.run / "lease.json").write_text(json.dumps(claim).ljust(1024))


def keep_config(scene: Scene) -> None:
    """Remember config.yaml, as a user who has a copy."""
    scene.kept["config.yaml"] = (scene.run / "config.yaml").read_bytes()


def put_back(scene: Scene) -> None:
    """Write the remembered files again."""
    for name, contents in scene.kept.items():
        (scene.run / name).write_bytes(contents)


# The corpus and its cache.


def cache_of(scene: Scene) -> Path:
    """The run's own copy of the cache."""
    return Path(f"{scene.run}.cache")


def copy_cache(scene: Scene) -> None:
    """Give the run a cache of its own, which others do not use."""
    shutil.copytree(scene.bench.folder / "cache", cache_of(scene))


def remove_cache(scene: Scene) -> None:
    """Remove the run's own cache."""
    shutil.rmtree(cache_of(scene), ignore_errors=True)


def flip_cache(pattern: str) -> Action:
    """One bit of the largest file of the cache that matches."""

    def act(scene: Scene) -> None:
        path = _largest(cache_of(scene), pattern)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0x10
        path.write_bytes(data)
        scene.notes.append(f"byte {len(data) // 2} of {path.name}")

    return act


def cut_cache(pattern: str) -> Action:
    """Keep half of the largest file of the cache that matches."""

    def act(scene: Scene) -> None:
        path = _largest(cache_of(scene), pattern)
        os.truncate(path, path.stat().st_size // 2)
        scene.notes.append(path.name)

    return act


def _largest(folder: Path, pattern: str) -> Path:
    found = [path for path in folder.rglob(pattern) if path.is_file()]
    if not found:
        raise NotRunError(f"the cache has no file {pattern}")
    return max(found, key=lambda path: path.stat().st_size)


def hide_corpus(scene: Scene) -> None:
    """Rename the corpus away."""
    corpus = scene.bench.folder / "corpus"
    corpus.rename(corpus.with_name("corpus-away"))
    scene.undo.append(lambda: show_corpus(scene))


def change_corpus(scene: Scene) -> None:
    """Append a line to one file of the corpus, keeping a copy."""
    corpus = scene.bench.folder / "corpus"
    shutil.copytree(corpus, corpus.with_name("corpus-away"))
    with (corpus / "file3.py").open("a") as file:
        file.write("x = 1\n")
    scene.undo.append(lambda: show_corpus(scene))


def show_corpus(scene: Scene) -> None:
    """Put the corpus back."""
    corpus = scene.bench.folder / "corpus"
    if (away := corpus.with_name("corpus-away")).exists():
        shutil.rmtree(corpus, ignore_errors=True)
        away.rename(corpus)


def set_clock(ahead: int) -> Action:
    """Set the wall clock of the command so many seconds ahead."""

    def act(scene: Scene) -> None:
        with Path(f"{scene.run}.clock").open("r+b" if Path(f"{scene.run}.clock").exists() else "wb") as file:
            file.write(ahead.to_bytes(8, sys.byteorder, signed=True))

    return act
