"""A report as one self-contained HTML page: memory bar, collectives, mesh over nodes, timeline of a layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import numpy as np

from jaxtrain.program.report import GIB, ProgramReport
from jaxtrain.program.timeline import LayerTimeline
from jaxtrain.report.compiled import (
    LEGEND,
    TRAFFIC_HEADS,
    fit_line,
    flops_rows,
    headline,
    operation,
    options,
    proof_lines,
    resharding_lines,
    source_lines,
    traffic_rows,
)
from jaxtrain.report.tables import gib

PAGE_WIDTH = 1000
LANES = {"matmul": "matmuls", "fast": "inside a domain", "network": "across domains"}
LANE_COLOURS = {"matmul": "#4c72b0", "fast": "#55a868", "network": "#dd8452"}
PALETTE = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c", "#ccb974", "#64b5cd")
REST, GAP, FREE = "#b0b0b0", "#d0d0d0", "#eeeeee"
PAGE_NODES_SHOWN = 16
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; max-width: 1080px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.4em } h2 { font-size: 1.1em; margin-top: 2em }
table { border-collapse: collapse; font-size: 13px } td, th { padding: 3px 10px 3px 0; text-align: left }
th { border-bottom: 1px solid #999 } td { border-bottom: 1px solid #e4e4e4 } td.n, th.n { text-align: right }
.yes { color: #1a7f37 } .no { color: #b42318; font-weight: bold } .dim { color: #666; font-size: 13px }
svg { width: 100%; height: auto } svg text { font: 12px system-ui, sans-serif; fill: #222 }
"""


def write_page(report: ProgramReport, path: Path) -> None:
    """Write the page; it needs no other file and no network."""
    path.write_text(page(report), encoding="utf-8")


def page(report: ProgramReport) -> str:
    """The page as text."""
    buffers = [
        [gib(one.bytes), one.shape, operation(one.op_name) or one.name, one.source] for one in report.memory.largest
    ]
    proof = "".join(
        f'<p class="{"yes" if report.proof.holds else "no"}">{escape(line)}</p>' for line in proof_lines(report)
    )
    notes = [*report.notes, *(f"not understood, not counted: {what} ({where})" for what, where in report.unknown)]
    timelines = (
        "".join(f"<p>{escape(_caption(line))}</p>{timeline_svg(line)}" for line in report.timelines)
        or "<p>No loop of layers in this program.</p>"
    )
    fit = "no" if report.memory.fits is False else "yes"
    title = f"{report.config['model']['n_layers']} layers on {report.cluster}"
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style></head><body>
<h1>{escape(headline(report))}</h1>
<p class="{fit}">{escape(fit_line(report))}</p>
{proof}
<h2>Memory of a device at the peak</h2>{memory_svg(report)}
{_table(["GiB", "array", "made by", "line"], buffers, (0,))}
<h2>FLOPs of a device, an update</h2>{_table(["", "TFLOP"], flops_rows(report), (1,))}
<h2>Collectives of a device, an update</h2>
<p>{report.reductions.calls} gradient reductions, {gib(report.reductions.bytes)} GiB</p>
{_table(TRAFFIC_HEADS, traffic_rows(report), (4, 5, 6, 7, 8))}
{_list(source_lines(report))}
<p class="dim">{escape(LEGEND)}</p>
<h2>Mesh over nodes</h2>{mesh_svg(report)}
<h2>One layer</h2>{timelines}
<p class="dim">Matmuls at the card's peak, transfers at the links' published speed, in scheduled order. A picture of the
schedule, not a forecast: what is no matmul takes no time here.</p>
<h2>What the partitioner had to invent</h2>{_list(resharding_lines(report))}
<h2>Compilation</h2>{
        _list(
            [
                f"traced in {report.trace_seconds:.1f} s, compiled in {report.compile_seconds:.1f} s",
                options(report),
                *notes,
            ]
        )
    }
</body></html>
"""


def memory_svg(report: ProgramReport) -> str:
    """The peak's largest buffers as one bar on the scale of the card."""
    memory = report.memory
    whole = max(memory.peak, memory.card or 0)
    parts: list[tuple[str, int, str]] = [
        (f"{operation(one.op_name) or one.name} {one.source}", one.bytes, PALETTE[i % len(PALETTE)])
        for i, one in enumerate(memory.largest)
    ]
    parts.append(("everything smaller", max(memory.live - sum(size for _, size, _ in parts), 0), REST))
    parts.append(("unused between buffers", max(memory.peak - memory.live, 0), GAP))
    out, at = [_rect(0, 8, PAGE_WIDTH, 40, FREE, "free")], 0.0
    for label, size, colour in parts:
        width = PAGE_WIDTH * size / whole
        out.append(_rect(at, 8, width, 40, colour, f"{gib(size)} GiB: {label}"))
        at += width
    for name, marked, y in (("peak", memory.peak, 66), ("card", memory.card, 82)):
        if marked is not None:
            x = PAGE_WIDTH * marked / whole
            out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{y - 10}" stroke="#222" stroke-width="1.5"/>')
            anchor = "end" if x > PAGE_WIDTH / 2 else "start"
            out.append(f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{name} {marked / GIB:.2f} GiB</text>')
    return _svg(90, out)


def mesh_svg(report: ProgramReport) -> str:
    """Nodes as boxes of devices; colour is the tensor x expert group, text the other coordinates."""
    axes = list(report.sizes)
    tight = [axes.index(axis) for axis in ("tensor", "expert")]
    nodes = sorted(set(report.nodes.ravel().tolist()))
    index = {
        node: [tuple(map(int, place)) for place in np.argwhere(report.nodes == node)]
        for node in nodes[:PAGE_NODES_SHOWN]
    }
    columns = 4
    per_row = min(4, max(len(places) for places in index.values()))
    cell, gap, height = 46, 12, 0
    box_width = PAGE_WIDTH / columns
    out: list[str] = []
    colours: dict[tuple[int, ...], str] = {}
    box_height = 26 + cell * -(-max(len(places) for places in index.values()) // per_row) + gap
    for i, (node, places) in enumerate(index.items()):
        left, top = (i % columns) * box_width, (i // columns) * box_height
        height = max(height, int(top + box_height))
        domain = sorted({int(report.domain[place]) for place in places})
        out.append(
            f'<text x="{left + 4:.0f}" y="{top + 15:.0f}">node {node}, domain {", ".join(map(str, domain))}</text>'
        )
        for j, place in enumerate(places):
            group = tuple(n for k, n in enumerate(place) if k not in tight)
            colour = colours.setdefault(group, PALETTE[len(colours) % len(PALETTE)])
            x, y = left + 4 + (j % per_row) * cell, top + 22 + (j // per_row) * cell
            told = ", ".join(
                f"{axis} {n}" for axis, n, size in zip(axes, place, report.domain.shape, strict=True) if size > 1
            )
            out.append(_rect(x, y, cell - 4, cell - 4, colour, told or "the device"))
            used = [f"{axis[0]}{n}" for axis, n, size in zip(axes, place, report.domain.shape, strict=True) if size > 1]
            for line, text in enumerate(used[:3]):
                out.append(f'<text x="{x + 4:.0f}" y="{y + 13 + 13 * line:.0f}" style="fill:#fff">{text}</text>')
    hidden = len(nodes) - len(index)
    more = f'<p class="dim">and {hidden} more nodes</p>' if hidden else ""
    legend = '<p class="dim">One colour: one tensor x expert group.</p>'
    return _svg(height, out) + more + legend


def timeline_svg(line: LayerTimeline) -> str:
    """Three lanes: matmuls, transfers inside a domain, transfers across."""
    total = max([line.total, *(span.end for span in line.spans)]) or 1.0
    left, height = 120, 34
    scale = (PAGE_WIDTH - left) / total
    out = []
    for i, (lane, name) in enumerate(LANES.items()):
        y = 6 + i * height
        out.append(f'<text x="0" y="{y + 17}">{name}</text>')
        out.append(_rect(left, y, PAGE_WIDTH - left, height - 8, FREE, ""))
        for span in line.spans:
            if span.lane == lane:
                told = f"{(span.end - span.begin) * 1e6:.0f} us: {span.label}"
                width = max((span.end - span.begin) * scale, 0.5)
                out.append(_rect(left + span.begin * scale, y, width, height - 8, LANE_COLOURS[lane], told))
    y = 6 + len(LANES) * height + 10
    out.append(f'<text x="{left}" y="{y}">0</text>')
    out.append(f'<text x="{PAGE_WIDTH}" y="{y}" text-anchor="end">{total * 1e3:.2f} ms</text>')
    return _svg(y + 8, out)


def _caption(line: LayerTimeline) -> str:
    busy = line.matmul / line.total if line.total else 1.0
    return f"{line.title}, {line.times} times an update: {line.total * 1e3:.2f} ms, matmuls {busy * 100:.0f}% of it"


def _svg(height: float, parts: Iterable[str]) -> str:
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {PAGE_WIDTH} {height:.0f}">\n{body}\n</svg>\n'


def _rect(x: float, y: float, width: float, height: float, colour: str, told: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} fill="{colour}" stroke="#fff" stroke-width="0.5"><title>{escape(told)}</title></rect>'


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], right: tuple[int, ...]) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=n' if i in right else ''}>{escape(str(cell))}</{tag}>" for i, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>\n" for row in rows)
    return f"<table><tr>{cells('th', heads)}</tr>\n{body}</table>"


def _list(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"
