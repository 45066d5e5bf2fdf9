"""Pipeline schedules as tables: makers, the buffers that they need, checks. Numpy alone.

Words: P stages (the pipe axis), v chunks a stage, M microbatches, T ticks. Chunk c of stage s holds the layers of
*virtual stage* q = c P + s; a microbatch visits q = 0 .. v P - 1 forward and back. Three kinds of work: F forward,
B backward (of inputs and weights, or of inputs alone where the schedule splits it), W backward of weights.

A maker says in which *order* each stage works. Two readings of an order:

* `lockstep` gives the ticks of an executor that runs all stages as one vectorised program: a tick has one F, one B and
  one W place a stage, and what a stage sends is there a tick later.
* `timeline` gives the classic picture: a stage does one thing at a time and waits for nobody but its neighbours.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxtrain.config import ConfigError, nearest

KINDS = "FBW"


class ScheduleError(ConfigError):
    """A schedule that cannot run; names stage, tick and microbatch, and the mend."""


class Shape(NamedTuple):
    """Sizes of a pipeline: stages P, chunks of layers a stage v, microbatches of an update M."""

    stages: int
    chunks: int
    microbatches: int

    @property
    def last(self) -> int:
        """The last virtual stage, v P - 1: the one before the head."""
        return self.stages * self.chunks - 1

    @property
    def work(self) -> int:
        """Pieces of work of a kind on a stage, v M."""
        return self.chunks * self.microbatches


class Op(NamedTuple):
    """One piece of work of a stage."""

    kind: str
    microbatch: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


Order = list[Op]
"""What one stage does, in order."""
Maker = Callable[[Shape, bool], list[Order]]
"""(shape, in lockstep) -> the order of each stage. In lockstep what is sent travels one stage a tick, and a tick holds
an F and a B: hiding the way back takes twice the microbatches that it takes where a stage does one thing at a time."""
Cells = list[list[tuple[Op, ...]]]
"""What runs where: [tick][stage] -> at most one Op of each kind."""


class Phase(NamedTuple):
    """Ticks [start, stop) in which the executor runs these kinds ("F", "FB", "FBW", ...) on every stage."""

    kinds: str
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Schedule:
    """A checked table: what each stage does in each tick, and which buffer slots it reads and writes.

    `columns` are int32 arrays, -1 where nothing happens. All are [T, P] but the two of the head, which are [T]. In one
    tick things happen in this order, for all stages at once:

    1. F: chunk `f_chunk` of the stage runs microbatch `f_microbatch` on input slot `f_input`; -1 there is the first
       virtual stage, whose input is the embedding of the microbatch's tokens.
    2. Head: where `head_microbatch` is not -1, the last stage's F output goes through head and loss; its cotangent is
       written to cotangent slot `head_cotangent` of stage P - 1.
    3. B: `b_microbatch`, `b_chunk` from input slot `b_input` (-1: the embedding) and cotangent slot `b_cotangent`; the
       first virtual stage's result is the embedding's cotangent. In a split schedule it also writes what W needs to
       stored slot `b_stored`, and gives no weight gradient.
    4. W: weight gradient of `w_microbatch`, `w_chunk` from stored slot `w_stored`.
    5. Stages hand over: F outputs move to stage s + 1 (the last one's to 0) and are written to input slot
       `receive_input` of the receiver, B results to stage s - 1 and its cotangent slot `receive_cotangent`.

    A slot is free to be written as soon as it was read for the last time, also later in the same tick. `phases` cover
    all ticks; `split` says that B and W are apart.
    """

    name: str
    shape: Shape
    columns: dict[str, NDArray[np.int32]]
    phases: tuple[Phase, ...]
    input_slots: int
    cotangent_slots: int
    stored_slots: int
    cells: Cells

    @property
    def ticks(self) -> int:
        """Ticks T."""
        return len(self.cells)

    @property
    def split(self) -> bool:
        """Whether the backward of inputs and of weights are two pieces of work."""
        return self.stored_slots > 0

    def rows(self, phase: Phase) -> dict[str, NDArray[np.int32]]:
        """The columns in a phase's ticks: what a scan over it reads."""
        return {name: column[phase.start : phase.stop] for name, column in self.columns.items()}
