"""What a run's pipeline will do, drawn: tables and pictures as text, and as SVG for a file or a notebook.

from jaxtrain.config import load_config
from jaxtrain.pipeline.show import show_schedule
show_schedule(load_config("llama3_8b_pipe"))
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxtrain.config import ConfigError, RunConfig
from jaxtrain.inspect import Inspection, inspect
from jaxtrain.mesh.rules import resolve_rules
from jaxtrain.nn.model import build
from jaxtrain.numerics.precision import Precision
from jaxtrain.pipeline.schedule import (
    Op,
    Schedule,
    ScheduleTimeline,
    classic_orders,
    timeline,
)
from jaxtrain.pipeline.split import StageSplit, split_stages
from jaxtrain.pipeline.table import OP_KINDS, Costs
from jaxtrain.train.batch import BatchShape
from jaxtrain.train.resolve import resolve

STYLES = {"F": "cyan", "B": "yellow", "W": "green"}
COLOURS = {"F": "#5b8ff9", "B": "#f6a04d", "W": "#5ad8a6"}
WIDTH, LANE = 1200, 18


def show_schedule(config: RunConfig, devices: int | None = None, cluster: str | None = None) -> Picture:
    """The schedule of a configuration, on the devices that `inspect` would lay it on; raises ConfigError as training.

    Shown by a notebook as it is; `print` and `svg` give text and a picture.
    """
    one = inspect(config, devices, cluster)
    stages = one.topology.sizes["pipe"]
    if stages == 1:
        raise ConfigError("mesh.pipe is 1: there is no pipeline to show; set mesh.pipe to the number of stages")
    resolved = resolve(one.config, one.topology)
    assert resolved.schedule is not None
    split = split_stages(build(one.config.model), one.config.pipeline, stages, resolved.schedule.shape.chunks)
    return Picture(one, resolved.batch_shape, resolved.schedule, split)


@dataclass(frozen=True, eq=False)
class Picture:
    """A schedule with what it means for a run: layers and nodes of each stage, time, memory."""

    laid: Inspection
    batch_shape: BatchShape
    schedule: Schedule
    split: StageSplit

    @cached_property
    def classic(self) -> ScheduleTimeline:
        """The schedule played by stages that do one thing at a time, nothing recomputed."""
        return timeline(classic_orders(self.schedule), self.schedule.shape)

    @property
    def costs(self) -> Costs:
        """Time of a chunk's pieces of work: its backward computes layers again from their inputs, save under dots."""
        return Costs(1, 1, 1, 0 if self.laid.config.remat.policy == "dots" else 1)

    @property
    def formula(self) -> float:
        """(P-1)/(vM+P-1), the bubble of a schedule whose backward is not split."""
        P, v, M = self.schedule.shape
        return (P - 1) / (v * M + P - 1)

    @cached_property
    def slot_bytes(self) -> dict[str, int]:
        """Bytes a device of one slot: residual streams of a microbatch, one a layer (of remat.every) where it is kept.

        Not among them: what remat.policy dots or names keeps beside, and what goes from one half of a split backward to
        the other; the operations of a layer say it.
        """
        config, sizes = self.laid.config, self.laid.topology.sizes
        rules = resolve_rules(config.rules)
        shards = math.prod(sizes[axis] for name in ("residual_seq", "hidden") for axis in rules.axes(name))
        positions = self.batch_shape.microbatch * config.data.seq_len
        stream = positions * config.model.d_model * Precision(config.precision).compute.itemsize // shards
        layers = len(self.split.pattern) // config.remat.every
        return {"input": stream, "kept": stream * layers, "cotangent": stream}

    @property
    def slots(self) -> dict[str, int]:
        """Slots of each buffer on a stage."""
        s = self.schedule
        counts = (s.input_slots, s.residual_slots, s.cotangent_slots, s.weight_residual_slots)
        return dict(zip(("input", "kept", "cotangent", "stored"), counts, strict=True))

    def layers(self, stage: int) -> list[range]:
        """Layers of each chunk of a stage."""
        return self.split.runs[stage :: self.schedule.shape.stages]

    def nodes(self, stage: int) -> list[int]:
        """Nodes (processes) that a stage lies on."""
        return sorted({int(device.process_index) for device in self.laid.topology.devices[:, stage].ravel()})

    def to_json(self) -> dict[str, Any]:
        """Plain values: sizes, times, bubbles, memory, stages, and the table by tick and stage."""
        schedule, classic = self.schedule, self.classic
        P, v, M = schedule.shape
        return {
            "schedule": schedule.name,
            "stages": P,
            "chunks": v,
            "microbatches": M,
            "ticks": schedule.ticks,
            "phases": [phase._asdict() for phase in schedule.phases],
            "bubble": {"formula": self.formula, "executor": schedule.bubble(self.costs), "classic": classic.bubble},
            "time": {"executor": schedule.time(self.costs), "classic": classic.time},
            "in_flight": {"executor": schedule.in_flight, "classic": classic.in_flight},
            "slots": self.slots,
            "slot_bytes": self.slot_bytes,
            "layers": [[list(run) for run in self.layers(stage)] for stage in range(P)],
            "nodes": [self.nodes(stage) for stage in range(P)],
            "table": [[" ".join(map(str, ops)) for ops in row] for row in schedule.cells],
        }

    def print(self, console: Console | None = None) -> None:
        """Print tables and pictures."""
        console = console or Console()
        for table in (self._stage_table(), self._memory_table()):
            console.print(table)
        for sentence in self.sentences():
            console.print(sentence, markup=False, highlight=False)
        for title, rows in (
            ("one thing at a time", self._classic_rows()),
            ("ticks of the executor", self._tick_rows()),
        ):
            console.print(f"\n{title}:", style="bold", highlight=False)
            for line in _fold(rows, console.width):
                console.print(line, highlight=False, no_wrap=True, crop=True)

    def sentences(self) -> list[str]:
        """The numbers of the schedule in words."""
        schedule, (P, v, M) = self.schedule, self.schedule.shape
        phases = ", ".join(f"{phase.stop - phase.start} of {phase.kinds}" for phase in schedule.phases)
        chunks = f" in {v} chunks" if v > 1 else ""
        again = " (it computes a stage again before going back)" if self.costs.recompute else ""
        return [
            f"{schedule.name}: {P} stages{chunks}, {M} microbatches, {schedule.ticks} ticks ({phases})",
            f"bubble: {self.formula:.1%} by (P-1)/(vM+P-1), {schedule.bubble(self.costs):.1%} of the executor's ticks, "
            f"{self.classic.bubble:.1%} of stages that do one thing at a time",
            f"time of an update: {schedule.time(self.costs) / v:g} forwards of a stage in the executor{again}, "
            f"{self.classic.time / v:g} of stages that do one thing at a time",
        ]

    def svg(self) -> str:
        """Both pictures as one SVG document."""
        P = self.schedule.shape.stages
        kinds = [kind for kind in OP_KINDS if self.schedule.ticks_with(kind)]
        parts, y = [_text(0, 14, line) for line in self.sentences()[:1]], 40
        parts.append(_text(0, y, f"one thing at a time: bubble {self.classic.bubble:.1%}"))
        scale = (WIDTH - 70) / self.classic.time
        for stage, spans in enumerate(self.classic.spans):
            top = y + 8 + stage * (LANE + 4)
            parts.append(_text(0, top + 13, f"stage {stage}"))
            parts += [_box(70 + s.start * scale, top, (s.stop - s.start) * scale, s.op) for s in spans]
        y += 8 + P * (LANE + 4) + 28
        parts.append(_text(0, y, f"ticks of the executor: bubble {self.schedule.bubble(self.costs):.1%}"))
        scale = (WIDTH - 70) / self.schedule.ticks
        height = len(kinds) * LANE + 6
        for stage in range(P):
            top = y + 8 + stage * height
            parts.append(_text(0, top + 13, f"stage {stage}"))
            parts += [
                _box(70 + tick * scale, top + kinds.index(op.kind) * LANE, scale, op)
                for tick, row in enumerate(self.schedule.cells)
                for op in row[stage]
            ]
        body = "\n".join(parts)
        size = f"0 0 {WIDTH} {y + 8 + P * height}"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" font-family="system-ui, sans-serif" '
            f'font-size="11">\n<rect width="100%" height="100%" fill="#fff"/>\n{body}\n</svg>\n'
        )

    def _repr_svg_(self) -> str:
        return self.svg()

    def _stage_table(self) -> Table:
        table = Table("stage", "layers", "nodes", "in flight: classic", "executor", title="Stages")
        for stage, counts in enumerate(zip(self.classic.in_flight, self.schedule.in_flight, strict=True)):
            runs = ", ".join(f"{run[0]}-{run[-1]}" for run in self.layers(stage))
            table.add_row(str(stage), runs, ", ".join(map(str, self.nodes(stage))), *map(str, counts))
        return table

    def _memory_table(self) -> Table:
        table = Table("buffer", "slots", "bytes of a slot", "bytes a device", title="What a stage holds between ticks")
        for name, count in self.slots.items():
            if count:
                size = self.slot_bytes.get(name)
                table.add_row(name, str(count), *(f"{n * size:,}" if size else "-" for n in (1, count)))
        return table

    def _classic_rows(self) -> list[tuple[str, list[tuple[str, str]]]]:
        rows = []
        for stage, spans in enumerate(self.classic.spans):
            line = [("·", "")] * round(self.classic.time)
            for span in spans:
                for at in range(round(span.start), round(span.stop)):
                    line[at] = (str(span.op) if at == span.start else "-", span.op.kind)
            rows.append((f"stage {stage}", line))
        return rows

    def _tick_rows(self) -> list[tuple[str, list[tuple[str, str]]]]:
        rows = []
        for stage, kind in ((s, k) for s in range(self.schedule.shape.stages) for k in OP_KINDS):
            if self.schedule.ticks_with(kind):
                cells = [next((op for op in row[stage] if op.kind == kind), None) for row in self.schedule.cells]
                name = f"stage {stage}" if kind == "F" else ""
                rows.append((name, [(str(op), kind) if op else ("·", "") for op in cells]))
        return rows


def _fold(rows: list[tuple[str, list[tuple[str, str]]]], width: int) -> Iterator[Text]:
    """Lines of cells, in blocks that fit the width."""
    name = max(len(label) for label, _ in rows) + 1
    cell = max(len(text) for _, line in rows for text, _ in line) + 1
    fit = max((width - name) // cell, 1)
    for first in range(0, len(rows[0][1]), fit):
        if first:
            yield Text("")
        for label, line in rows:
            out = Text(label.ljust(name))
            for text, kind in line[first : first + fit]:
                out.append(text.ljust(cell), STYLES.get(kind, "dim"))
            yield out


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _box(x: float, y: float, width: float, op: Op) -> str:
    """A piece of work; later chunks are paler, and its name is left out where there is no room."""
    opacity = max(1 - 0.3 * op.chunk, 0.25)
    label = f"{op.microbatch}" + (f".{op.chunk}" if op.chunk else "")
    shown = _text(x + 2, y + 13, label) if width > 7 * len(label) else ""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{LANE - 1}"'
    fill = f'fill="{COLOURS[op.kind]}" fill-opacity="{opacity:.2f}" stroke="#fff" stroke-width="0.5"'
    return f"<g><title>{escape(str(op))}</title><rect {place} {fill}/>{shown}</g>"
