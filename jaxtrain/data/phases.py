"""Schedules of row length and batch size: a run as a few phases, each of one shape."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtrain.config import ConfigError, DataConfig, TrainConfig


@dataclass(frozen=True)
class Phase:
    """Updates from `start` on (counted from 0) have `global_batch` rows of `length` tokens."""

    start: int
    seq_len: int
    global_batch: int


def phases_of(data: DataConfig, train: TrainConfig) -> tuple[Phase, ...]:
    """The phases of a run; without data.schedule there is one.

    Tokens are positions, padding counted, so the update at which a phase begins is known before the run: the first
    one before which at least `start` tokens were read. Raises ConfigError when a phase would have no update.
    """
    phases: list[Phase] = []
    update = tokens = 0
    for index, entry in enumerate(data.schedule):
        if phases:
            each = phases[-1].seq_len * phases[-1].global_batch if data.schedule_unit == "tokens" else 1
            updates = -(-(entry.start - tokens) // each)
            if updates <= 0:
                raise ConfigError(
                    f"data.schedule[{index - 1}] has no update: its batches of {each} tokens pass {entry.start}, the "
                    f"start of data.schedule[{index}], before it begins ({tokens} tokens): move that start"
                )
            update, tokens = update + updates, tokens + updates * each
        phases.append(Phase(update, entry.seq_len or data.seq_len, entry.global_batch or train.global_batch))
    return tuple(phases) or (Phase(0, data.seq_len, train.global_batch),)


def phase_at(phases: Sequence[Phase], update: int) -> int:
    """The index of the phase to which an update (counted from 0) belongs."""
    return bisect_right([phase.start for phase in phases], update) - 1
