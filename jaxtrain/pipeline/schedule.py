"""Makers of pipeline schedules, and the two ways to read what they make. Numpy alone; words as in table.py.

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
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from jaxtrain.config import ConfigError, PipelineConfig, nearest
from jaxtrain.pipeline.table import (
    KINDS,
    UNIT,
    Cells,
    Costs,
    Op,
    Phase,
    PipelineShape,
    Schedule,
    ScheduleError,
    Unit,
    build,
    needs,
    unit_of,
    validate,
)

__all__ = [
    "MAKERS",
    "UNIT",
    "Costs",
    "Maker",
    "Op",
    "Order",
    "Phase",
    "PipelineShape",
    "Schedule",
    "ScheduleError",
    "ScheduleSpan",
    "ScheduleTimeline",
    "classic_orders",
    "forward_schedule",
    "lockstep",
    "make_schedule",
    "read_csv",
    "schedule_shape",
    "timeline",
    "validate",
    "write_csv",
]  # fmt: skip

Order = list[Op]
"""What one stage does, in order."""
Maker = Callable[[PipelineShape, bool], list[Order]]
"""(shape, in lockstep) -> the order of each stage. In lockstep what is sent travels one stage a tick, and a tick holds
an F and a B: hiding the way back takes twice the microbatches that it takes where a stage does one thing at a time."""


def schedule_shape(pipeline: PipelineConfig, stages: int, accumulation: int) -> PipelineShape:
    """Sizes of a run's pipeline: its microbatches are the accumulation.

    Raises ConfigError where pipeline.microbatches says another number.
    """
    if pipeline.microbatches not in (None, accumulation):
        raise ConfigError(
            f"pipeline.microbatches {pipeline.microbatches} is not train.accumulation {accumulation}, and both are the "
            "microbatches of an update: set one of them, or both alike"
        )
    return PipelineShape(stages, pipeline.chunks or (2 if pipeline.schedule == "interleaved" else 1), accumulation)


def make_schedule(schedule: str | Maker, shape: PipelineShape) -> Schedule:
    """The checked table of a schedule by name (a key of MAKERS), of a CSV file, or of a maker of one's own.

    Raises ScheduleError for an unknown name, an unreadable file, or an order of work that cannot run.
    """
    if callable(schedule):
        return build(getattr(schedule, "__name__", "schedule"), lockstep(schedule(shape, True), shape), shape)
    if schedule in MAKERS:
        return build(schedule, lockstep(MAKERS[schedule](shape, True), shape), shape)
    if not schedule.endswith(".csv"):
        raise ScheduleError(
            f"pipeline.schedule {schedule!r} is unknown{nearest(schedule, MAKERS)}; "
            f"use {', '.join(MAKERS)}, or a file that ends in .csv"
        )
    return build(schedule, read_csv(Path(schedule), shape), shape)


def forward_schedule(shape: PipelineShape) -> Schedule:
    """Forward work alone, filling and draining the pipeline once: what evaluation runs."""
    orders = [_sequence(shape, "F") for _ in range(shape.stages)]
    return build("forward", lockstep(orders, shape), shape, training=False)


def gpipe(shape: PipelineShape, in_lockstep: bool) -> list[Order]:
    """All microbatches forward, then all back (Huang et al. 2019); a stage keeps all its inputs."""
    return [_alternate(shape, shape.work) for _ in range(shape.stages)]


def one_f_one_b(shape: PipelineShape, in_lockstep: bool) -> list[Order]:
    """A forward and a backward in turn (Narayanan et al. 2019); with chunks the interleaved order (2021)."""
    return [_alternate(shape, _warm(shape, in_lockstep, stage)) for stage in range(shape.stages)]


def zero_bubble(shape: PipelineShape, in_lockstep: bool) -> list[Order]:
    """1F1B with the backward of weights apart (ZB-H1, Qi et al. 2023): stage s puts it off by s microbatches."""
    return [_alternate(shape, _warm(shape, in_lockstep, stage), stage) for stage in range(shape.stages)]


MAKERS: dict[str, Maker] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": one_f_one_b,
    "zero_bubble": zero_bubble,
}
"""Schedules by name: a new one is a row."""


def _warm(shape: PipelineShape, in_lockstep: bool, stage: int) -> int:
    """Forwards of a stage before its first backward."""
    behind = shape.stages - 1 - stage
    if shape.chunks == 1 and not in_lockstep:
        return behind + 1
    return (shape.chunks - 1) * len(_groups(shape)[0]) + 2 * behind + 1


def _alternate(shape: PipelineShape, warm: int, weights_later: int | None = None) -> Order:
    """`warm` forwards, then a backward and a forward in turn; a weights' backward comes `weights_later` turns later."""
    forward, backward, weights = (_sequence(shape, kind) for kind in KINDS)
    order = forward[:warm]
    for i, op in enumerate(backward):
        order.append(op)
        if weights_later is not None and i >= weights_later:
            order.append(weights[i - weights_later])
        order += forward[warm + i : warm + i + 1]
    return order if weights_later is None else order + weights[max(shape.work - weights_later, 0) :]


def _sequence(shape: PipelineShape, kind: str) -> Order:
    """All work of a kind on a stage: a group of microbatches at a time, each chunk of them in turn."""
    chunks = range(shape.chunks) if kind == "F" else range(shape.chunks)[::-1]
    return [Op(kind, m, chunk) for group in _groups(shape) for chunk in chunks for m in group]


def _groups(shape: PipelineShape) -> list[range]:
    """Microbatches that visit all chunks together, the larger groups first: P each, or more where P does not divide M.

    A group of fewer than P would leave its second chunk waiting for the first to come round.
    """
    n = max(shape.microbatches // shape.stages, 1)
    size, larger = divmod(shape.microbatches, n)
    starts = [i * size + min(i, larger) for i in range(n + 1)]
    return [range(a, b) for a, b in pairwise(starts)]


def lockstep(orders: Sequence[Order], shape: PipelineShape) -> Cells:
    """Ticks of stages that each work in order, as early as possible, with one piece of each kind a tick.

    Raises ScheduleError where the orders wait for each other.
    """
    done: dict[Unit, int] = {}
    next_of = [0] * shape.stages
    cells: Cells = []

    def ready(unit: Unit) -> bool:
        needed = needs(unit, shape)
        return needed is None or (needed[0] in done and done[needed[0]] + needed[1] <= len(cells))

    while any(at < len(order) for at, order in zip(next_of, orders, strict=True)):
        row: list[tuple[Op, ...]] = []
        for stage, order in enumerate(orders):
            taken: dict[str, Op] = {}
            while next_of[stage] < len(order):
                op = order[next_of[stage]]
                if op.kind in taken or not ready(unit_of(op, stage, shape)):
                    break
                taken[op.kind] = op
                done[unit_of(op, stage, shape)] = len(cells)
                next_of[stage] += 1
            row.append(tuple(taken.values()))
        if not any(row):
            raise _stuck(orders, next_of, shape)
        cells.append(row)
    return cells


class ScheduleSpan(NamedTuple):
    """One piece of work in time."""

    op: Op
    start: float
    stop: float


@dataclass(frozen=True)
class ScheduleTimeline:
    """What each stage does when, if it does one thing at a time and sending takes no time."""

    spans: tuple[tuple[ScheduleSpan, ...], ...]

    @property
    def time(self) -> float:
        """From the first start to the last end."""
        return max(span.stop for spans in self.spans for span in spans)

    @property
    def bubble(self) -> float:
        """Share of the stages' time in which they wait."""
        busy = sum(span.stop - span.start for spans in self.spans for span in spans)
        return 1 - busy / (self.time * len(self.spans))

    def waiting(self, stage: int, time: float) -> list[int]:
        """Microbatches in flight on a stage: forward begun before `time`, backward not ended by then."""
        spans = self.spans[stage]
        begun = [span.op[1:] for span in spans if span.op.kind == "F" and span.start < time]
        ended = {span.op[1:] for span in spans if span.op.kind == "B" and span.stop <= time}
        return [microbatch for microbatch, chunk in begun if (microbatch, chunk) not in ended]

    @property
    def in_flight(self) -> list[int]:
        """Most microbatches in flight on each stage at once."""
        return [max(len(self.waiting(stage, span.stop)) for span in spans) for stage, spans in enumerate(self.spans)]


def timeline(orders: Sequence[Order], shape: PipelineShape, costs: Costs = UNIT) -> ScheduleTimeline:
    """Each stage's order played as early as possible, one piece of work at a time.

    Raises ScheduleError where the orders wait for each other.
    """
    split = any(op.kind == "W" for order in orders for op in order)
    finished: dict[Unit, float] = {}
    spans: list[list[ScheduleSpan]] = [[] for _ in orders]
    moved = True
    while moved:
        moved = False
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
                moved = True
    if any(len(done) < len(order) for done, order in zip(spans, orders, strict=True)):
        raise _stuck(orders, [len(done) for done in spans], shape)
    return ScheduleTimeline(tuple(tuple(done) for done in spans))


def classic_orders(schedule: Schedule) -> list[Order]:
    """What each stage does in order where it does one thing at a time: what `timeline` plays."""
    if schedule.name in MAKERS:
        return MAKERS[schedule.name](schedule.shape, False)
    return [[op for row in schedule.cells for op in row[stage]] for stage in range(schedule.shape.stages)]


def _stuck(orders: Sequence[Order], next_of: Sequence[int], shape: PipelineShape) -> ScheduleError:
    waits = []
    for stage, (order, at) in enumerate(zip(orders, next_of, strict=True)):
        needed = needs(unit_of(order[at], stage, shape), shape) if at < len(order) else None
        if needed:
            (kind, m, q), _ = needed
            waits.append(
                f"stage {stage} at {order[at]} for {Op(kind, m, q // shape.stages)} of stage {q % shape.stages}"
            )
    return ScheduleError(f"pipeline.schedule: stages wait for each other: {'; '.join(waits)}: change their orders")


_CELL = re.compile(r"([FBW])(\d+)(?:\.(\d+))?")


def read_csv(path: Path, shape: PipelineShape) -> Cells:
    """What runs where, from a file with a line a tick and a column a stage; lines that begin with # are left out.

    A cell holds at most one piece of work of each kind, "F3 B0" say: kind, microbatch, and ".chunk" where it is not 0.
    Raises ScheduleError for a file that cannot be read so.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ScheduleError(f"pipeline.schedule {path}: {error.strerror}: name a file that can be read") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip() and not line.startswith("#")]
    cells: Cells = []
    for (number, _), row in zip(numbered, csv.reader(line for _, line in numbered), strict=True):
        if len(row) != shape.stages:
            raise ScheduleError(
                f"pipeline.schedule {path}, line {number}: {len(row)} columns, but mesh.pipe is {shape.stages}: "
                "a column is a stage"
            )
        cells.append([tuple(_read_op(word, path, number, stage) for word in c.split()) for stage, c in enumerate(row)])
    return cells


def _read_op(word: str, path: Path, line: int, stage: int) -> Op:
    found = _CELL.fullmatch(word)
    if not found:
        raise ScheduleError(
            f"pipeline.schedule {path}, line {line}, stage {stage}: {word!r} is no piece of work: write F, B or W and "
            "a microbatch, F3 say, with .1 for chunk 1"
        )
    return Op(found[1], int(found[2]), int(found[3] or 0))


def write_csv(schedule: Schedule) -> str:
    """The text that `read_csv` reads: a start for a schedule of one's own."""
    rows = [",".join(" ".join(map(str, ops)) for ops in row) for row in schedule.cells]
    # A line of a pipeline of one stage that idles would be empty, and an empty line is no tick.
    return "".join(f"{row or ' '}\n" for row in rows)
