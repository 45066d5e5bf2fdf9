"""Which rank is stuck, and which one the others wait for: functions of the statuses that ranks reported."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxtrain.launch.heartbeat import PHASES, Status

FACTOR = 2.0
"""A rank is stuck after this multiple of its own longest recent time in a phase, if the floor has passed too."""
SAMPLES = 5
"""Own times in a phase from which on they count; before, the phase's first limit holds."""

HELD_S = 60.0
"""Seconds after which a rank that a signal holds is stuck in any phase: it does not come back by itself."""

FIRST_S = {
    "start": 600.0, "join": 400.0, "data": 7200.0, "restore": 3600.0, "compile": 3600.0, "input": 600.0, "step": 900.0,
    "evaluation": 1800.0, "checkpoint": 1800.0, "barrier": 22200.0, "end": 1800.0,
}  # fmt: skip
"""Seconds that a rank may be in a phase before it has SAMPLES own times of it.

Whoever waits at a barrier is not at fault: barriers have limits of their own, and the one for corpora has 6 hours.
"""
FLOOR_S = {**FIRST_S, "input": 60.0, "step": 60.0, "evaluation": 300.0, "checkpoint": 600.0}
"""Seconds that a rank may always be in a phase."""


@dataclass(frozen=True)
class Limits:
    """When a rank is stuck; `floors` replaces both tables for the phases that it names, in seconds."""

    factor: float | None = FACTOR
    """None: no rank is ever stuck."""
    floors: Mapping[Any, float] = field(default_factory=dict)

    def seconds(self, status: Status) -> float:
        """Seconds that a rank may be in its present phase."""
        if self.factor is None:
            return float("inf")
        phase, own = status.phase, status.durations.get(status.phase, ())
        if len(own) < SAMPLES:
            return self.floors.get(phase, FIRST_S[phase])
        return max(self.floors.get(phase, FLOOR_S[phase]), self.factor * max(own))


@dataclass(frozen=True)
class RankStatus:
    """Where a rank is, as supervisors tell each other: `seconds` in its phase, `limit` of them before it is stuck."""

    rank: int
    host: str
    phase: str
    step: int | None
    seconds: float
    limit: float
    held: float | None = None
    """Seconds for which a signal (SIGSTOP) has held it, None where none does."""

    def describe(self) -> str:
        """'rank 3 (node1) is in input of step 12 since 40 s'."""
        held = "" if self.held is None else ", held by a signal (SIGSTOP)"
        return f"rank {self.rank} ({self.host}) is in {self.where()} since {self.seconds:.0f} s{held}"

    def where(self) -> str:
        """'input of step 12', 'step 12', 'restore'."""
        if self.step is None:
            return self.phase
        return f"step {self.step}" if self.phase == "step" else f"{self.phase} of step {self.step}"


def find_culprits(statuses: Sequence[RankStatus]) -> list[RankStatus]:
    """The ranks that the others wait for: held by a signal, else behind the others by step and phase.

    All are returned where none is behind.
    """
    held = [status for status in statuses if status.held is not None]
    if held:
        return held
    first = min(map(_position, statuses))
    return [status for status in statuses if _position(status) == first]


def is_stuck(statuses: Sequence[RankStatus]) -> bool:
    """Whether a rank that the others wait for is over its limit, or a signal has held it for HELD_S seconds.

    The limits of the others do not count: collectives and barriers make them wait for one that may still compile,
    restore or save within its own limit.
    """
    return any(status.seconds > status.limit or (status.held or 0.0) > HELD_S for status in find_culprits(statuses))


def explain_stuck(statuses: Sequence[RankStatus]) -> str:
    """One sentence: who is stuck where since when, and where the others are."""
    culprits = find_culprits(statuses)
    others = [status for status in statuses if status not in culprits]
    shown = "; ".join(status.describe() for status in culprits[:8])
    more = f" and {len(culprits) - 8} more" if len(culprits) > 8 else ""
    if len(culprits) == len(statuses) > 1:
        return f"all ranks are stuck, none is behind the others: {shown}{more}"
    places = ", ".join(dict.fromkeys(status.where() for status in sorted(others, key=_position)))
    limit = f" (limit {culprits[0].limit:.0f} s)" if culprits[0].seconds >= culprits[0].limit else ""
    return f"{shown}{more}{limit}" + (f"; the others wait in {places}" if others else "")


def find_stragglers(own_s: Mapping[int, float], step_s: float) -> dict[int, float]:
    """Ranks whose own time in each step is persistently above the others': rank -> seconds that it costs each step.

    `own_s` is what each rank spends before the collectives (waiting for input), `step_s` a whole step: collectives
    make the steps of all ranks equally long, whoever is slow. A straggler takes twice the median of the ranks and
    costs a tenth of a step.
    """
    if len(own_s) < 2:
        return {}
    middle = statistics.median_low(own_s.values())
    return {
        rank: seconds - middle
        for rank, seconds in own_s.items()
        if seconds > 2 * middle and seconds - middle > 0.1 * step_s
    }


def typical_seconds(status: Status, phase: str) -> float | None:
    """Median of a rank's own times in a phase, None before there are 16."""
    own = status.durations.get(phase, ())
    return statistics.median(own) if len(own) >= 16 else None


def _position(status: RankStatus) -> tuple[int, int]:
    return (-1 if status.step is None else status.step, PHASES.index(status.phase))
