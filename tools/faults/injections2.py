"""The faults of processes, signals, disks, numbers, and of what lies around a run, by group."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from faults import actions as a
from faults.fault import Fault, Scene
from faults.injections import KILLED, SLOW

STOPPED, FAILED, DIVERGED, STORAGE, REFUSED = 75, 13, 3, 74, 2
WATCHED = ("watchdog.floors={step: 3, input: 3, checkpoint: 8, barrier: 8, evaluation: 8}",)
"""Seconds after which a rank of the tiny model is stuck."""


def stops() -> list[Fault]:
    """SIGSTOP."""
    return [
        Fault("SIGSTOP of a worker", "SIGSTOP to rank 1 of `launch --processes 2`", processes=2, plant=SLOW,
            overrides=WATCHED, when=a.step(5), do=a.send(signal.SIGSTOP, 1)),
        Fault("SIGSTOP of the coordinator", "SIGSTOP to rank 0 of `launch --processes 2`", processes=2, plant=SLOW,
            overrides=WATCHED, when=a.step(5), do=a.send(signal.SIGSTOP, 0)),
        Fault("SIGSTOP of the supervisor for 6 s", "SIGSTOP, then SIGCONT to `launch` itself", processes=2, plant=SLOW,
            overrides=WATCHED, when=a.step(5), do=a.stop_for(6), check=no_failures),
        Fault("SIGSTOP of train for 3 s", "SIGSTOP, then SIGCONT to `train`", plant=SLOW, when=a.step(5), do=a.stop_for(3)),
        Fault("SIGSTOP of a single supervised process", "SIGSTOP to the process of `launch --processes 1`", supervise=True,
            plant=SLOW, overrides=WATCHED, when=a.step(5), do=a.send(signal.SIGSTOP, 0)),
    ]  # fmt: skip


def signals() -> list[Fault]:
    """Signals that ask a run to end."""
    names = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "SIGINT", signal.SIGUSR1: "SIGUSR1"}
    faults = [
        Fault(f"{name} to train", f"{name} after step 5", plant=SLOW, when=a.step(5), do=a.send(signum), status=(STOPPED,),
            check=lost_nothing)
        for signum, name in names.items()
    ]  # fmt: skip
    faults += [
        Fault(f"{name} to launch", f"{name} to the supervisor of 2 processes after step 5", processes=2, plant=SLOW,
            when=a.step(5), do=a.send(signum), status=(STOPPED,), check=lost_nothing)
        for signum, name in names.items()
    ]  # fmt: skip
    return [
        *faults,
        Fault("SIGTERM before the first step", "SIGTERM at the evaluation before step 1", plant=SLOW,
            when=a.printed("^attention:"), do=a.send(signal.SIGTERM), status=(STOPPED, 143)),
        Fault("SIGTERM twice", "SIGTERM after step 5, again after 0.05 s", plant={"pause": 0.5}, when=a.step(5),
            do=a.send_twice(signal.SIGTERM, 0.05), status=(STOPPED, 143, 130)),
        Fault("SIGTERM to one of two trainers", "SIGTERM to rank 1 only, as a preempted node has it", processes=2,
            plant=SLOW, when=a.step(5), do=a.send(signal.SIGTERM, 1), status=(0, STOPPED)),
        Fault("SIGHUP to train", "the terminal is closed", plant=SLOW, when=a.step(5), do=a.send(signal.SIGHUP),
            status=(129, STOPPED)),
    ]  # fmt: skip


def failures() -> list[Fault]:
    """Exceptions, crashes and ends of one process."""

    def planted(name: str, what: str, rank: int | None, processes: int = 2, **more: object) -> Fault:
        plant = {**SLOW, "what": what, "step": 6, **({} if rank is None else {"rank": rank})}
        return Fault(name, f"planted in rank {rank or 0} at step 6", processes=processes, plant=plant, **more)  # type: ignore[arg-type]

    return [
        planted("exception in a worker", "raise", 1),
        planted("exception in the coordinator", "raise", 0),
        planted("exception in a single process", "raise", None, 1, status=(1, FAILED)),
        planted("exception in the loader's thread", "loader-raise", 1),
        planted("a worker ends with status 0", "vanish", 1),
        planted("segmentation fault in a worker", "crash", 1),
        planted("segmentation fault in the coordinator", "crash", 0),
        planted("out of memory in a worker", "memory", 1, prefix=("prlimit", "--as=8000000000"), limit=180.0),
        Fault("the same exception at every start", "rank 1 raises at step 2 of each generation", processes=2,
            plant={"what": "raise", "step": 2, "rank": 1, "always": True}, status=(FAILED,), rerun=False, equal=False,
            says="three|3 (times|identical|failures)|gave up|giving up"),
    ]  # fmt: skip


def hangs() -> list[Fault]:
    """Ranks that stand still."""

    def planted(name: str, what: str, rank: int, processes: int = 2) -> Fault:
        plant = {**SLOW, "what": what, "step": 6, "rank": rank}
        return Fault(name, f"planted in rank {rank} at step 6", processes=processes, supervise=True, plant=plant,
            overrides=WATCHED)  # fmt: skip

    return [
        planted("hang in a worker", "hang", 1),
        planted("hang in the coordinator", "hang", 0),
        planted("hang in the loader of a worker", "loader", 1),
        planted("hang in the loader of the coordinator", "loader", 0),
        planted("hang in native code that holds the GIL", "native", 1),
        planted("hang in a single process", "hang", 0, 1),
        planted("hang in native code of a single process", "native", 0, 1),
        planted("a rank stops itself", "stop", 1),
        Fault("a straggler", "rank 1 sleeps 0.5 s in every step", processes=2, overrides=WATCHED,
            plant={"what": "straggle", "seconds": 0.5, "rank": 1}, check=no_failures),
    ]  # fmt: skip


def disks() -> list[Fault]:
    """Storage that fails, really or below the C library."""

    def below(name: str, how: str, status: tuple[int, ...], **shim: str) -> Fault:
        return Fault(name, how, plant=SLOW, shim={"FAULT_PATH": "checkpoints", **shim}, status=status)

    def reading(name: str, how: str, status: tuple[int, ...], **shim: str) -> Fault:
        shim = {"FAULT_PATH": "checkpoints/9", "FAULT_OP": "read", **shim}
        return Fault(name, how, begin="interrupted", shim=shim, status=status, check=none_condemned)

    many = {"FAULT_TIMES": "100000"}
    return [
        Fault("disk full", "another program fills the file system after step 4", plant=SLOW, before=a.on_small_disk("24m"),
            when=a.step(4), do=a.fill_disk, after=a.free_disk, status=(STORAGE,)),
        Fault("disk full under launch", "the same with 2 processes", processes=2, plant=SLOW,
            before=a.on_small_disk("24m"), when=a.step(4), do=a.fill_disk, after=a.free_disk, status=(STORAGE,), limit=240),
        Fault("file system becomes read-only", "remounted read-only after step 4", plant=SLOW,
            before=a.on_small_disk("24m"), when=a.step(4), do=a.remount("ro"), after=a.remount("rw"), status=(STORAGE,)),
        Fault("no space from the first write of a save", "ENOSPC", plant=SLOW, status=(STORAGE,),
            shim={"FAULT_PATH": "checkpoints/6", "FAULT_OP": "write", "FAULT_AT": "1", "FAULT_WITH": "28", **many}),
        below("no space in the middle of a save", "ENOSPC from write 20 on", (STORAGE,), FAULT_OP="write", FAULT_AT="20",
            FAULT_WITH="28", **many),
        below("quota exceeded", "EDQUOT at every new file from the 30th on", (STORAGE,), FAULT_OP="create", FAULT_AT="30",
            FAULT_WITH="122", **many),
        below("input/output error in a save", "EIO from write 20 on", (STORAGE,), FAULT_OP="write", FAULT_AT="20",
            FAULT_WITH="5", **many),
        below("permission lost", "EACCES at every rename from the 3rd on", (STORAGE,), FAULT_OP="rename", FAULT_AT="3",
            FAULT_WITH="13", **many),
        reading("one read error at restore", "EIO at read 5 of the newest checkpoint", (0,), FAULT_AT="5", FAULT_WITH="5"),
        reading("one stale file handle at restore", "ESTALE at read 9", (0,), FAULT_AT="9", FAULT_WITH="116"),
        reading("the newest checkpoint cannot be read", "EIO at every read of step 9", (STORAGE, 0), FAULT_AT="1",
            FAULT_WITH="5", **many),
        Fault("the run directory is removed", "rm -rf of the run after step 4", plant=SLOW, when=a.step(4),
            do=a.remove_run, status=(STORAGE, 1), older=True),
    ]  # fmt: skip


def numbers() -> list[Fault]:
    """Losses and states that are not finite, spikes, flipped bits."""
    return [
        Fault("NaN in some batches", "a registered loss is NaN on some batches; SIGKILL after step 8", plant=SLOW,
            config={"train": {"loss": "nan_in_some_batches"}}, when=a.step(8), do=a.send(signal.SIGKILL), status=(KILLED,)),
        Fault("NaN in every batch", "a registered loss is always NaN", equal=False, rerun=False, status=(DIVERGED,),
            config={"train": {"loss": "nan_in_every_batch"}, "precision": {"max_skipped": 3}}, check=nothing_published),
        Fault("learning rate that overflows", "optimizer.learning_rate 1e38", equal=False, rerun=False, status=(DIVERGED,),
            config={"optimizer": {"learning_rate": 1e38, "warmup": 0}, "precision": {"max_skipped": 3}},
            check=nothing_published),
        Fault("infinite learning rate", "optimizer.learning_rate inf", equal=False, rerun=False, status=(REFUSED,),
            overrides=("optimizer.learning_rate=inf",), says="optimizer.learning_rate"),
        Fault("float16 with a scale that is too high", "precision.scale_init 1e30, max_skipped 5", equal=False, rerun=False,
            status=(DIVERGED, REFUSED), says="precision.scale_init",
            config={"precision": {"compute": "float16", "scale_init": 1e30, "scale_max": 1e31, "max_skipped": 5}}),
    ]  # fmt: skip


def companions() -> list[Fault]:
    """Other commands on the same directory."""
    slow = {"pause": 0.7}
    often = ("checkpoint.every=1",)

    def reader(*words: str) -> Fault:
        return Fault(f"{words[0]} beside a run that saves at every step", "during the saves", plant=slow, overrides=often,
            when=a.step(2), do=a.beside(*words))  # fmt: skip

    return [
        Fault("two runs on one directory", "a second `train` after step 3", plant=slow, when=a.step(3),
            do=a.beside("train", "{config}", "--run", "{run}", statuses=(REFUSED,))),
        Fault("two supervisors on one directory", "a second `launch` after step 3", plant={"pause": 2.0}, processes=2,
            when=a.step(3), limit=240,
            do=a.beside("launch", "{config}", "--run", "{run}", "--processes", "2", "--devices-per-process", "1",
                statuses=(REFUSED,))),
        Fault("a lease of a dead process of another host", "lease.json of a host that gives no heartbeat",
            begin="interrupted", before=foreign_lease, says="taken over"),
        Fault("an unreadable lease", "lease.json holds zeros", begin="interrupted",
            before=a.write("lease.json", b"\0" * 100), limit=180),
        reader("eval", "{run}"),
        reader("generate", "{run}", "--prompt", "def", "--tokens", "4"),
        reader("export-hf", "{run}", "{new}"),
        reader("inspect", "{run}"),
    ]  # fmt: skip


def files() -> list[Fault]:
    """Files of a run directory that are not what was written."""

    def broken(name: str, how: str, before: object, **more: object) -> Fault:
        return Fault(name, how, begin="interrupted", before=before, **more)  # type: ignore[arg-type]

    after_restore = {"after": lambda scene: (scene.run / "config.yaml").write_bytes(CONFIG_KEPT[scene.run])}
    return [
        broken("metrics.jsonl with a torn line", "the last line is cut", a.append("metrics.jsonl", b'{"step": 11, "lo')),
        broken("metrics.jsonl with zeros at its end", "as after a power failure", a.append("metrics.jsonl", b"\0" * 300)),
        broken("metrics.jsonl with a flipped bit", "one bit in the middle", a.flip("metrics.jsonl"), equal=False),
        broken("metrics.jsonl is missing", "removed", a.remove("metrics.jsonl"), equal=False),
        broken("config.yaml is truncated", "half of it", a.both(keep_config, a.truncate("config.yaml")), status=(0, REFUSED),
            **after_restore),
        broken("config.yaml is empty", "0 bytes", a.both(keep_config, a.truncate("config.yaml", 0)), status=(0, REFUSED),
            **after_restore),
        broken("config.yaml is missing", "removed", a.both(keep_config, a.remove("config.yaml")), status=(0, REFUSED),
            **after_restore),
        broken("environment.json and sharding.json are garbage", "both overwritten",
            a.both(a.write("environment.json", b"{"), a.write("sharding.json", b"\xff\xfe"))),
        broken("summary.json is truncated", "half an object beside an unfinished run", a.write("summary.json", b'{"loss'))
        ,
        broken("events.jsonl with a torn line", "the last line is cut", a.append("events.jsonl", b'{"time": 17, "ki')),
        broken("events.jsonl is garbage", "binary", a.write("events.jsonl", b"\xff\x00{}\n[1]\nnull\n")),
        broken("a folder in place of metrics.jsonl", "mkdir", a.both(a.remove("metrics.jsonl"),
            lambda scene: (scene.run / "metrics.jsonl").mkdir()), equal=False, status=(STORAGE, REFUSED), rerun=False),
    ]  # fmt: skip


CONFIG_KEPT: dict[Path, bytes] = {}


def keep_config(scene: Scene) -> None:
    """Remember config.yaml, as a user has a copy."""
    CONFIG_KEPT[scene.run] = (scene.run / "config.yaml").read_bytes()


def foreign_lease(scene: Scene) -> None:
    """The lease of a process on a host that is gone."""
    import time

    claim = {"token": "gone", "host": "node17", "user": "ada", "pid": 4242, "start": "1", "boot": "another", "namespace": "x",
        "since": time.time() - 1000, "beat": 3, "boottime": 5.0, "clock": "boottime"}  # fmt: skip
    (scene.run / "lease.json").write_text(json.dumps(claim).ljust(1024))


def no_failures(scene: Scene) -> str | None:
    """The supervisor must not have restarted anything."""
    path = scene.run / "events.jsonl"
    kinds = [json.loads(line).get("kind") for line in path.read_text().splitlines()] if path.exists() else []
    return "the supervisor recorded a failure" if "failure" in kinds else None


def lost_nothing(scene: Scene) -> str | None:
    """After a signal the run resumes where it stopped."""
    assert scene.job is not None
    return None if "resumed at step" in scene.job.text else "nothing was saved at the signal"


def none_condemned(scene: Scene) -> str | None:
    """A read error is no damage: no checkpoint is renamed."""
    renamed = [path.name for path in (scene.run / "checkpoints").iterdir() if "damaged" in path.name]
    return f"renamed as damaged after read errors: {', '.join(renamed)}" if renamed else None


def nothing_published(scene: Scene) -> str | None:
    """A diverged run has no summary of success, and export refuses it."""
    try:
        a.beside("export-hf", "{run}", "{new}", statuses=(1, 2, 3))(scene)
    except AssertionError as error:
        return str(error)
    return None


GROUPS = {
    "SIGSTOP": stops, "signals": signals, "failures of a process": failures, "hangs": hangs, "storage": disks,
    "numbers": numbers, "other commands on the directory": companions, "files of the run": files,
}  # fmt: skip
