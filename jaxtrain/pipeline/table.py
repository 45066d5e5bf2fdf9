"""The table of a pipeline schedule: operations by tick and stage, buffer slots by interval colouring, checks.

Uses numpy alone. Terms: P stages (the pipe axis), v chunks per stage, M microbatches, T ticks. Chunk c of stage s holds
the layers of *virtual stage* q = c P + s. A microbatch visits q = 0 .. v P - 1 in its forward pass and the reverse in
its backward pass. There are three kinds of operation: F forward, B backward (gradients of inputs and weights, or of
inputs alone in a split schedule), W gradients of weights.
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

OP_KINDS = "FBW"


class ScheduleError(ConfigError):
    """A schedule that cannot run; the message names stage, tick, microbatch and the fix."""


class PipelineShape(NamedTuple):
    """Sizes of a pipeline: stages P, chunks of layers per stage v, microbatches per step M."""

    stages: int
    chunks: int
    microbatches: int

    @property
    def last(self) -> int:
        """The last virtual stage, v P - 1: the one before the head."""
        return self.stages * self.chunks - 1

    @property
    def work(self) -> int:
        """Operations of one kind on a stage, v M."""
        return self.chunks * self.microbatches


class Op(NamedTuple):
    """One operation of a stage: forward (F), backward (B) or weight gradient (W) of a microbatch in a chunk."""

    kind: str
    microbatch: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


Cells = list[list[tuple[Op, ...]]]
"""Operations of each [tick][stage], at most one of each kind."""
Unit = tuple[str, int, int]
"""(kind, microbatch, virtual stage): one operation of the whole pipeline."""


def unit_of(op: Op, stage: int, shape: PipelineShape) -> Unit:
    """The Unit that an Op of a stage is."""
    return op.kind, op.microbatch, op.chunk * shape.stages + stage


def needs(unit: Unit, shape: PipelineShape) -> tuple[Unit, int] | None:
    """The unit that must run before this one, and the minimum distance in ticks; None for a first forward."""
    kind, m, q = unit
    if kind == "W":
        return ("B", m, q), 0
    if kind == "B":
        return (("F", m, q), 0) if q == shape.last else (("B", m, q + 1), 1)
    return None if q == 0 else (("F", m, q - 1), 1)


class Costs(NamedTuple):
    """Time of a chunk's forward, its input gradients, its weight gradients, and the recomputation in B."""

    forward: float = 1
    inputs: float = 1
    weights: float = 1
    recompute: float = 0

    def of(self, kind: str, split: bool) -> float:
        """Time of one operation; an unsplit backward computes the gradients of inputs and weights."""
        backward = self.recompute + self.inputs + (0 if split else self.weights)
        return {"F": self.forward, "B": backward, "W": self.weights}[kind]


UNIT = Costs()
"""Forward, input gradients and weight gradients take one unit each; nothing is recomputed."""


class TickPhase(NamedTuple):
    """Ticks [start, stop) in which the executor runs these kinds ("F", "FB", "FBW", ...) on every stage."""

    kinds: str
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Schedule:
    """A checked table: the operation of each stage in each tick, and the buffer slots that it reads and writes.

    `columns` are int32 arrays, -1 where nothing happens. All are [T, P] but the two of the head, which are [T]. Within
    one tick the executor does the following in order, for all stages at once:

    1. F: chunk `f_chunk` of the stage runs microbatch `f_microbatch` on input slot `f_input`. A -1 there is the first
       virtual stage, whose input is the embedding of the microbatch's tokens. The residuals of its backward pass are
       written to residual slot `f_residual`.
    2. Head: where `head_microbatch` is not -1, the last stage's F output goes through head and loss; its cotangent is
       written to cotangent slot `head_cotangent` of stage P - 1.
    3. B: `b_microbatch`, `b_chunk` from residual slot `b_residual` and cotangent slot `b_cotangent`. The first virtual
       stage's result is the embedding's cotangent. In a split schedule B gives no weight gradient; it writes the values
       that W needs beside the residuals to weight-residual slot `b_weight_residual`.
    4. W: weight gradient of `w_microbatch`, `w_chunk` from residual slot `w_residual` and weight-residual slot
       `w_weight_residual`.
    5. Stages send: F outputs move to stage s + 1 (the last one's to 0) and are written to input slot `receive_input` of
       the receiver, B results to stage s - 1 and its cotangent slot `receive_cotangent`.

    A slot may be written as soon as it was read for the last time, also later in the same tick. `phases` cover all
    ticks; `split` tells whether B and W are separate operations.
    """

    name: str
    shape: PipelineShape
    columns: dict[str, NDArray[np.int32]]
    phases: tuple[TickPhase, ...]
    input_slots: int
    residual_slots: int
    cotangent_slots: int
    weight_residual_slots: int

    @property
    def ticks(self) -> int:
        """Ticks T."""
        return len(self.columns["f_microbatch"])

    @property
    def split(self) -> bool:
        """Whether the gradients of inputs (B) and of weights (W) are two operations."""
        return self.weight_residual_slots > 0

    @property
    def cells(self) -> Cells:
        """Operations of each [tick][stage]."""
        columns = [(k, self.columns[f"{k.lower()}_microbatch"], self.columns[f"{k.lower()}_chunk"]) for k in OP_KINDS]
        return [
            [
                tuple(Op(k, int(m[t, s]), int(c[t, s])) for k, m, c in columns if m[t, s] >= 0)
                for s in range(self.shape.stages)
            ]
            for t in range(self.ticks)
        ]

    @property
    def in_flight(self) -> list[int]:
        """Largest number of microbatch chunks in flight on each stage: F done, B not; 0 in a forward schedule."""
        forward, backward = (self.columns[f"{kind}_microbatch"] >= 0 for kind in "fb")
        started, finished = np.cumsum(forward, axis=0), np.cumsum(backward, axis=0)
        most = (started - finished + backward).max(axis=0)
        return [int(n) for n in most] if backward.any() else [0] * self.shape.stages

    def rows(self, phase: TickPhase) -> dict[str, NDArray[np.int32]]:
        """The columns restricted to a phase's ticks: the inputs of a scan over it."""
        return {name: column[phase.start : phase.stop] for name, column in self.columns.items()}

    def ticks_with(self, kind: str) -> int:
        """Number of ticks in which the executor runs a kind of operation, idle stages included."""
        return sum(phase.stop - phase.start for phase in self.phases if kind in phase.kinds)

    def time(self, costs: Costs = UNIT) -> float:
        """Time of a step in the executor: all stages run a tick together, idle stages included."""
        return sum(self.ticks_with(kind) * costs.of(kind, self.split) for kind in OP_KINDS)

    def bubble(self, costs: Costs = UNIT) -> float:
        """Share of that time in which a stage is idle, on average."""
        kinds = [kind for kind in OP_KINDS if self.ticks_with(kind)]
        return 1 - self.shape.work * sum(costs.of(kind, self.split) for kind in kinds) / self.time(costs)


def build_schedule(name: str, cells: Cells, shape: PipelineShape, training: bool = True) -> Schedule:
    """The checked table of the operations in each tick, with buffer slots.

    Without `training` there are forward operations alone. Raises ScheduleError where the table cannot run.
    """
    tick_of = _unit_ticks(name, cells, shape)
    _check_complete(name, tick_of, shape, training)
    for unit in tick_of:
        _check_order(name, tick_of, unit, shape)
    columns, counts = _columns(tick_of, len(cells), shape)
    schedule = Schedule(name, shape, columns, _phases(columns), *counts)
    validate_schedule(schedule)
    return schedule


def _unit_ticks(name: str, cells: Cells, shape: PipelineShape) -> dict[Unit, int]:
    tick_of: dict[Unit, int] = {}
    for tick, stage, op in ((t, s, op) for t, row in enumerate(cells) for s, ops in enumerate(row) for op in ops):
        if not (op.microbatch < shape.microbatches and op.chunk < shape.chunks):
            raise ScheduleError(
                f"{name}: stage {stage} runs {op} in tick {tick}, but there are {shape.microbatches} microbatches and "
                f"{shape.chunks} chunks, counted from 0: fix the table, pipeline.microbatches or pipeline.chunks"
            )
        unit = unit_of(op, stage, shape)
        if unit in tick_of:
            raise ScheduleError(
                f"{name}: stage {stage} runs {op} in tick {tick_of[unit]} and again in tick {tick}: drop one"
            )
        if any(other.kind == op.kind for other in cells[tick][stage] if other is not op):
            raise ScheduleError(
                f"{name}: stage {stage} has two {op.kind} operations in tick {tick}: move {op} to another tick"
            )
        tick_of[unit] = tick
    return tick_of


def _check_complete(name: str, tick_of: Mapping[Unit, int], shape: PipelineShape, training: bool) -> None:
    split = any(kind == "W" for kind, _, _ in tick_of)
    for kind in ("F" + "B" * training + "W" * split) if training else "F":
        for m in range(shape.microbatches):
            for q in range(shape.last + 1):
                if (kind, m, q) not in tick_of:
                    op, stage = Op(kind, m, q // shape.stages), q % shape.stages
                    raise ScheduleError(
                        f"{name}: stage {stage} never runs {op} (microbatch {m}): add {op} to a tick of stage {stage}"
                    )


def _check_order(name: str, tick_of: Mapping[Unit, int], unit: Unit, shape: PipelineShape) -> None:
    needed = needs(unit, shape)
    if needed is None or tick_of[unit] >= tick_of[needed[0]] + needed[1]:
        return
    (kind, m, q), (other, _, p) = unit, needed[0]
    op, before = Op(kind, m, q // shape.stages), Op(other, m, p // shape.stages)
    earliest = tick_of[needed[0]] + needed[1]
    raise ScheduleError(
        f"{name}: stage {q % shape.stages} runs {op} in tick {tick_of[unit]}, which needs {before} of stage "
        f"{p % shape.stages} in tick {tick_of[needed[0]]} (microbatch {m}): move {op} to tick {earliest} or later"
    )


# Moments of a tick, in the order of Schedule's docstring.
_READ_F, _WRITE_F, _HEAD, _READ_B, _WRITE_B, _READ_W, _SEND = range(7)
Lifetime = tuple[int, int]
"""Moments of a slot's write and last read; moment = 7 x tick + one of the above."""
BufferEntry = tuple[int, int]
"""(microbatch, virtual stage): the owner of the value in a buffer slot."""


def assign_slots(lifetimes: Mapping[BufferEntry, Lifetime]) -> tuple[dict[BufferEntry, int], int]:
    """Slot of each entry, and the fewest slots in which no lifetimes overlap (interval colouring)."""
    slots: dict[BufferEntry, int] = {}
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    for entry, (first, last) in sorted(lifetimes.items(), key=lambda item: item[1]):
        while busy and busy[0][0] < first:
            heappush(free, heappop(busy)[1])
        # No slot is free: all that exist are busy.
        slots[entry] = heappop(free) if free else len(busy)
        heappush(busy, (last, slots[entry]))
    return slots, 1 + max(slots.values(), default=-1)


# Columns that write and read each buffer; results of F and B are written at the stage that receives them.
_ACCESS = {
    "input": ("receive_input", "f_input"),
    "residual": ("f_residual", "b_residual", "w_residual"),
    "cotangent": ("receive_cotangent", "b_cotangent"),
    "weight_residual": ("b_weight_residual", "w_weight_residual"),
}


def _columns(
    tick_of: Mapping[Unit, int], ticks: int, shape: PipelineShape
) -> tuple[dict[str, NDArray[np.int32]], list[int]]:
    """The columns, and the number of slots of each buffer in the order of _ACCESS."""
    P = shape.stages
    names = [f"{kind}_{field}" for kind in "fbw" for field in ("microbatch", "chunk")]
    names += [name for access in _ACCESS.values() for name in access]
    sizes = dict.fromkeys(names, (ticks, P)) | dict.fromkeys(("head_microbatch", "head_cotangent"), (ticks,))
    columns: dict[str, NDArray[np.int32]] = {name: np.full(size, -1, np.int32) for name, size in sizes.items()}
    for (kind, m, q), tick in tick_of.items():
        columns[f"{kind.lower()}_microbatch"][tick, q % P] = m
        columns[f"{kind.lower()}_chunk"][tick, q % P] = q // P
        if kind == "F" and q == shape.last:
            columns["head_microbatch"][tick] = m
    counts = dict.fromkeys(_ACCESS, 0)
    for buffer, stage in product(_ACCESS, range(P)):
        slots, count = assign_slots({e: life for e, life in _lifetimes(buffer, tick_of, shape) if e[1] % P == stage})
        counts[buffer] = max(counts[buffer], count)
        for (m, q), slot in slots.items():
            for name in _ACCESS[buffer]:
                kind = name[0].upper()
                if kind in OP_KINDS and (kind, m, q) in tick_of:
                    columns[name][tick_of[kind, m, q], stage] = slot
            if buffer == "input":
                columns["receive_input"][tick_of["F", m, q - 1], stage] = slot
            elif buffer == "cotangent" and q < shape.last:
                columns["receive_cotangent"][tick_of["B", m, q + 1], stage] = slot
            elif buffer == "cotangent":
                columns["head_cotangent"][tick_of["F", m, q]] = slot
    return columns, list(counts.values())


def _lifetimes(
    buffer: str, tick_of: Mapping[Unit, int], shape: PipelineShape
) -> Iterator[tuple[BufferEntry, Lifetime]]:
    """Lifetime of each entry of a buffer."""
    for (kind, m, q), tick in tick_of.items():
        start = {k: 7 * tick_of[k, m, q] for k in OP_KINDS if (k, m, q) in tick_of}
        if buffer == "input" and kind == "F" and q:
            yield (m, q), (7 * tick_of["F", m, q - 1] + _SEND, 7 * tick + _READ_F)
        if buffer == "residual" and kind == "B":
            yield (m, q), (start["F"] + _WRITE_F, max(7 * tick + _READ_B, start.get("W", -1) + _READ_W))
        if buffer == "cotangent" and kind == "B":
            sent = start["F"] + _HEAD if q == shape.last else 7 * tick_of["B", m, q + 1] + _SEND
            yield (m, q), (sent, 7 * tick + _READ_B)
        if buffer == "weight_residual" and kind == "W":
            yield (m, q), (start["B"] + _WRITE_B, 7 * tick + _READ_W)


def _phases(columns: Mapping[str, NDArray[np.int32]]) -> tuple[TickPhase, ...]:
    """One phase between two ticks where a kind of operation begins or ends: at most five, whatever the table."""
    busy = {kind: np.flatnonzero((columns[f"{kind.lower()}_microbatch"] >= 0).any(axis=1)) for kind in OP_KINDS}
    spans = {kind: (int(ticks[0]), int(ticks[-1]) + 1) for kind, ticks in busy.items() if len(ticks)}
    borders = sorted({0, len(columns["f_microbatch"]), *(border for span in spans.values() for border in span)})
    return tuple(
        TickPhase("".join(kind for kind, (a, b) in spans.items() if a <= start and stop <= b), start, stop)
        for start, stop in pairwise(borders)
    )


def validate_schedule(schedule: Schedule) -> None:
    """Simulate the buffers of a table.

    Raises ScheduleError where a slot does not hold the value that is read from it, is overwritten before its last read,
    where a result is lost, or where a slot still holds a value at the end.
    """
    held: dict[tuple[str, int, int], BufferEntry] = {}
    training = bool((schedule.columns["b_microbatch"] >= 0).any())
    for tick in range(schedule.ticks):
        for access, buffer, stage, slot, entry in _accesses(schedule, tick, training):
            key, where = (buffer, stage, slot), f"{schedule.name}: tick {tick}, stage {stage}"
            slot_name, wanted = f"{_title(buffer)} slot {slot}", f"microbatch {entry[0]} of virtual stage {entry[1]}"
            if access == "write" and (slot < 0 or key in held):
                found = f"still holds microbatch {held[key][0]}" if slot >= 0 else "is no slot: it would be lost"
                raise ScheduleError(f"{where}: {slot_name} {found}, where {wanted} is written: use another slot")
            if access != "write" and held.get(key) != entry:
                found = f"microbatch {held[key][0]}" if key in held else "nothing"
                raise ScheduleError(f"{where}: {slot_name} holds {found}, where {wanted} is read: fix the slot number")
            if access == "write":
                held[key] = entry
            elif access == "last read":
                del held[key]
    for (buffer, stage, slot), (m, q) in held.items():
        raise ScheduleError(
            f"{schedule.name}: {_title(buffer)} slot {slot} of stage {stage} holds microbatch {m} of virtual stage {q} "
            f"at the end: run its backward in a tick of stage {stage}"
        )


def _title(buffer: str) -> str:
    return buffer.replace("_", " ")


def _accesses(schedule: Schedule, tick: int, training: bool) -> Iterator[tuple[str, str, int, int, BufferEntry]]:
    """(read, last read or write; buffer; stage; slot; entry) of a tick, in order."""
    (P, _, _), last, split = schedule.shape, schedule.shape.last, schedule.split
    row = {name: column[tick] for name, column in schedule.columns.items()}

    def entries(kind: str) -> list[tuple[int, BufferEntry]]:
        found = [(s, (int(row[f"{kind}_microbatch"][s]), int(row[f"{kind}_chunk"][s]) * P + s)) for s in range(P)]
        return [(s, entry) for s, entry in found if entry[0] >= 0]

    def access(how: str, name: str, stage: int, entry: BufferEntry) -> tuple[str, str, int, int, BufferEntry]:
        slot = row[name] if row[name].ndim == 0 else row[name][stage]
        return how, name.split("_", 1)[1], stage, int(slot), entry

    for s, (m, q) in entries("f"):
        if q:
            yield access("last read", "f_input", s, (m, q))
        if training:
            yield access("write", "f_residual", s, (m, q))
        if q == last and training:
            yield access("write", "head_cotangent", s, (m, q))
    for s, entry in entries("b"):
        yield access("read" if split else "last read", "b_residual", s, entry)
        yield access("last read", "b_cotangent", s, entry)
        if split:
            yield access("write", "b_weight_residual", s, entry)
    for s, entry in entries("w"):
        yield access("last read", "w_residual", s, entry)
        yield access("last read", "w_weight_residual", s, entry)
    for s, (m, q) in entries("f"):
        if q != last:
            yield access("write", "receive_input", (s + 1) % P, (m, q + 1))
    for s, (m, q) in entries("b"):
        if q:
            yield access("write", "receive_cotangent", (s - 1) % P, (m, q - 1))
