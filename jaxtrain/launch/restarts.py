"""Whether a job is started again after a failure, and when."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from jaxtrain.config import ConfigError, CorruptionError, DivergedError, StoppedError
from jaxtrain.launch.generation import WRONG_BITS, Outcome

RESTARTS = 10
LONGEST_WAIT_S = 60.0
GONE = -2
"""What stands for the newest checkpoint where the run directory itself is gone."""
IDENTICAL = 3
"""The same failure this often without progress ends the job."""

FINAL = {
    ConfigError.status: "the same command would be refused again",
    DivergedError.status: "the run diverged, and the same command would diverge again",
    StoppedError.status: "the run was asked to stop; the same command resumes it",
    130: "the run was interrupted",
}
"""Exit statuses after which a restart is useless."""


@dataclass(frozen=True)
class Decision:
    """Start again after `wait` seconds, or not and why."""

    restart: bool
    wait: float
    why: str


class RestartPolicy:
    """Decides after each failure. Progress is a newer checkpoint than ever before, or a larger step.

    `budget` restarts may follow each other without progress (0: none at all); `newest_checkpoint` returns a step, -1
    without one, GONE without a run directory.
    """

    def __init__(self, budget: int = RESTARTS, newest_checkpoint: Callable[[], int] = lambda: -1) -> None:
        self._budget, self._newest_checkpoint = budget, newest_checkpoint
        self._best = (newest_checkpoint(), -1)
        self._in_a_row: list[tuple[int, str]] = []
        self._corrupt: Counter[str] = Counter()

    def after(self, outcome: Outcome) -> Decision:
        """What follows a generation that ended by a failure."""
        if outcome.status in FINAL or outcome.final or outcome.signalled or self._budget == 0:
            return Decision(False, 0.0, outcome.final or FINAL.get(outcome.status, ""))
        if outcome.status == CorruptionError.status:
            self._corrupt[outcome.cause] += 1
            if outcome.cause.startswith(WRONG_BITS) and self._corrupt[outcome.cause] > 1:
                return Decision(False, 0.0, f"{outcome.cause} for the second time: replace it")
        checkpoint, top = self._newest_checkpoint(), outcome.top_step
        if checkpoint == GONE and max(top, self._best[1]) > 0:
            return Decision(
                False, 0.0, "the run directory is gone: another start would train from the first step again"
            )
        if checkpoint > self._best[0] or top > self._best[1]:
            self._in_a_row = []
        self._best = (max(checkpoint, self._best[0]), max(top, self._best[1]))
        self._in_a_row.append((outcome.status, _without_numbers(outcome.signature)))
        if self._in_a_row.count(self._in_a_row[-1]) >= IDENTICAL:
            return Decision(False, 0.0, f"the same failure {IDENTICAL} times without progress: {outcome.cause}")
        if len(self._in_a_row) > self._budget:
            return Decision(False, 0.0, f"{self._budget} restarts without progress (--restarts {self._budget})")
        wait = min(2.0 ** (len(self._in_a_row) - 1), LONGEST_WAIT_S)
        return Decision(True, wait, f"{len(self._in_a_row)} of {self._budget} restarts without progress")


def _without_numbers(text: str) -> str:
    """A line of output without what differs each time: pids, ports, addresses, times."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", text)
