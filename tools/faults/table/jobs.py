"""Jobs of several processes: disagreement, versions, clocks, other numbers of processes."""

from __future__ import annotations

import signal

from faults import actions as a
from faults.checks import no_failures
from faults.fault import Fault
from faults.table.status import KILLED, REFUSED, SLOW, WATCHED

HOUR = 3600


def disagreements() -> list[Fault]:
    """Processes that were started with different settings or packages."""
    by_setting = {
        "learning rate": ("--optimizer.learning_rate=0.02", "optimizer.learning_rate"),
        "seed": ("--train.seed=7", "train.seed"),
        "number of steps": ("--train.steps=20", "train.steps"),
        "precision": ("--precision.compute=bfloat16", "precision.compute"),
        "corpus": ("--data.sources=[{text: {folder}/corpus, max_documents: 30}]", "data.sources"),
        "directory": ("--run={run}-other", "run directory"),
    }
    faults = [
        Fault(
            f"process 1 has another {name}", f"`train --process-id 1 ... {argument}`", by_hand=((), (argument,)),
            processes=2, status=(REFUSED,), says=said,
        )
        for name, (argument, said) in by_setting.items()
    ]  # fmt: skip
    return [
        *faults,
        Fault(
            "process 1 has another version of a package", "optax 0.0.1 before PYTHONPATH of process 1",
            by_hand=((), ()), processes=2, paths=("{folder}/versions",), status=(REFUSED,), says="optax",
        ),
        Fault(
            "another version of a package at resume", "optax 0.0.1 before PYTHONPATH", begin="interrupted",
            paths=("{folder}/versions",),
        ),
    ]  # fmt: skip


def clocks() -> list[Fault]:
    """The wall clock jumps (below the C library) while a run trains."""
    clock = {"FAULT_CLOCK": "{run}.clock"}
    faults = [
        Fault(
            f"the clock jumps by {hours:+} h", "after step 4 of `train`", plant=SLOW, shim=clock,
            before=a.set_clock(0), when=a.step(4), do=a.set_clock(hours * HOUR),
        )
        for hours in (1, -1)
    ]  # fmt: skip
    faults += [
        Fault(
            f"the clock jumps by {hours:+} h under launch", "after step 4 of 2 processes", plant=SLOW, shim=clock,
            processes=2, overrides=WATCHED, before=a.set_clock(0), when=a.step(4), do=a.set_clock(hours * HOUR),
            check=no_failures,
        )
        for hours in (24, -24)
    ]  # fmt: skip
    return [
        *faults,
        Fault(
            "kill -9, and the clock is a day behind at the restart", "SIGKILL; resumed with an earlier clock",
            begin="interrupted", shim=clock, before=a.set_clock(-24 * HOUR),
        ),
    ]  # fmt: skip


def meshes() -> list[Fault]:
    """A killed job is resumed by another number of processes."""
    return [
        Fault(
            f"{before} processes killed, {after} resume", "SIGKILL to all, then the same directory", processes=before,
            rerun_processes=after, plant=SLOW, when=a.step(5), do=a.send(signal.SIGKILL), status=(KILLED,),
            tolerance=1e-5,
        )
        for before, after in ((2, 1), (1, 2), (2, 4))
    ]  # fmt: skip
