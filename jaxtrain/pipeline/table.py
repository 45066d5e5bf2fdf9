"""The table of a pipeline schedule: what runs where and when, buffer slots by interval colouring, checks. Numpy alone.

Words: P stages (the pipe axis), v chunks a stage, M microbatches, T ticks. Chunk c of stage s holds the layers of
*virtual stage* q = c P + s; a microbatch visits q = 0 .. v P - 1 forward and then back. Three kinds of work: F forward,
B backward (of inputs and weights, or of inputs alone where the schedule splits it), W backward of weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxtrain.config import ConfigError

KINDS = "FBW"


class ScheduleError(ConfigError):
    """A schedule that cannot run; names stage, tick and microbatch, and the mend."""


class PipelineShape(NamedTuple):
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


def unit_of(op: Op, stage: int, shape: PipelineShape) -> Unit:
    """Which piece of the whole pipeline's work an Op of a stage is."""
    return op.kind, op.microbatch, op.chunk * shape.stages + stage


def needs(unit: Unit, shape: PipelineShape) -> tuple[Unit, int] | None:
    """What must have run before, and at least how many ticks before; None for a first forward."""
    kind, m, q = unit
    if kind == "W":
        return ("B", m, q), 0
    if kind == "B":
        return (("F", m, q), 0) if q == shape.last else (("B", m, q + 1), 1)
    return None if q == 0 else (("F", m, q - 1), 1)


class Costs(NamedTuple):
    """Time of a chunk's forward, of its backward of inputs and of weights, and of what B recomputes before them."""

    forward: float = 1
    inputs: float = 1
    weights: float = 1
    recompute: float = 0

    def of(self, kind: str, split: bool) -> float:
        """Time of one piece of work; an unsplit backward is of inputs and weights."""
        backward = self.recompute + self.inputs + (0 if split else self.weights)
        return {"F": self.forward, "B": backward, "W": self.weights}[kind]


UNIT = Costs()
"""Forward, backward of inputs and of weights take one unit each, and nothing is recomputed."""


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
       virtual stage, whose input is the embedding of the microbatch's tokens. What its backward needs (the inputs of
       its layers) is written to kept slot `f_kept`.
    2. Head: where `head_microbatch` is not -1, the last stage's F output goes through head and loss; its cotangent is
       written to cotangent slot `head_cotangent` of stage P - 1.
    3. B: `b_microbatch`, `b_chunk` from kept slot `b_kept` and cotangent slot `b_cotangent`; the first virtual stage's
       result is the embedding's cotangent. In a split schedule it also writes what W needs beside what is kept to
       stored slot `b_stored`, and gives no weight gradient.
    4. W: weight gradient of `w_microbatch`, `w_chunk` from kept slot `w_kept` and stored slot `w_stored`.
    5. Stages hand over: F outputs move to stage s + 1 (the last one's to 0) and are written to input slot
       `receive_input` of the receiver, B results to stage s - 1 and its cotangent slot `receive_cotangent`.

    A slot is free to be written as soon as it was read for the last time, also later in the same tick. `phases` cover
    all ticks; `split` says that B and W are apart.
    """

    name: str
    shape: PipelineShape
    columns: dict[str, NDArray[np.int32]]
    phases: tuple[Phase, ...]
    input_slots: int
    kept_slots: int
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

    def time(self, costs: Costs = UNIT) -> float:
        """Time of an update in the executor: all stages run a tick together, whether they have work in it or not."""
        return sum(self.places(kind) * costs.of(kind, self.split) for kind in KINDS)

    def bubble(self, costs: Costs = UNIT) -> float:
        """Share of that time in which a stage works for nothing, on average."""
        kinds = [kind for kind in KINDS if self.places(kind)]
        return 1 - self.shape.work * sum(costs.of(kind, self.split) for kind in kinds) / self.time(costs)


def build(name: str, cells: Cells, shape: PipelineShape, training: bool = True) -> Schedule:
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


def _ticks_of(name: str, cells: Cells, shape: PipelineShape) -> dict[Unit, int]:
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


def _check_complete(name: str, at: Mapping[Unit, int], shape: PipelineShape, training: bool) -> None:
    split = any(kind == "W" for kind, _, _ in at)
    for kind in ("F" + "B" * training + "W" * split) if training else "F":
        for m in range(shape.microbatches):
            for q in range(shape.last + 1):
                if (kind, m, q) not in at:
                    op, stage = Op(kind, m, q // shape.stages), q % shape.stages
                    raise ScheduleError(
                        f"{name}: stage {stage} never runs {op} (microbatch {m}): add {op} to a tick of stage {stage}"
                    )


def _check_order(name: str, at: Mapping[Unit, int], unit: Unit, shape: PipelineShape) -> None:
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
_READ_F, _KEEP, _HEAD, _READ_B, _STORE, _READ_W, _HAND_OVER = range(7)
Life = tuple[int, int]
"""The moments at which a slot is written and read for the last time; moment = 7 x tick + one of the above."""
Place = tuple[int, int]
"""(microbatch, virtual stage)."""


def colour(lives: Mapping[Place, Life]) -> tuple[dict[Place, int], int]:
    """Slot of each life, and the fewest slots that hold them without an overlap (interval colouring)."""
    slots: dict[Place, int] = {}
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    for key, (first, last) in sorted(lives.items(), key=lambda item: item[1]):
        while busy and busy[0][0] < first:
            heappush(free, heappop(busy)[1])
        # No slot is free: all that exist are busy.
        slots[key] = heappop(free) if free else len(busy)
        heappush(busy, (last, slots[key]))
    return slots, 1 + max(slots.values(), default=-1)


# Who writes and who reads each buffer; F's and B's results are written where they arrive.
_ACCESS = {
    "input": ("receive_input", "f_input"),
    "kept": ("f_kept", "b_kept", "w_kept"),
    "cotangent": ("receive_cotangent", "b_cotangent"),
    "stored": ("b_stored", "w_stored"),
}


def _columns(
    at: Mapping[Unit, int], ticks: int, shape: PipelineShape
) -> tuple[dict[str, NDArray[np.int32]], list[int]]:
    """The columns, and the numbers of input, kept, cotangent and stored slots."""
    P = shape.stages
    names = [f"{kind}_{what}" for kind in "fbw" for what in ("microbatch", "chunk")]
    names += [name for access in _ACCESS.values() for name in access]
    sizes = dict.fromkeys(names, (ticks, P)) | dict.fromkeys(("head_microbatch", "head_cotangent"), (ticks,))
    columns: dict[str, NDArray[np.int32]] = {name: np.full(size, -1, np.int32) for name, size in sizes.items()}
    for (kind, m, q), tick in at.items():
        columns[f"{kind.lower()}_microbatch"][tick, q % P] = m
        columns[f"{kind.lower()}_chunk"][tick, q % P] = q // P
        if kind == "F" and q == shape.last:
            columns["head_microbatch"][tick] = m
    counts = dict.fromkeys(_ACCESS, 0)
    for buffer, stage in product(_ACCESS, range(P)):
        slots, count = colour({place: life for place, life in _lives(buffer, at, shape) if place[1] % P == stage})
        counts[buffer] = max(counts[buffer], count)
        for (m, q), slot in slots.items():
            for name in _ACCESS[buffer]:
                kind = name[0].upper()
                if kind in KINDS and (kind, m, q) in at:
                    columns[name][at[kind, m, q], stage] = slot
            if buffer == "input":
                columns["receive_input"][at["F", m, q - 1], stage] = slot
            elif buffer == "cotangent" and q < shape.last:
                columns["receive_cotangent"][at["B", m, q + 1], stage] = slot
            elif buffer == "cotangent":
                columns["head_cotangent"][at["F", m, q]] = slot
    return columns, list(counts.values())


def _lives(buffer: str, at: Mapping[Unit, int], shape: PipelineShape) -> Iterator[tuple[Place, Life]]:
    """From when to when a buffer holds something of each microbatch and virtual stage."""
    for (kind, m, q), tick in at.items():
        when = {k: 7 * at[k, m, q] for k in KINDS if (k, m, q) in at}
        if buffer == "input" and kind == "F" and q:
            yield (m, q), (7 * at["F", m, q - 1] + _HAND_OVER, 7 * tick + _READ_F)
        if buffer == "kept" and kind == "B":
            yield (m, q), (when["F"] + _KEEP, max(7 * tick + _READ_B, when.get("W", -1) + _READ_W))
        if buffer == "cotangent" and kind == "B":
            sent = when["F"] + _HEAD if q == shape.last else 7 * at["B", m, q + 1] + _HAND_OVER
            yield (m, q), (sent, 7 * tick + _READ_B)
        if buffer == "stored" and kind == "W":
            yield (m, q), (when["B"] + _STORE, 7 * tick + _READ_W)


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


def _moves(schedule: Schedule, tick: int, training: bool) -> Iterator[tuple[str, str, int, int, Place]]:
    """(read, last read or write; buffer; stage; slot; what) of a tick, in order."""
    (P, _, _), last, split = schedule.shape, schedule.shape.last, schedule.split
    row = {name: column[tick] for name, column in schedule.columns.items()}

    def work(kind: str) -> list[tuple[int, Place]]:
        found = [(s, (int(row[f"{kind}_microbatch"][s]), int(row[f"{kind}_chunk"][s]) * P + s)) for s in range(P)]
        return [(s, place) for s, place in found if place[0] >= 0]

    def access(what: str, name: str, stage: int, place: Place) -> tuple[str, str, int, int, Place]:
        slot = row[name] if row[name].ndim == 0 else row[name][stage]
        return what, name.split("_")[1], stage, int(slot), place

    for s, (m, q) in work("f"):
        if q:
            yield access("last read", "f_input", s, (m, q))
        if training:
            yield access("write", "f_kept", s, (m, q))
        if q == last and training:
            yield access("write", "head_cotangent", s, (m, q))
    for s, place in work("b"):
        yield access("read" if split else "last read", "b_kept", s, place)
        yield access("last read", "b_cotangent", s, place)
        if split:
            yield access("write", "b_stored", s, place)
    for s, place in work("w"):
        yield access("last read", "w_kept", s, place)
        yield access("last read", "w_stored", s, place)
    for s, (m, q) in work("f"):
        if q != last:
            yield access("write", "receive_input", (s + 1) % P, (m, q + 1))
    for s, (m, q) in work("b"):
        if q:
            yield access("write", "receive_cotangent", (s - 1) % P, (m, q - 1))
