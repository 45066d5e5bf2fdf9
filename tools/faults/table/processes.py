"""Processes that are stopped, asked to end, fail or hang."""

from __future__ import annotations

import signal

from faults import actions as a
from faults.checks import lost_nothing, no_failures
from faults.fault import Fault
from faults.table.status import FAILED, SLOW, STOPPED, WATCHED


def stops() -> list[Fault]:
    """SIGSTOP."""
    return [
        Fault(
            "SIGSTOP of a worker",
            "SIGSTOP to rank 1 of `launch --processes 2`",
            processes=2,
            plant=SLOW,
            overrides=WATCHED,
            when=a.step(5),
            do=a.send(signal.SIGSTOP, 1),
        ),
        Fault(
            "SIGSTOP of the coordinator",
            "SIGSTOP to rank 0 of `launch --processes 2`",
            processes=2,
            plant=SLOW,
            overrides=WATCHED,
            when=a.step(5),
            do=a.send(signal.SIGSTOP, 0),
        ),
        Fault(
            "SIGSTOP of the supervisor for 6 s",
            "SIGSTOP, then SIGCONT to `launch` itself",
            processes=2,
            plant=SLOW,
            overrides=WATCHED,
            when=a.step(5),
            do=a.stop_for(6),
            check=no_failures,
        ),
        Fault(
            "SIGSTOP of train for 3 s", "SIGSTOP, then SIGCONT to `train`", plant=SLOW, when=a.step(5), do=a.stop_for(3)
        ),
        Fault(
            "SIGSTOP of a single supervised process",
            "SIGSTOP to the process of `launch --processes 1`",
            supervise=True,
            plant=SLOW,
            overrides=WATCHED,
            when=a.step(5),
            do=a.send(signal.SIGSTOP, 0),
        ),
    ]


def signals() -> list[Fault]:
    """Signals that ask a run to end."""
    names = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "SIGINT", signal.SIGUSR1: "SIGUSR1"}
    faults = [
        Fault(
            f"{name} to train",
            f"{name} after step 5",
            plant=SLOW,
            when=a.step(5),
            do=a.send(signum),
            status=(STOPPED,),
            check=lost_nothing,
        )
        for signum, name in names.items()
    ]
    faults += [
        Fault(
            f"{name} to launch",
            f"{name} to the supervisor of 2 processes after step 5",
            processes=2,
            plant=SLOW,
            when=a.step(5),
            do=a.send(signum),
            status=(STOPPED,),
            check=lost_nothing,
        )
        for signum, name in names.items()
    ]
    return [
        *faults,
        Fault(
            "SIGTERM before the first step",
            "SIGTERM at the evaluation before step 1",
            plant=SLOW,
            when=a.printed("^attention:"),
            do=a.send(signal.SIGTERM),
            status=(STOPPED, 143),
        ),
        Fault(
            "SIGTERM twice",
            "SIGTERM after step 5, again after 0.05 s",
            plant={"pause": 0.5},
            when=a.step(5),
            do=a.send_twice(signal.SIGTERM, 0.05),
            status=(STOPPED, 143, 130),
        ),
        Fault(
            "SIGTERM to one of two trainers",
            "SIGTERM to rank 1 only, as a preempted node has it",
            processes=2,
            plant=SLOW,
            when=a.step(5),
            do=a.send(signal.SIGTERM, 1),
            status=(0, STOPPED),
        ),
        Fault(
            "SIGHUP to train",
            "the terminal is closed",
            plant=SLOW,
            when=a.step(5),
            do=a.send(signal.SIGHUP),
            status=(129, STOPPED),
        ),
    ]


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
        Fault(
            "the same exception at every start",
            "rank 1 raises at step 2 of each generation",
            processes=2,
            plant={"what": "raise", "step": 2, "rank": 1, "always": True},
            status=(FAILED,),
            rerun=False,
            equal=False,
            says="three|3 (times|identical|failures)|gave up|giving up",
        ),
    ]


def hangs() -> list[Fault]:
    """Ranks that stand still."""

    def planted(name: str, what: str, rank: int, processes: int = 2) -> Fault:
        plant = {**SLOW, "what": what, "step": 6, "rank": rank}
        return Fault(
            name,
            f"planted in rank {rank} at step 6",
            processes=processes,
            supervise=True,
            plant=plant,
            overrides=WATCHED,
        )

    return [
        planted("hang in a worker", "hang", 1),
        planted("hang in the coordinator", "hang", 0),
        planted("hang in the loader of a worker", "loader", 1),
        planted("hang in the loader of the coordinator", "loader", 0),
        planted("hang in native code that holds the GIL", "native", 1),
        planted("hang in a single process", "hang", 0, 1),
        planted("hang in native code of a single process", "native", 0, 1),
        planted("a rank stops itself", "stop", 1),
        Fault(
            "a straggler",
            "rank 1 sleeps 0.5 s in every step",
            processes=2,
            overrides=WATCHED,
            plant={"what": "straggle", "seconds": 0.5, "rank": 1},
            check=no_failures,
        ),
    ]
