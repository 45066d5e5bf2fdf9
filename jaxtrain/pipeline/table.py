"""The table of a pipeline schedule: what runs where and when, buffer slots by interval colouring, checks. Numpy alone.

Words: P stages (the pipe axis), v chunks a stage, M microbatches, T ticks. Chunk c of stage s holds the layers of
*virtual stage* q = c P + s; a microbatch visits q = 0 .. v P - 1 forward and then back. Three kinds of work: F forward,
B backward (of inputs and weights, or of inputs alone where the schedule splits it), W backward of weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxtrain.config import ConfigError

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


Cells = list[list[tuple[Op, ...]]]
"""What runs where: [tick][stage] -> at most one Op of each kind."""
Unit = tuple[str, int, int]
"""(kind, microbatch, virtual stage): one piece of work of the whole pipeline."""


def unit_of(op: Op, stage: int, shape: Shape) -> Unit:
    """Which piece of the whole pipeline's work an Op of a stage is."""
    return op.kind, op.microbatch, op.chunk * shape.stages + stage


def needs(unit: Unit, shape: Shape) -> tuple[Unit, int] | None:
    """What must have run before, and at least how many ticks before; None for a first forward."""
    kind, m, q = unit
    if kind == "W":
        return ("B", m, q), 0
    if kind == "B":
        return (("F", m, q), 0) if q == shape.last else (("B", m, q + 1), 1)
    return None if q == 0 else (("F", m, q - 1), 1)


class Costs(NamedTuple):
    """Time of a forward, of a backward of inputs and of one of weights, in any unit."""

    forward: float = 1
    inputs: float = 1
    weights: float = 1

    def of(self, kind: str, split: bool) -> float:
        """Time of one piece of work; an unsplit backward is both."""
        return {"F": self.forward, "B": self.inputs + (0 if split else self.weights), "W": self.weights}[kind]


UNIT = Costs()
"""Forward, backward of inputs and of weights take one unit each."""


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

    @property
    def ticks(self) -> int:
        """Ticks T."""
        return len(self.columns["f_microbatch"])

    @property
    def split(self) -> bool:
        """Whether the backward of inputs and of weights are two pieces of work."""
        return self.stored_slots > 0

    @property
    def cells(self) -> Cells:
        """What runs where, [tick][stage]."""
        columns = [(k, self.columns[f"{k.lower()}_microbatch"], self.columns[f"{k.lower()}_chunk"]) for k in KINDS]
        return [
            [
                tuple(Op(k, int(m[t, s]), int(c[t, s])) for k, m, c in columns if m[t, s] >= 0)
                for s in range(self.shape.stages)
            ]
            for t in range(self.ticks)
        ]

    @property
    def in_flight(self) -> list[int]:
        """Most pieces of work that each stage has run forward and not yet back; 0 for forward work alone."""
        forward, backward = (self.columns[f"{kind}_microbatch"] >= 0 for kind in "fb")
        started, finished = np.cumsum(forward, axis=0), np.cumsum(backward, axis=0)
        most = (started - finished + backward).max(axis=0)
        return [int(n) for n in most] if backward.any() else [0] * self.shape.stages

    def rows(self, phase: Phase) -> dict[str, NDArray[np.int32]]:
        """The columns in a phase's ticks: what a scan over it reads."""
        return {name: column[phase.start : phase.stop] for name, column in self.columns.items()}

    def places(self, kind: str) -> int:
        """Ticks in which the executor runs a kind of work, on all stages, whether a stage has any or not."""
        return sum(phase.stop - phase.start for phase in self.phases if kind in phase.kinds)

    def bubble(self, costs: Costs = UNIT) -> float:
        """Share of the executor's time in which a stage works for nothing, on average."""
        kinds = [kind for kind in KINDS if self.places(kind)]
        spent = sum(self.places(kind) * costs.of(kind, self.split) for kind in kinds)
        return 1 - self.shape.work * sum(costs.of(kind, self.split) for kind in kinds) / spent


def build(name: str, cells: Cells, shape: Shape, training: bool = True) -> Schedule:
    """The checked table of what runs in each tick, with buffer slots; raises ScheduleError where it cannot run.

    Without `training` there is forward work alone.
    """
    at = _ticks_of(name, cells, shape)
    _check_complete(name, at, shape, training)
    for unit in at:
        _check_order(name, at, unit, shape)
    columns, counts = _columns(at, len(cells), shape)
    schedule = Schedule(name, shape, columns, _phases(columns), *counts)
    validate(schedule)
    return schedule


def _ticks_of(name: str, cells: Cells, shape: Shape) -> dict[Unit, int]:
    at: dict[Unit, int] = {}
    for tick, stage, op in ((t, s, op) for t, row in enumerate(cells) for s, ops in enumerate(row) for op in ops):
        if not (op.microbatch < shape.microbatches and op.chunk < shape.chunks):
            raise ScheduleError(
                f"{name}: stage {stage} runs {op} in tick {tick}, but there are {shape.microbatches} microbatches and "
                f"{shape.chunks} chunks, counted from 0: mend the table, pipeline.microbatches or pipeline.chunks"
            )
        unit = unit_of(op, stage, shape)
        if unit in at:
            raise ScheduleError(
                f"{name}: stage {stage} runs {op} in tick {at[unit]} and again in tick {tick}: drop one"
            )
        if any(other.kind == op.kind for other in cells[tick][stage] if other is not op):
            raise ScheduleError(
                f"{name}: stage {stage} has two pieces of work {op.kind} in tick {tick}: move {op} to another tick"
            )
        at[unit] = tick
    return at


def _check_complete(name: str, at: Mapping[Unit, int], shape: Shape, training: bool) -> None:
    split = any(kind == "W" for kind, _, _ in at)
    for kind in ("F" + "B" * training + "W" * split) if training else "F":
        for m in range(shape.microbatches):
            for q in range(shape.last + 1):
                if (kind, m, q) not in at:
                    op, stage = Op(kind, m, q // shape.stages), q % shape.stages
                    raise ScheduleError(
                        f"{name}: stage {stage} never runs {op} (microbatch {m}): add {op} to a tick of stage {stage}"
                    )


def _check_order(name: str, at: Mapping[Unit, int], unit: Unit, shape: Shape) -> None:
    needed = needs(unit, shape)
    if needed is None or at[unit] >= at[needed[0]] + needed[1]:
        return
    (kind, m, q), (other, _, p) = unit, needed[0]
    op, before = Op(kind, m, q // shape.stages), Op(other, m, p // shape.stages)
    earliest = at[needed[0]] + needed[1]
    raise ScheduleError(
        f"{name}: stage {q % shape.stages} runs {op} in tick {at[unit]}, which needs {before} of stage "
        f"{p % shape.stages} in tick {at[needed[0]]} (microbatch {m}): move {op} to tick {earliest} or later"
    )


# Moments of a tick, in the order of Schedule's docstring.
_RUN_F, _HEAD, _RUN_B, _STORE, _RUN_W, _HAND_OVER = range(6)


def colour(lives: Mapping[tuple[int, int], tuple[int, int]]) -> tuple[dict[tuple[int, int], int], int]:
    """Slot of each life (first moment, last moment), and the fewest slots that hold them without an overlap."""
    slots: dict[tuple[int, int], int] = {}
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    for key, (first, last) in sorted(lives.items(), key=lambda item: item[1]):
        while busy and busy[0][0] < first:
            heappush(free, heappop(busy)[1])
        # No slot is free: all that exist are busy.
        slots[key] = heappop(free) if free else len(busy)
        heappush(busy, (last, slots[key]))
    return slots, 1 + max(slots.values(), default=-1)


def _columns(at: Mapping[Unit, int], ticks: int, shape: Shape) -> tuple[dict[str, NDArray[np.int32]], list[int]]:
    """The columns, and the numbers of input, cotangent and stored slots."""
    P, last = shape.stages, shape.last
    names = [f"{kind}_{what}" for kind in "fbw" for what in ("microbatch", "chunk")]
    names += ["f_input", "b_input", "b_cotangent", "b_stored", "w_stored", "receive_input", "receive_cotangent"]
    sizes = dict.fromkeys(names, (ticks, P)) | dict.fromkeys(("head_microbatch", "head_cotangent"), (ticks,))
    columns: dict[str, NDArray[np.int32]] = {name: np.full(size, -1, np.int32) for name, size in sizes.items()}
    moment = {unit: tick * 6 for unit, tick in at.items()}
    counts = [0, 0, 0]
    for s in range(P):
        units = [(m, q) for q in range(s, last + 1, P) for m in range(shape.microbatches)]
        trained = [(m, q) for m, q in units if ("B", m, q) in at]
        split = [(m, q) for m, q in units if ("W", m, q) in at]
        end = {(m, q): moment["F", m, q] + _RUN_F for m, q in units}
        end |= {(m, q): moment["B", m, q] + _RUN_B for m, q in trained}
        inputs = {(m, q): (moment["F", m, q - 1] + _HAND_OVER, end[m, q]) for m, q in units if q}
        cotangents = {
            (m, q): (moment["F", m, q] + _HEAD if q == last else moment["B", m, q + 1] + _HAND_OVER, end[m, q])
            for m, q in trained
        }
        stored = {(m, q): (moment["B", m, q] + _STORE, moment["W", m, q] + _RUN_W) for m, q in split}
        coloured = [colour(lives) for lives in (inputs, cotangents, stored)]
        (input_of, cotangent_of, stored_of), used = zip(*coloured, strict=True)
        counts = [max(pair) for pair in zip(counts, used, strict=True)]
        for m, q in units:
            for kind in KINDS:
                if (kind, m, q) in at:
                    where = at[kind, m, q], s
                    columns[f"{kind.lower()}_microbatch"][where] = m
                    columns[f"{kind.lower()}_chunk"][where] = q // P
            columns["f_input"][at["F", m, q], s] = input_of.get((m, q), -1)
            if q:
                columns["receive_input"][at["F", m, q - 1], s] = input_of[m, q]
            if q == last:
                columns["head_microbatch"][at["F", m, q]] = m
        for m, q in trained:
            columns["b_input"][at["B", m, q], s] = input_of.get((m, q), -1)
            columns["b_cotangent"][at["B", m, q], s] = cotangent_of[m, q]
            if q == last:
                columns["head_cotangent"][at["F", m, q]] = cotangent_of[m, q]
            else:
                columns["receive_cotangent"][at["B", m, q + 1], s] = cotangent_of[m, q]
        for m, q in split:
            columns["b_stored"][at["B", m, q], s] = stored_of[m, q]
            columns["w_stored"][at["W", m, q], s] = stored_of[m, q]
    return columns, counts


def _phases(columns: Mapping[str, NDArray[np.int32]]) -> tuple[Phase, ...]:
    """One phase between two ticks where a kind of work begins or ends: at most five, whatever the table."""
    busy = {kind: np.flatnonzero((columns[f"{kind.lower()}_microbatch"] >= 0).any(axis=1)) for kind in KINDS}
    spans = {kind: (int(ticks[0]), int(ticks[-1]) + 1) for kind, ticks in busy.items() if len(ticks)}
    borders = sorted({0, len(columns["f_microbatch"]), *(border for span in spans.values() for border in span)})
    return tuple(
        Phase("".join(kind for kind, (a, b) in spans.items() if a <= start and stop <= b), start, stop)
        for start, stop in pairwise(borders)
    )


def validate(schedule: Schedule) -> None:
    """Play a table's columns through its buffers; raises ScheduleError where a slot does not hold what is read.

    Also where a slot is overwritten before its last reading, a result is lost, or something is left at the end.
    """
    buffers: dict[tuple[str, int, int], tuple[int, int]] = {}
    training = bool((schedule.columns["b_microbatch"] >= 0).any())
    for tick in range(schedule.ticks):
        for what, kind, stage, slot, held in _moves(schedule, tick, training):
            place, at = (kind, stage, slot), f"{schedule.name}: tick {tick}, stage {stage}"
            microbatch = f"microbatch {held[0]} of virtual stage {held[1]}"
            if what == "write" and (slot < 0 or place in buffers):
                found = f"still holds microbatch {buffers[place][0]}" if slot >= 0 else "is no slot: it would be lost"
                raise ScheduleError(f"{at}: {kind} slot {slot} {found}, where {microbatch} is written: give it another")
            if what != "write" and buffers.get(place) != held:
                found = f"microbatch {buffers[place][0]}" if place in buffers else "nothing"
                raise ScheduleError(
                    f"{at}: {kind} slot {slot} holds {found}, where {microbatch} is read: mend the slot"
                )
            if what == "write":
                buffers[place] = held
            elif what == "last read":
                del buffers[place]
    for (kind, stage, slot), (m, q) in buffers.items():
        raise ScheduleError(
            f"{schedule.name}: {kind} slot {slot} of stage {stage} holds microbatch {m} of virtual stage {q} at the "
            f"end: run its backward in a tick of stage {stage}"
        )


def _moves(schedule: Schedule, tick: int, training: bool) -> Iterator[tuple[str, str, int, int, tuple[int, int]]]:
    """(read, last read or write; buffer; stage; slot; (microbatch, virtual stage)) of a tick, in order."""
    (P, _, _), last = schedule.shape, schedule.shape.last
    row = {name: column[tick] for name, column in schedule.columns.items()}

    def work(kind: str) -> list[tuple[int, int, int]]:
        found = [(s, int(row[f"{kind}_microbatch"][s]), int(row[f"{kind}_chunk"][s]) * P + s) for s in range(P)]
        return [(s, m, q) for s, m, q in found if m >= 0]

    for s, m, q in work("f"):
        if q:
            yield "read" if training else "last read", "input", s, int(row["f_input"][s]), (m, q)
    for s, m, q in work("f"):
        if q == last and training:
            yield "write", "cotangent", s, int(row["head_cotangent"]), (m, q)
    for s, m, q in work("b"):
        if q:
            yield "last read", "input", s, int(row["b_input"][s]), (m, q)
        yield "last read", "cotangent", s, int(row["b_cotangent"][s]), (m, q)
        if schedule.split:
            yield "write", "stored", s, int(row["b_stored"][s]), (m, q)
    for s, m, q in work("w"):
        yield "last read", "stored", s, int(row["w_stored"][s]), (m, q)
    for s, m, q in work("f"):
        if q != last:
            yield "write", "input", (s + 1) % P, int(row["receive_input"][(s + 1) % P]), (m, q + 1)
    for s, m, q in work("b"):
        if q:
            yield "write", "cotangent", (s - 1) % P, int(row["receive_cotangent"][(s - 1) % P]), (m, q - 1)
