"""The life of a job: generation after generation, until one succeeds or another one is useless."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

from jaxtrain.config import StoppedError
from jaxtrain.launch.generation import Outcome
from jaxtrain.launch.restarts import RestartPolicy

Recorder = Callable[..., None]
"""Called as record(kind, **values) with each event; must not raise."""


def supervise(
    run_generation: Callable[[int], Outcome],
    policy: RestartPolicy,
    wait: Callable[[float], bool],
    record: Recorder,
    first: int = 1,
) -> int:
    """Run generations until one ends with status 0, or `policy` says that another one is useless; the exit status.

    `wait(seconds)` sleeps and returns True early when the job is to stop. Why a generation ended is printed on stderr.
    """
    for number in itertools.count(first):
        record("generation", number=number)
        outcome = run_generation(number)
        if outcome.status == 0:
            return 0
        if outcome.signalled:
            if outcome.status != StoppedError.status:
                tell(outcome.message)
            return outcome.status
        tell(outcome.message)
        record("failure", **failure_values(outcome))
        decision = policy.after(outcome)
        if not decision.restart:
            if decision.why:
                tell(f"not started again: {decision.why}")
                record("gave_up", cause=decision.why)
            return outcome.status
        tell(f"starting again in {decision.wait:.0f} s ({decision.why})")
        record("restart", backoff_s=decision.wait)
        if wait(decision.wait):
            tell("stopped by a signal; the same command resumes from the newest checkpoint")
            return StoppedError.status
    raise AssertionError


def failure_values(outcome: Outcome) -> dict[str, Any]:
    """The values of the event "failure"."""
    return {
        "status": outcome.status, "cause": outcome.cause, "rank": outcome.rank, "host": outcome.host,
        "step": outcome.step, "phase": outcome.phase, "since_s": round(outcome.seconds, 3),
        "ago_s": round(outcome.ago, 3),
    }  # fmt: skip


def tell(text: str) -> None:
    """Print a message of the launcher on stderr."""
    print(f"jaxtrain: {text}", file=sys.stderr, flush=True)
