"""Schedules of sequence length and batch size: a run as a few phases, each with one batch shape."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtrain.config import ConfigError, DataConfig, TrainConfig


@dataclass(frozen=True)
class Phase:
    """From step `start` on (counted from 0), each step has `global_batch` sequences of `seq_len` tokens."""

    start: int
    seq_len: int
    global_batch: int

    def to_json(self) -> dict[str, int]:
        """Plain values; `length` is the older key of seq_len, which stays in outputs."""
        return {
            "start": self.start, "seq_len": self.seq_len, "length": self.seq_len, "global_batch": self.global_batch
        }  # fmt: skip


def phases_of(data: DataConfig, train: TrainConfig) -> tuple[Phase, ...]:
    """The phases of a run; without data.schedule there is one.

    Tokens are positions, padding included, so the step at which a phase begins is known before the run: the first
    step before which at least `start` tokens were read. Raises ConfigError when a phase would have no step.
    """
    phases: list[Phase] = []
    step = tokens = 0
    for index, entry in enumerate(data.schedule):
        if phases:
            each = phases[-1].seq_len * phases[-1].global_batch if data.schedule_unit == "tokens" else 1
            steps = -(-(entry.start - tokens) // each)
            if steps <= 0:
                raise ConfigError(
                    f"data.schedule[{index - 1}] has no step: it begins at {tokens} tokens, after the start of "
                    f"data.schedule[{index}] ({entry.start}), because batches have {each} tokens: raise that start"
                )
            step, tokens = step + steps, tokens + steps * each
        phases.append(Phase(step, entry.seq_len or data.seq_len, entry.global_batch or train.global_batch))
    return tuple(phases) or (Phase(0, data.seq_len, train.global_batch),)


def phase_at(phases: Sequence[Phase], step: int) -> int:
    """The index of the phase of a step (counted from 0)."""
    return bisect_right([phase.start for phase in phases], step) - 1
