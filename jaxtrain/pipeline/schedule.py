"""Pipeline schedules: functions that order the operations of each stage. Uses numpy alone; terms as in table.py.

A schedule function gives the *order* of operations of each stage. An order is read in two ways:

* `lockstep` gives the ticks of an executor that runs all stages as one vectorised program: a tick has one F, one B and
  one W slot per stage, and a result arrives at the next stage one tick later.
* `timeline` gives the classic execution: a stage runs one operation at a time and waits only for its neighbours.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from jaxtrain.config import ConfigError, PipelineConfig, nearest
from jaxtrain.pipeline.table import (
    OP_KINDS,
    UNIT,
    Cells,
    Costs,
    Op,
    PipelineShape,
    Schedule,
    ScheduleError,
    TickPhase,
    Unit,
    build_schedule,
    needs,
    unit_of,
    validate_schedule,
)

__all__ = [
    "MAKERS",
    "UNIT",
    "Costs",
    "Maker",
    "Op",
    "Order",
    "PipelineShape",
    "Schedule",
    "ScheduleError",
    "ScheduleSpan",
    "ScheduleTimeline",
    "TickPhase",
    "classic_orders",
    "forward_schedule",
    "lockstep",
    "make_schedule",
    "read_csv",
    "schedule_shape",
    "timeline",
    "validate_schedule",
    "write_csv",
]  # fmt: skip

Order = list[Op]
"""Operations of one stage, in order."""
Maker = Callable[[PipelineShape, bool], list[Order]]
"""(shape, in lockstep) -> the order of each stage. In lockstep a result moves one stage per tick and a tick holds an F
and a B, so that hiding the backward pass takes twice the microbatches of one-operation-at-a-time execution."""


def schedule_shape(pipeline: PipelineConfig, stages: int, accumulation: int) -> PipelineShape:
    """Sizes of a run's pipeline; its microbatches are those of gradient accumulation.

    Raises ConfigError where pipeline.microbatches is set to another number.
    """
    if pipeline.microbatches not in (None, accumulation):
        raise ConfigError(
            f"pipeline.microbatches {pipeline.microbatches} is not train.accumulation {accumulation}, and both are the "
            "microbatches of a step: set one of them, or both to the same number"
        )
    return PipelineShape(stages, pipeline.chunks or (2 if pipeline.schedule == "interleaved" else 1), accumulation)


def make_schedule(schedule: str | Maker, shape: PipelineShape) -> Schedule:
    """The checked table of a schedule: a key of MAKERS, a CSV file, or a function.

    Raises ScheduleError for an unknown name, an unreadable file, or an order that cannot run.
    """
    if callable(schedule):
        return build_schedule(getattr(schedule, "__name__", "schedule"), lockstep(schedule(shape, True), shape), shape)
    if schedule in MAKERS:
        return build_schedule(schedule, lockstep(MAKERS[schedule](shape, True), shape), shape)
    if not schedule.endswith(".csv"):
        raise ScheduleError(
            f"pipeline.schedule {schedule!r} is unknown{nearest(schedule, MAKERS)}; "
            f"use {', '.join(MAKERS)}, or a file that ends in .csv"
        )
    return build_schedule(schedule, read_csv(Path(schedule), shape), shape)


def forward_schedule(shape: PipelineShape) -> Schedule:
    """Forward operations alone, filling and draining the pipeline once; used by evaluation."""
    orders = [_sequence(shape, "F") for _ in range(shape.stages)]
    return build_schedule("forward", lockstep(orders, shape), shape, training=False)


def gpipe(shape: PipelineShape, in_lockstep: bool) -> list[Order]:
    """All forwards, then all backwards (Huang et al. 2019); a stage holds the residuals of all microbatches."""
    return [_alternate(shape, shape.work) for _ in range(shape.stages)]


def one_f_one_b(shape: PipelineShape, in_lockstep: bool) -> list[Order]:
    """Alternate forward and backward (Narayanan et al. 2019); with chunks the interleaved order (2021)."""
    return [_alternate(shape, _warmup(shape, in_lockstep, stage)) for stage in range(shape.stages)]


def zero_bubble(shape: PipelineShape, in_lockstep: bool) -> list[Order]:
    """1F1B with separate weight gradients (ZB-H1, Qi et al. 2023): stage s delays them by s microbatches."""
    return [_alternate(shape, _warmup(shape, in_lockstep, stage), stage) for stage in range(shape.stages)]


MAKERS: dict[str, Maker] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": one_f_one_b,
    "zero_bubble": zero_bubble,
}
"""Schedule functions by name."""


def _warmup(shape: PipelineShape, in_lockstep: bool, stage: int) -> int:
    """Forwards of a stage before its first backward."""
    remaining = shape.stages - 1 - stage
    if shape.chunks == 1 and not in_lockstep:
        return remaining + 1
    return (shape.chunks - 1) * len(_groups(shape)[0]) + 2 * remaining + 1


def _alternate(shape: PipelineShape, warmup: int, weight_delay: int | None = None) -> Order:
    """`warmup` forwards, then backward and forward alternate; a W follows its B after `weight_delay` more backwards."""
    forward, backward, weights = (_sequence(shape, kind) for kind in OP_KINDS)
    order = forward[:warmup]
    for i, op in enumerate(backward):
        order.append(op)
        if weight_delay is not None and i >= weight_delay:
            order.append(weights[i - weight_delay])
        order += forward[warmup + i : warmup + i + 1]
    return order if weight_delay is None else order + weights[max(shape.work - weight_delay, 0) :]


def _sequence(shape: PipelineShape, kind: str) -> Order:
    """All operations of a kind on a stage: for each group of microbatches, one chunk after another."""
    chunks = range(shape.chunks) if kind == "F" else range(shape.chunks)[::-1]
    return [Op(kind, m, chunk) for group in _groups(shape) for chunk in chunks for m in group]


def _groups(shape: PipelineShape) -> list[range]:
    """Groups of microbatches that visit all chunks together: P each, or more where P does not divide M, larger first.

    In a group of fewer than P the second chunk would wait for the first chunk's last stage.
    """
    n = max(shape.microbatches // shape.stages, 1)
    size, larger = divmod(shape.microbatches, n)
    starts = [i * size + min(i, larger) for i in range(n + 1)]
    return [range(a, b) for a, b in pairwise(starts)]


def lockstep(orders: Sequence[Order], shape: PipelineShape) -> Cells:
    """Ticks in which each stage runs its order as early as possible, at most one operation of each kind per tick.

    Raises ScheduleError where the orders wait for each other.
    """
    done: dict[Unit, int] = {}
    position = [0] * shape.stages
    cells: Cells = []

    def ready(unit: Unit) -> bool:
        needed = needs(unit, shape)
        return needed is None or (needed[0] in done and done[needed[0]] + needed[1] <= len(cells))

    while any(at < len(order) for at, order in zip(position, orders, strict=True)):
        row: list[tuple[Op, ...]] = []
        for stage, order in enumerate(orders):
            taken: dict[str, Op] = {}
            while position[stage] < len(order):
                op = order[position[stage]]
                if op.kind in taken or not ready(unit_of(op, stage, shape)):
                    break
                taken[op.kind] = op
                done[unit_of(op, stage, shape)] = len(cells)
                position[stage] += 1
            row.append(tuple(taken.values()))
        if not any(row):
            raise _stuck(orders, position, shape)
        cells.append(row)
    return cells


class ScheduleSpan(NamedTuple):
    """One operation and its time."""

    op: Op
    start: float
    stop: float


@dataclass(frozen=True)
class ScheduleTimeline:
    """Operations of each stage over time, one at a time, if sending takes no time."""

    spans: tuple[tuple[ScheduleSpan, ...], ...]

    @property
    def time(self) -> float:
        """Time from the first start to the last end."""
        return max(span.stop for spans in self.spans for span in spans)

    @property
    def bubble(self) -> float:
        """Share of the stages' time in which they are idle."""
        busy = sum(span.stop - span.start for spans in self.spans for span in spans)
        return 1 - busy / (self.time * len(self.spans))

    def waiting(self, stage: int, time: float) -> list[int]:
        """Microbatches in flight on a stage at `time`: forward begun before it, backward not ended by it."""
        spans = self.spans[stage]
        begun = [span.op[1:] for span in spans if span.op.kind == "F" and span.start < time]
        ended = {span.op[1:] for span in spans if span.op.kind == "B" and span.stop <= time}
        return [microbatch for microbatch, chunk in begun if (microbatch, chunk) not in ended]

    @property
    def in_flight(self) -> list[int]:
        """Largest number of microbatches in flight on each stage."""
        return [max(len(self.waiting(stage, span.stop)) for span in spans) for stage, spans in enumerate(self.spans)]


def timeline(orders: Sequence[Order], shape: PipelineShape, costs: Costs = UNIT) -> ScheduleTimeline:
    """Each stage's order executed as early as possible, one operation at a time.

    Raises ScheduleError where the orders wait for each other.
    """
    split = any(op.kind == "W" for order in orders for op in order)
    finished: dict[Unit, float] = {}
    spans: list[list[ScheduleSpan]] = [[] for _ in orders]
    progress = True
    while progress:
        progress = False
        for stage, order in enumerate(orders):
            while len(spans[stage]) < len(order):
                op = order[len(spans[stage])]
                unit = unit_of(op, stage, shape)
                needed = needs(unit, shape)
                if needed and needed[0] not in finished:
                    break
                free = spans[stage][-1].stop if spans[stage] else 0.0
                start = max(free, finished[needed[0]] if needed else 0.0)
                finished[unit] = start + costs.of(op.kind, split)
                spans[stage].append(ScheduleSpan(op, start, finished[unit]))
                progress = True
    if any(len(done) < len(order) for done, order in zip(spans, orders, strict=True)):
        raise _stuck(orders, [len(done) for done in spans], shape)
    return ScheduleTimeline(tuple(tuple(done) for done in spans))


def classic_orders(schedule: Schedule) -> list[Order]:
    """The order of each stage for `timeline`, where a stage runs one operation at a time."""
    if schedule.name in MAKERS:
        return MAKERS[schedule.name](schedule.shape, False)
    return [[op for row in schedule.cells for op in row[stage]] for stage in range(schedule.shape.stages)]


def _stuck(orders: Sequence[Order], position: Sequence[int], shape: PipelineShape) -> ScheduleError:
    waits = []
    for stage, (order, at) in enumerate(zip(orders, position, strict=True)):
        needed = needs(unit_of(order[at], stage, shape), shape) if at < len(order) else None
        if needed:
            (kind, m, q), _ = needed
            waits.append(
                f"stage {stage} at {order[at]} for {Op(kind, m, q // shape.stages)} of stage {q % shape.stages}"
            )
    return ScheduleError(f"pipeline.schedule: stages wait for each other: {'; '.join(waits)}: change their orders")


_CELL = re.compile(r"([FBW])(\d+)(?:\.(\d+))?")


def read_csv(path: Path, shape: PipelineShape) -> Cells:
    """Operations from a CSV file: one line per tick, one column per stage; lines that begin with # are comments.

    A cell holds at most one operation of each kind, such as "F3 B0": kind, microbatch, and ".chunk" where it is not 0.
    Raises ScheduleError for a file that cannot be read or has another format.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ScheduleError(f"pipeline.schedule {path}: {error.strerror}: give the path of a readable file") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
    cells: Cells = []
    for (number, _), row in zip(numbered, csv.reader(line for _, line in numbered), strict=True):
        if len(row) != shape.stages:
            raise ScheduleError(
                f"pipeline.schedule {path}, line {number}: {len(row)} columns, but mesh.pipe is {shape.stages}: "
                "write one column per stage"
            )
        cells.append([tuple(_read_op(word, path, number, stage) for word in c.split()) for stage, c in enumerate(row)])
    return cells


def _read_op(word: str, path: Path, line: int, stage: int) -> Op:
    found = _CELL.fullmatch(word)
    if not found:
        raise ScheduleError(
            f"pipeline.schedule {path}, line {line}, stage {stage}: {word!r} is not an operation: write F, B or W and "
            "a microbatch, such as F3, with .1 for chunk 1"
        )
    return Op(found[1], int(found[2]), int(found[3] or 0))


def write_csv(schedule: Schedule) -> str:
    """The text that `read_csv` reads, as a start for a custom schedule."""
    rows = [",".join(" ".join(map(str, ops)) for ops in row) for row in schedule.cells]
    # An idle tick of a pipeline of one stage would be an empty line, which `read_csv` skips.
    return "".join(f"{row or ' '}\n" for row in rows)
