"""How parameters are sharded: the tables of an inspection and of a difference, and figures of shards."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich.console import Console

from jaxtrain.mesh.layout import PARTS, Layout
from jaxtrain.mesh.param import show_axes, spec_axes
from jaxtrain.mesh.rules import NO_RULE
from jaxtrain.report.mesh import crossing_table, device_figure, draw_devices, mesh_table
from jaxtrain.report.tables import FittedTable, Row, format_bytes, print_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from jaxtrain.inspect import Difference, Inspection

TOTAL_LABELS = {
    "weights": "weights (compute dtype)",
    "masters": "master parameters (float32)",
    "gradients": "gradients (float32, reduced)",
    "optimizer": "optimizer state",
    "total": "sum of these",
    "accumulator": "while accumulating: gradients of one replica (float32)",
}


def print_inspection(one: Inspection, console: Console) -> None:
    """Print the mesh, what crosses domains, parameters, totals and notes."""
    for table in (mesh_table(one), crossing_table(one), _parameter_table(one), _total_table([one.totals])):
        if table.rows:
            console.print(table)
    print_lines(console, _reduction_line(one.layout))
    for note in (*one.notes, *one.expert_traffic):
        print_lines(console, f"note: {note}")


def print_difference(difference: Difference, console: Console) -> None:
    """Print what changes between two inspections; where no layout changes, print why."""
    for key, old, new in difference.settings:
        shown = ["null" if value is None else value for value in (old, new)]
        print_lines(console, f"{key}: {shown[0]} -> {shown[1]}")
    table = _change_table(difference)
    if table.rows:
        console.print(table)
    else:
        print_lines(console, "no parameter's layout changes")
        print_lines(console, "\n".join([*difference.reasons, ""]))
    console.print(_total_table([difference.before.totals, difference.after.totals]))
    crossings = [one.topology.crossings() for one in (difference.before, difference.after)]
    if crossings[0] != crossings[1]:
        console.print(crossing_table(difference.after))
    print_lines(console, _reduction_line(difference.after.layout))
    for note in difference.after.notes:
        if note not in difference.before.notes:
            print_lines(console, f"new note: {note}")


def plot_shards(one: Inspection, path: str) -> Figure:
    """One parameter's shards: devices of one colour hold the same shard."""
    figure, (axes,) = device_figure(one.topology, 1)
    _draw_shards(axes, one, path)
    return figure


def plot_shards_before_after(difference: Difference, path: str, label: str) -> Figure:
    """One parameter's shards before and after a change, side by side."""
    figure, panels = device_figure(difference.before.topology, 2)
    for axes, one, when in zip(panels, (difference.before, difference.after), ("before", label), strict=True):
        _draw_shards(axes, one, path)
        axes.set_title(f"{when}\n{axes.get_title()}", fontsize=9)
    return figure


def _parameter_table(one: Inspection) -> FittedTable:
    """For each parameter its path, spec and bytes, then one row for each dimension."""
    rows: list[Row] = []
    for row in one.parameters:
        rows.append(f"{row['path']} {_show_spec(row['weights_spec'])} {format_bytes(row['bytes'])}")
        rows += [
            [f"  {name}", str(size), str(local), rule]
            for name, size, local, rule in zip(
                row["names"], row["shape"], row["local_shape"], _rule_lines(row), strict=True
            )
        ]
    heads = ["parameter, spec, bytes", "size", "local", "sharded over, by rule"]
    return FittedTable(heads, rows, "Weights of a device")


def _change_table(difference: Difference) -> FittedTable:
    """Specs and bytes that differ, and the rules of each dimension where weights do."""
    rows: list[Row] = []
    for row in difference.parameters:
        changes = _changes(row["before"], row["after"])
        if changes:
            rows.append(row["path"])
        for names, *cells in changes:
            rows.append([f"  {', '.join(name.replace('masters', 'master parameters') for name in names)}", *cells])
            if row["after"] and "weights" in names:
                dims = zip(row["after"]["names"], _rule_lines(row["after"]), strict=True)
                rows += [f"    {name}: {rule}" for name, rule in dims if rule != "-"]
    return FittedTable(["parameter, part", "before", "after", "bytes before", "after"], rows, "Changes")


def _total_table(totals: list[dict[str, int]]) -> FittedTable:
    heads = ["bytes a device"] if len(totals) == 1 else ["before", "after"]
    rows = [
        [label, *(f"{format_bytes(one[key])} ({one[key]:,})" for one in totals)]
        for key, label in TOTAL_LABELS.items()
        if any(one[key] for one in totals)
    ]
    return FittedTable(["", *heads], rows, f"{totals[-1]['parameters']:,} parameters")


def _reduction_line(layout: Layout) -> str:
    replicas = math.prod(layout.sizes[axis] for axis in layout.batch_axes)
    inside = [axis for axis in layout.batch_axes if axis not in layout.deferred_axes]
    parts = [f"batch over {show_axes(layout.batch_axes) if layout.batch_axes else 'one replica'} ({replicas} replicas)"]
    if layout.deferred_axes:
        parts.append(f"gradients reduced over {show_axes(layout.deferred_axes)} once a step")
    if inside:
        parts.append(f"over {show_axes(inside)} in every microbatch, where weights are sharded")
    return "; ".join(parts)


def _rule_lines(row: dict[str, Any]) -> list[str]:
    """For each dimension: its axes, the rule that set them, and the rules that it overrules."""
    lines = []
    for dim in row["dimensions"]:
        lost = "".join(f", over {lose['origin']} ({show_axes(lose['axes'])})" for lose in reversed(dim["losers"]))
        note = f" ({dim['note']})" if dim["note"] else ""
        idle = "" if dim["axes"] or dim["note"] or not dim["asked"] else " (size 1)"
        shown = show_axes(dim["asked"] if idle else dim["axes"])
        lines.append("-" if dim["origin"] == NO_RULE else f"{shown}{idle} by {dim['origin']}{lost}{note}")
    return lines


def _changes(old: dict[str, Any] | None, new: dict[str, Any] | None) -> list[tuple[list[str], str, str, str, str]]:
    """(parts, spec before, after, bytes before, after) where specs differ; parts with the same change are joined."""
    parts: dict[tuple[str, str], list[str]] = {}
    for part in PARTS:
        was, now = (_show_spec(row[f"{part}_spec"]) if row else "-" for row in (old, new))
        resized = part == "weights" and (old or {}).get("bytes") != (new or {}).get("bytes")
        if was != now or resized:
            parts.setdefault((was, now), []).append(part)
    changes = []
    for specs, names in parts.items():
        sizes = [format_bytes(row["bytes"]) if row and "weights" in names else "-" for row in (old, new)]
        changes.append((names, *specs, *sizes))
    return changes  # type: ignore[return-value]


def _show_spec(spec: list[list[str]]) -> str:
    return "(" + ", ".join("+".join(axes) or "-" for axes in spec) + ")"


def _draw_shards(axes: Axes, one: Inspection, path: str) -> None:
    param, spec = one.find(path)
    shards = one.shards(path)
    order = {bounds: i for i, bounds in enumerate(sorted(set(shards.values())))}
    cut = [i for i, dim in enumerate(spec_axes(spec, len(param.shape))) if dim]
    labels = {d: "\n".join(f"{a}:{b}" for a, b in (bounds[i] for i in cut)) for d, bounds in shards.items()}
    draw_devices(axes, one.topology, {d: order[bounds] for d, bounds in shards.items()}, labels)
    names = ", ".join(param.names[i] for i in cut)
    copies = len(shards) // len(order)
    what = f"sharded along {names}" if cut else "replicated on all devices"
    axes.set_title(f"{path} {param.shape}\n{what}; {len(order)} shards, {copies} copies of each", fontsize=9)
