"""A compiled program as one self-contained HTML page: memory bar, collectives, mesh over nodes, timeline of a layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import numpy as np

from jaxtrain.program.report import ProgramReport
from jaxtrain.program.timeline import LayerTimeline
from jaxtrain.report.compiled import (
    BUFFER_HEADS,
    LEGEND,
    TRAFFIC_HEADS,
    buffer_rows,
    fit_line,
    flops_rows,
    headline,
    note_lines,
    operation,
    proof_lines,
    resharding_lines,
    source_lines,
    tensor_groups,
    time_line,
    traffic_rows,
)
from jaxtrain.report.tables import format_range, gib

PAGE_WIDTH = 1000
LANES = {"matmul": "matmuls", "fast": "inside a domain", "network": "across domains"}
LANE_COLOURS = {"matmul": "#4c72b0", "fast": "#55a868", "network": "#dd8452"}
PALETTE = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c", "#ccb974", "#64b5cd")
GROUP_COLOURS = (
    "#9ecae9",
    "#ffbf79",
    "#8cd17d",
    "#ff9d98",
    "#c9b2e0",
    "#d8b5a5",
    "#fabfd2",
    "#c7c7c7",
    "#f1ce63",
    "#86dcd3",
)
HATCHES = (
    "", "M0 8 L8 0", "M0 0 L8 8", "M0 4 H8", "M4 0 V8", "M0 4 H8 M4 0 V8", "M0 8 L8 0 M0 0 L8 8",
)  # fmt: skip
CELL = 60
REST, GAP, FREE = "#b0b0b0", "#d0d0d0", "#eeeeee"
PAGE_NODES_SHOWN = 16
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; max-width: 1080px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.4em } h2 { font-size: 1.1em; margin-top: 2em }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto }
td, th { padding: 3px 10px 3px 0; text-align: left }
th { border-bottom: 1px solid #999 } td { border-bottom: 1px solid #e4e4e4 } td.n, th.n { text-align: right }
.yes { color: #1a7f37 } .no { color: #b42318; font-weight: bold } .dim { color: #666; font-size: 13px }
.scroll { overflow-x: auto } svg { width: 100%; min-width: 720px; height: auto }
svg text { font: 11px system-ui, sans-serif; fill: #222; paint-order: stroke; stroke: #fff; stroke-width: 2px }
"""


def write_page(report: ProgramReport, path: Path) -> None:
    """Write the page; it needs no other file and no network."""
    path.write_text(page(report), encoding="utf-8")


def page(report: ProgramReport) -> str:
    """The page as text."""
    proof = "".join(
        f'<p class="{"yes" if report.proof.holds else "no"}">{escape(line)}</p>' for line in proof_lines(report)
    )
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
{_table(BUFFER_HEADS, buffer_rows(report), (0,))}
<h2>FLOPs of a device in a step</h2>{_table(["", "TFLOP"], flops_rows(report), (1,))}
<h2>Collectives of a device in a step</h2>
<p>{report.reductions.calls} gradient reductions, {gib(report.reductions.bytes)} GiB</p>
{_table(TRAFFIC_HEADS, traffic_rows(report), (4, 5, 6, 7, 8))}
{_list(source_lines(report))}
<p class="dim">{escape(LEGEND)}</p>
<h2>Mesh over nodes</h2>{mesh_svg(report)}
<h2>One layer</h2>{timelines}
<p class="dim">Matmuls at the card's peak, transfers at the links' published speed, in scheduled order. This shows the
schedule and is no forecast: other operations than matmuls take no time here.</p>
<h2>Resharding inserted by the partitioner</h2>{_list(resharding_lines(report))}
<h2>Compilation</h2>{_list([time_line(report), *note_lines(report)])}
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
            out.append(f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{name} {gib(marked)} GiB</text>')
    return _svg(90, out)


def mesh_svg(report: ProgramReport) -> str:
    """Nodes as boxes of devices, each with its tensor x expert group as number, colour and hatch, and a legend."""
    groups, per_row = tensor_groups(report), 4
    nodes = sorted(set(report.nodes.ravel().tolist()))
    members = {node: [tuple(place) for place in np.argwhere(report.nodes == node).tolist()] for node in nodes}
    shown = {node: members[node] for node in nodes[:PAGE_NODES_SHOWN]}
    box_height = 34 + CELL * -(-max(map(len, shown.values())) // per_row)
    out = [_hatches()]
    for i, (node, places) in enumerate(shown.items()):
        left, top = (i % 4) * PAGE_WIDTH / 4, (i // 4) * box_height
        domain = format_range(sorted({int(report.domain[place]) for place in places}))
        out.append(f'<text x="{left + 4:.0f}" y="{top + 15:.0f}">node {node}, domain {domain}</text>')
        for j, place in enumerate(places):
            x, y = left + 4 + (j % per_row) * CELL, top + 22 + (j // per_row) * CELL
            out.append(_device_cell(report, place, int(groups[place]), x, y))
    height = -(-len(shown) // 4) * box_height + 24
    title = "Legend: number of the tensor x expert group, its coordinates on the other axes, its partitions"
    out.append(f'<text x="4" y="{height - 6}">{title}</text>')
    listed = sorted({int(groups[place]) for places in shown.values() for place in places})
    for i, group in enumerate(listed):
        out.append(_legend_entry(report, groups, group, 4 + (i % 4) * PAGE_WIDTH / 4, height + 4 + (i // 4) * 20))
    hidden = len(nodes) - len(shown)
    more = f'<p class="dim">and {hidden} more nodes (--json has all)</p>' if hidden else ""
    return _svg(height + 8 + -(-len(listed) // 4) * 20, out) + more


def _device_cell(report: ProgramReport, place: tuple[int, ...], group: int, x: float, y: float) -> str:
    coordinates = [(axis, n) for (axis, size), n in zip(report.sizes.items(), place, strict=True) if size > 1]
    partition = int(np.ravel_multi_index(place, report.domain.shape))
    hint = ", ".join([f"partition {partition}", f"group {group}", *(f"{axis} {n}" for axis, n in coordinates)])
    lines = [f"g{group}", *(" ".join(f"{axis[0]}{n}" for axis, n in coordinates[k : k + 2]) for k in (0, 2, 4))]
    texts = (f'<text x="{x + 3:.0f}" y="{y + 13 + 13 * k:.0f}">{line}</text>' for k, line in enumerate(lines) if line)
    return _swatch(x, y, CELL - 4, group, hint) + "".join(texts)


def _legend_entry(report: ProgramReport, groups: np.ndarray, group: int, x: float, y: float) -> str:
    place = np.argwhere(groups == group)[0].tolist()
    others = [
        f"{axis[0]}{n}"
        for (axis, size), n in zip(report.sizes.items(), place, strict=True)
        if size > 1 and axis not in ("tensor", "expert")
    ]
    partitions = format_range(np.flatnonzero(groups.ravel() == group).tolist())
    text = f"g{group} {' '.join(others)}: {partitions}"
    return _swatch(x, y, 16, group, text) + f'<text x="{x + 22:.0f}" y="{y + 12:.0f}">{escape(text)}</text>'


def _hatches() -> str:
    patterns = (
        f'<pattern id="hatch{i}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<path d="{path}" stroke="#222" stroke-opacity="0.45" fill="none"/></pattern>'
        for i, path in enumerate(HATCHES)
        if path
    )
    return f"<defs>{''.join(patterns)}</defs>"


def _swatch(x: float, y: float, size: float, group: int, hint: str) -> str:
    """A square in the colour and hatch of a group; both together differ for 70 groups."""
    hatch = group // len(GROUP_COLOURS) % len(HATCHES)
    square = _rect(x, y, size, size, GROUP_COLOURS[group % len(GROUP_COLOURS)], hint)
    return square + (_rect(x, y, size, size, f"url(#hatch{hatch})", hint) if HATCHES[hatch] else "")


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
                hint = f"{(span.end - span.begin) * 1e6:.0f} us: {span.label}"
                width = max((span.end - span.begin) * scale, 0.5)
                out.append(_rect(left + span.begin * scale, y, width, height - 8, LANE_COLOURS[lane], hint))
    y = 6 + len(LANES) * height + 10
    out.append(f'<text x="{left}" y="{y}">0</text>')
    out.append(f'<text x="{PAGE_WIDTH}" y="{y}" text-anchor="end">{total * 1e3:.2f} ms</text>')
    return _svg(y + 8, out)


def _caption(line: LayerTimeline) -> str:
    busy = line.matmul / line.total if line.total else 1.0
    return f"{line.title}, {line.times} times in a step: {line.total * 1e3:.2f} ms, matmuls {busy * 100:.0f}% of it"


def _svg(height: float, parts: Iterable[str]) -> str:
    body = "\n".join(parts)
    box = f"0 0 {PAGE_WIDTH} {height:.0f}"
    return f'<div class="scroll"><svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}">\n{body}\n</svg></div>\n'


def _rect(x: float, y: float, width: float, height: float, colour: str, hint: str) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} fill="{colour}" stroke="#fff" stroke-width="0.5"><title>{escape(hint)}</title></rect>'


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], right: tuple[int, ...]) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=n' if i in right else ''}>{escape(str(cell))}</{tag}>" for i, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>\n" for row in rows)
    return f"<table><tr>{cells('th', heads)}</tr>\n{body}</table>"


def _list(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"
