"""A pipeline's schedule: tables and plots as text, and one SVG document."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from jaxtrain.pipeline.table import OP_KINDS, Op
from jaxtrain.report.tables import FittedTable, format_range, print_lines

if TYPE_CHECKING:
    from jaxtrain.inspect import ScheduleInspection

OP_STYLES = {"F": "cyan", "B": "yellow", "W": "green"}
OP_COLOURS = {"F": "#5b8ff9", "B": "#f6a04d", "W": "#5ad8a6"}
BUFFER_LABELS = {
    "input": "input",
    "kept": "residuals",
    "cotangent": "cotangent",
    "stored": "residuals of weight gradients",
}
PLOT_WIDTH, LANE = 1200, 18


def print_schedule(plan: ScheduleInspection, console: Console) -> None:
    """Print stages, memory and both plots."""
    for table in (_stage_table(plan), _memory_table(plan)):
        console.print(table)
    for sentence in schedule_sentences(plan):
        print_lines(console, sentence)
    for title, rows in (
        ("one thing at a time", _classic_rows(plan)),
        ("ticks of the executor", _tick_rows(plan)),
    ):
        print_lines(console, f"\n{title}:", style="bold")
        for line in _fold(rows, console.width):
            console.print(line, highlight=False, no_wrap=True, crop=True)


def schedule_sentences(plan: ScheduleInspection) -> list[str]:
    """The numbers of the schedule in words."""
    schedule, (P, v, M) = plan.schedule, plan.schedule.shape
    phases = ", ".join(f"{phase.stop - phase.start} of {phase.kinds}" for phase in schedule.phases)
    chunks = f" in {v} chunks" if v > 1 else ""
    again = " (each backward recomputes its stage)" if plan.costs.recompute else ""
    return [
        f"{schedule.name}: {P} stages{chunks}, {M} microbatches, {schedule.ticks} ticks ({phases})",
        f"bubble: {plan.formula:.1%} by (P-1)/(vM+P-1), {schedule.bubble(plan.costs):.1%} of the executor's ticks, "
        f"{plan.classic.bubble:.1%} of stages that do one thing at a time",
        f"time of a step: {schedule.time(plan.costs) / v:g} forwards of a stage in the executor{again}, "
        f"{plan.classic.time / v:g} of stages that do one thing at a time",
    ]


def schedule_svg(plan: ScheduleInspection) -> str:
    """Both plots as one SVG document."""
    P = plan.schedule.shape.stages
    kinds = [kind for kind in OP_KINDS if plan.schedule.ticks_with(kind)]
    parts, y = [_text(0, 14, line) for line in schedule_sentences(plan)[:1]], 40
    parts.append(_text(0, y, f"one thing at a time: bubble {plan.classic.bubble:.1%}"))
    scale = (PLOT_WIDTH - 70) / plan.classic.time
    for stage, spans in enumerate(plan.classic.spans):
        top = y + 8 + stage * (LANE + 4)
        parts.append(_text(0, top + 13, f"stage {stage}"))
        parts += [_box(70 + s.start * scale, top, (s.stop - s.start) * scale, s.op) for s in spans]
    y += 8 + P * (LANE + 4) + 28
    parts.append(_text(0, y, f"ticks of the executor: bubble {plan.schedule.bubble(plan.costs):.1%}"))
    scale = (PLOT_WIDTH - 70) / plan.schedule.ticks
    height = len(kinds) * LANE + 6
    for stage in range(P):
        top = y + 8 + stage * height
        parts.append(_text(0, top + 13, f"stage {stage}"))
        parts += [
            _box(70 + tick * scale, top + kinds.index(op.kind) * LANE, scale, op)
            for tick, row in enumerate(plan.schedule.cells)
            for op in row[stage]
        ]
    body = "\n".join(parts)
    size = f"0 0 {PLOT_WIDTH} {y + 8 + P * height}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" font-family="system-ui, sans-serif" '
        f'font-size="11">\n<rect width="100%" height="100%" fill="#fff"/>\n{body}\n</svg>\n'
    )


def _stage_table(plan: ScheduleInspection) -> FittedTable:
    rows = [
        [
            str(stage),
            ", ".join(f"{run[0]}-{run[-1]}" for run in plan.layers(stage)),
            format_range(plan.nodes(stage)),
            *map(str, counts),
        ]
        for stage, counts in enumerate(zip(plan.classic.in_flight, plan.schedule.in_flight, strict=True))
    ]
    return FittedTable(["stage", "layers", "nodes", "in flight: classic", "in flight: executor"], rows, "Stages")


def _memory_table(plan: ScheduleInspection) -> FittedTable:
    rows = []
    for name, count in plan.slots.items():
        if count:
            size = plan.slot_bytes.get(name)
            rows.append([BUFFER_LABELS[name], str(count), *(f"{n * size:,}" if size else "-" for n in (1, count))])
    return FittedTable(
        ["buffer", "slots", "bytes of a slot", "bytes a device"], rows, "Memory of a stage between ticks"
    )


def _classic_rows(plan: ScheduleInspection) -> list[tuple[str, list[tuple[str, str]]]]:
    rows = []
    for stage, spans in enumerate(plan.classic.spans):
        line = [("·", "")] * round(plan.classic.time)
        for span in spans:
            for at in range(round(span.start), round(span.stop)):
                line[at] = (str(span.op) if at == span.start else "-", span.op.kind)
        rows.append((f"stage {stage}", line))
    return rows


def _tick_rows(plan: ScheduleInspection) -> list[tuple[str, list[tuple[str, str]]]]:
    rows = []
    for stage, kind in ((s, k) for s in range(plan.schedule.shape.stages) for k in OP_KINDS):
        if plan.schedule.ticks_with(kind):
            cells = [next((op for op in row[stage] if op.kind == kind), None) for row in plan.schedule.cells]
            name = f"stage {stage}" if kind == "F" else ""
            rows.append((name, [(str(op), kind) if op else ("·", "") for op in cells]))
    return rows


def _fold(rows: list[tuple[str, list[tuple[str, str]]]], width: int) -> Iterator[Text]:
    """Lines of cells, in blocks that fit the width; each block repeats the names and names its first tick."""
    name = max(len(label) for label, _ in rows) + 1
    cell = max(len(text) for _, line in rows for text, _ in line) + 1
    fit = max((width - name) // cell, 1)
    for first in range(0, len(rows[0][1]), fit):
        if first:
            yield Text(f"\nfrom {first} on:", style="dim")
        for label, line in rows:
            out = Text(label.ljust(name))
            for text, kind in line[first : first + fit]:
                out.append(text.ljust(cell), OP_STYLES.get(kind, "dim"))
            yield out


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _box(x: float, y: float, width: float, op: Op) -> str:
    """A box for one operation; later chunks are paler, and a name that does not fit is only in the tooltip."""
    opacity = max(1 - 0.3 * op.chunk, 0.25)
    label = f"{op.microbatch}" + (f".{op.chunk}" if op.chunk else "")
    shown = _text(x + 2, y + 13, label) if width > 7 * len(label) else ""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{LANE - 1}"'
    fill = f'fill="{OP_COLOURS[op.kind]}" fill-opacity="{opacity:.2f}" stroke="#fff" stroke-width="0.5"'
    return f"<g><title>{escape(str(op))}</title><rect {place} {fill}/>{shown}</g>"
