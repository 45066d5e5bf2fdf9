"""kill -9 of processes, and at points of a save."""

from __future__ import annotations

import signal

from faults import actions as a
from faults.fault import Fault
from faults.table.status import KILLED, SLOW


def kills() -> list[Fault]:
    """kill -9 of everything that has a pid, at several moments."""
    moments = [
        ("while it starts", a.seconds(1.5)),
        ("after the evaluation before step 1", a.printed("held-out loss after step 0")),
        ("after step 1", a.step(1)),
        ("after step 5", a.step(5)),
        ("after step 8", a.step(8)),
        ("after step 11", a.step(11)),
    ]
    one = [
        Fault(
            f"kill -9 {name}", "SIGKILL to `train`", plant=SLOW, when=when, do=a.send(signal.SIGKILL), status=(KILLED,)
        )
        for name, when in moments
    ]
    one += [
        Fault(
            "kill -9 while it restores",
            "SIGKILL to `train` as it resumes",
            begin="interrupted",
            plant=SLOW,
            when=a.printed("^attention:"),
            do=a.send(signal.SIGKILL),
            status=(KILLED,),
        ),
        Fault(
            "kill -9 after the last checkpoint",
            "SIGKILL to `train` before the summary",
            plant=SLOW,
            when=a.saved(12),
            do=a.send(signal.SIGKILL),
            status=(KILLED, 0),
        ),
    ]
    two = [
        Fault(
            f"kill -9 of {who} after step {n}",
            f"SIGKILL to rank {rank} of `launch --processes 2`",
            processes=2,
            plant=SLOW,
            when=a.step(n),
            do=a.send(signal.SIGKILL, rank),
        )
        for rank, who in ((1, "a worker"), (0, "the coordinator"))
        for n in (2, 5, 10)
    ]
    two += [
        Fault(
            f"kill -9 of the supervisor after step {n}",
            "SIGKILL to `launch --processes 2` itself",
            processes=2,
            plant=SLOW,
            when=a.step(n),
            do=a.send(signal.SIGKILL),
            status=(KILLED,),
        )
        for n in (2, 7)
    ]
    return one + two


def saves() -> list[Fault]:
    """kill -9 before one of the file operations of a save."""
    faults = [
        Fault(
            f"kill -9 in a save, before operation {at}",
            f"SIGKILL before file operation {at} of the save of step 9",
            shim={"FAULT_PATH": "checkpoints/9", "FAULT_OP": "change", "FAULT_AT": str(at), "FAULT_WITH": "kill"},
            plant=SLOW,
            status=(KILLED,),
        )
        for at in (1, 2, 3, 5, 8, 12, 16, 20, 24, 28, 33, 38, 43, 48, 53, 58, 63, 68, 74, 80)
    ]
    renames = {
        "the commit": ("checkpoints/9$", "9.tmp to 9"),
        "a removal": ("checkpoints/3.removed$", "3 to 3.removed"),
    }
    faults += [
        Fault(
            f"kill -9 before the rename of {what}",
            f"SIGKILL before renaming {names}",
            shim={"FAULT_PATH": path, "FAULT_OP": "rename", "FAULT_AT": "1", "FAULT_WITH": "kill"},
            plant=SLOW,
            status=(KILLED,),
        )
        for what, (path, names) in renames.items()
    ]
    faults += [
        Fault(
            f"kill -9 in the removal of a checkpoint, before operation {at}",
            f"SIGKILL before removal {at} of the rotation of step 3",
            shim={
                "FAULT_PATH": "checkpoints/3.removed",
                "FAULT_OP": "unlink",
                "FAULT_AT": str(at),
                "FAULT_WITH": "kill",
            },
            plant=SLOW,
            status=(KILLED,),
        )
        for at in (1, 4, 9)
    ]
    faults += [
        Fault(
            f"kill -9 of {who} in a save",
            f"SIGKILL to rank {rank} of 2 before its file operation {at} of the save of step 6",
            processes=2,
            shim={
                "FAULT_PATH": "checkpoints/6", "FAULT_OP": "change", "FAULT_AT": str(at), "FAULT_WITH": "kill",
                "FAULT_RANK": str(rank),
            },
            plant=SLOW,
        )
        for who, rank, at in (("a worker", 1, 3), ("the coordinator", 0, 20))
    ]  # fmt: skip
    return faults
