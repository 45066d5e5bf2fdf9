"""Storage that fails."""

from __future__ import annotations

import signal

from faults import actions as a
from faults.checks import none_condemned
from faults.fault import Fault
from faults.table.status import FAILED, KILLED, SLOW, STORAGE, STUCK


def memory() -> list[Fault]:
    """Little memory."""
    larger = {"model": {"d_model": 256, "d_ff": 1024, "n_layers": 4, "n_heads": 4}}
    return [
        Fault(
            "memory limit on resume", "prlimit --data at 1.1 times what the killed run held",
            config=larger,
            plant=SLOW, when=a.measuring_memory(a.step(8)), do=a.send(signal.SIGKILL), status=(KILLED,),
            rerun_prefix=a.memory_limit(1.1),
        ),
        Fault(
            "too little memory to start",
            "prlimit --data=400000000 of a job, where JAX hangs; then without",
            supervise=True,
            plant=SLOW,
            overrides=("watchdog.floors={start: 60, data: 60, restore: 20, compile: 40, step: 10}",),
            begin="interrupted",
            prefix=("prlimit", "--data=400000000"),
            status=(1, FAILED, STUCK, 134, KILLED, 139),
            limit=300.0,
        ),
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
        Fault(
            "disk full",
            "another program fills the file system after step 4",
            plant=SLOW,
            before=a.on_small_disk("24m"),
            when=a.step(4),
            do=a.fill_disk,
            after=a.free_disk,
            status=(STORAGE,),
        ),
        Fault(
            "disk full under launch",
            "the same with 2 processes",
            processes=2,
            plant=SLOW,
            before=a.on_small_disk("24m"),
            when=a.step(4),
            do=a.fill_disk,
            after=a.free_disk,
            status=(STORAGE,),
            limit=240,
        ),
        Fault(
            "the checkpoints become read-only",
            "a read-only mount over the folder of checkpoints after step 4",
            plant=SLOW,
            when=a.step(4),
            do=a.make_read_only,
            after=a.make_writable,
            status=(STORAGE,),
        ),
        Fault(
            "no space from the first write of a save",
            "ENOSPC",
            plant=SLOW,
            status=(STORAGE,),
            shim={"FAULT_PATH": "checkpoints/6", "FAULT_OP": "write", "FAULT_AT": "1", "FAULT_WITH": "28", **many},
        ),
        below(
            "no space in the middle of a save",
            "ENOSPC from write 6 on",
            (STORAGE,),
            FAULT_OP="write",
            FAULT_AT="6",
            FAULT_WITH="28",
            **many,
        ),
        below(
            "quota exceeded",
            "EDQUOT at every new file from the 12th on",
            (STORAGE,),
            FAULT_OP="create",
            FAULT_AT="12",
            FAULT_WITH="122",
            **many,
        ),
        below(
            "input/output error in a save",
            "EIO from write 6 on",
            (STORAGE,),
            FAULT_OP="write",
            FAULT_AT="6",
            FAULT_WITH="5",
            **many,
        ),
        below(
            "permission lost",
            "EACCES at every rename",
            (STORAGE,),
            FAULT_OP="rename",
            FAULT_AT="1",
            FAULT_WITH="13",
            **many,
        ),
        reading(
            "one read error at restore", "EIO at read 5 of the newest checkpoint", (0,), FAULT_AT="5", FAULT_WITH="5"
        ),
        reading("one stale file handle at restore", "ESTALE at read 9", (0,), FAULT_AT="9", FAULT_WITH="116"),
        reading(
            "the newest checkpoint cannot be read",
            "EIO at every read of step 9",
            (STORAGE, 0),
            FAULT_AT="1",
            FAULT_WITH="5",
            **many,
        ),
        Fault(
            "the run directory is removed",
            "rm -rf of the run after step 4",
            plant=SLOW,
            when=a.step(4),
            do=a.remove_run,
            after=a.remove_run,
            status=(STORAGE, 1),
            older=True,
        ),
    ]
