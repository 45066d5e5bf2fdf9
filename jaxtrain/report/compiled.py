"""A compiled program as tables on a terminal, and two programs side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from rich.console import Console

from jaxtrain.config import diff_configs
from jaxtrain.program.report import ProgramReport
from jaxtrain.report.tables import (
    FittedTable,
    format_integer,
    format_number,
    format_range,
    gib,
    percent,
    print_lines,
    short_names,
)

TRAFFIC_HEADS = ("over", "kind", "link", "async", "calls", "GiB", "sent", "ms", "covered", "groups")
BUFFER_HEADS = ("GiB", "array", "made by", "line")
LOW_HEADS = ("weight", "pass", "calls", "in 8 bits", "kernel")
NODE_HEADS = ("node", "domain", "partitions", "groups")
NODE_ROWS_SHOWN = 16
MEMBERS_SHOWN = 8
SOURCES_SHOWN = 3
RESHARDING_SHOWN = 8
LINKS = {"fast": "inside", "network": "across"}
LEGEND = (
    "over: mesh axes of the groups; link: inside a fast domain or across domains; GiB: bytes of the arrays; sent: GiB "
    "that a device sends over the limiting link; covered: share of the transfer time (at the link's published speed) "
    "behind matmuls scheduled between start and done; groups: their number x size, and the first one"
)


def print_compiled(report: ProgramReport, console: Console) -> None:
    """Print memory, mesh, FLOPs, collectives, inserted resharding and the proof line."""
    print_lines(console, headline(report))
    reductions = f"{report.reductions.calls} gradient reductions, {gib(report.reductions.bytes)} GiB"
    for table in (
        FittedTable(["", "GiB"], memory_rows(report), "Memory of a device"),
        FittedTable(BUFFER_HEADS, buffer_rows(report), "Largest buffers alive at the peak"),
        FittedTable(NODE_HEADS, node_rows(report), "Mesh over nodes; a group is a tensor x expert group"),
        FittedTable(["", "TFLOP"], flops_rows(report), "FLOPs of a device in a step"),
        FittedTable(LOW_HEADS, low_precision_rows(report), "Matmuls in 8 bits: calls of a device in a step"),
        FittedTable(TRAFFIC_HEADS, traffic_rows(report), f"Collectives of a device in a step ({reductions})"),
    ):
        if table.rows:
            console.print(table)
    print_lines(console, "\n".join(source_lines(report)), style="dim")
    print_lines(console, LEGEND, style="dim")
    print_lines(console, "\n".join(resharding_lines(report)))
    print_lines(console, "\n".join(proof_lines(report)), style="green" if report.proof.holds else "bold red")
    for note in note_lines(report):
        print_lines(console, f"note: {note}", style="yellow")
    print_lines(console, time_line(report))


def low_precision_rows(report: ProgramReport) -> list[list[str]]:
    """The matmuls of precision.recipe."""
    return [
        [one.path, one.step, format_integer(one.calls), format_integer(one.low), ", ".join(one.kernels)]
        for one in report.low_precision
    ]


def print_compiled_diff(a: ProgramReport, b: ProgramReport, names: tuple[str, str], console: Console) -> None:
    """Print two reports side by side: settings that differ, then every figure."""
    settings = [[key, str(x), str(y)] for key, x, y in diff_configs(a.config, b.config)]
    heads = short_names(names)
    for head, name in zip(heads, names, strict=True):
        if head != name:
            print_lines(console, f"{head} is {name}")
    console.print(FittedTable(["setting", *heads], settings, "Settings that differ"))
    console.print(FittedTable(["", *heads, "ratio"], compiled_diff_rows(a, b), "Compiled"))
    for name, report in zip(heads, (a, b), strict=True):
        style = "green" if report.proof.holds else "bold red"
        print_lines(console, "\n".join(f"{name}: {line}" for line in proof_lines(report)), style=style)


def compiled_diff_rows(a: ProgramReport, b: ProgramReport) -> list[list[str]]:
    """Rows of [figure, value of a, value of b, b / a]."""
    keys = sorted({(row.axes, row.kind, row.link) for report in (a, b) for row in report.traffic})
    figures: list[tuple[str, Callable[[ProgramReport], float], Callable[[float], str]]] = [
        ("devices", lambda r: r.devices, format_integer),
        ("microbatch, sequences", lambda r: r.microbatch, format_integer),
        ("accumulation, microbatches", lambda r: r.accumulation, format_integer),
        ("peak GiB", lambda r: r.memory.peak, gib),
        ("peak of a save GiB", lambda r: r.memory.save, gib),
        ("spare GiB", lambda r: r.memory.spare or 0, gib),
        ("state and batch GiB", lambda r: r.memory.arguments, gib),
        ("host GiB", lambda r: r.memory.host, gib),
        ("executed TFLOP", lambda r: r.flops.executed / 1e12, format_number),
        ("executed / model (full, no kernels)", lambda r: r.flops.ratio, format_number),
        ("recompute share", lambda r: r.flops.recompute, percent),
        ("gradient reductions", lambda r: r.reductions.calls, format_integer),
        ("gradient reductions GiB", lambda r: r.reductions.bytes, gib),
        ("sent inside domains GiB", lambda r: r.link_bytes("fast"), gib),
        ("sent across domains GiB", lambda r: r.link_bytes("network"), gib),
        ("covered inside", lambda r: r.coverage.get("fast", 1.0), percent),
        ("covered across", lambda r: r.coverage.get("network", 1.0), percent),
        (
            "resharding inserted by the partitioner",
            lambda r: len(r.inserted_resharding) + len(r.rematerializations),
            format_integer,
        ),
        ("compile seconds", lambda r: r.compile_seconds, format_number),
    ]
    for key in keys:
        label = f"{key[0]} {key[1]} ({LINKS[key[2]]})"
        figures.append((f"{label} calls", lambda r, k=key: _sum(r, k, "calls"), format_integer))  # type: ignore[misc]
        figures.append((f"{label} payload GiB", lambda r, k=key: _sum(r, k, "payload"), gib))  # type: ignore[misc]
    rows = []
    for name, value, written in figures:
        x, y = value(a), value(b)
        rows.append([name, written(x), written(y), f"{y / x:.2f}" if x else "-"])
    return rows


def headline(report: ProgramReport) -> str:
    """One line: what was compiled for what."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in report.sizes.items() if size > 1) or "one device"
    return (
        f"{report.parameters / 1e9:.3f} B parameters, {report.config['train']['global_batch']} sequences of "
        f"{report.config['data']['seq_len']} tokens = {batch_text(report)} on {report.devices} x {report.card} "
        f"({report.cluster}, {report.target}): mesh {mesh}"
    )


def batch_text(report: ProgramReport) -> str:
    """Microbatch of a replica and number of microbatches: the peak depends on them."""
    return f"microbatch {report.microbatch} x accumulation {report.accumulation}"


def fit_line(report: ProgramReport) -> str:
    """Whether the peak fits the card, by how much, and for which microbatch."""
    memory, batch = report.memory, batch_text(report)
    what = "peak" if memory.needed == memory.peak else "peak of a save" if memory.needed == memory.save else "replay"
    peak = f"{what} {gib(memory.needed)}"
    if memory.card is None or memory.spare is None:
        return f"{peak} GiB at {batch}; cluster.memory_gb is null: whether that fits is not known"
    card = f"the card's {gib(memory.card)} GiB ({memory.card / 1e9:g} GB)"
    if memory.fits:
        return f"fits: {peak} of {card} at {batch}, {gib(memory.spare)} GiB spare"
    return f"does not fit: {peak} GiB at {batch}, {gib(-memory.spare)} GiB more than {card}"


def memory_rows(report: ProgramReport) -> list[tuple[str, str]]:
    """(what, GiB) rows."""
    memory = report.memory
    return [
        (f"peak, {batch_text(report)}", gib(memory.peak)),
        (fit_line(report), gib(memory.spare) if memory.spare is not None else "-"),
        ("peak of a save, between steps", gib(memory.save)),
        *([("peak of a replayed step", gib(memory.replay))] if memory.replay is not None else []),
        ("alive at the peak; the rest is unused space between buffers", gib(memory.live)),
        ("state and batch (arguments)", gib(memory.arguments)),
        ("temporaries", gib(memory.temporaries)),
        ("in host memory", gib(memory.host)),
        *_local_rows(report.local_tier),
    ]


def _local_rows(tier: Mapping[str, int] | None) -> list[tuple[str, str]]:
    if tier is None:
        return []
    disk = (tier["own"] + tier["copies"]) * (tier["keep"] + 1)
    return [
        ("local disk of a node, one save: own shards", gib(tier["own"])),
        ("local disk of a node, one save: copies of other nodes", gib(tier["copies"])),
        (f"local disk of a node, {tier['keep']} saves and the next one", gib(disk)),
    ]


def buffer_rows(report: ProgramReport) -> list[list[str]]:
    """One row for each of the largest buffers at the peak, with BUFFER_HEADS."""
    return [
        [gib(one.bytes), one.shape, operation(one.op_name) or one.name, one.source] for one in report.memory.largest
    ]


def tensor_groups(report: ProgramReport) -> np.ndarray:
    """Number of the tensor x expert group of each device, in the shape of the mesh."""
    sizes = [1 if axis in ("tensor", "expert") else size for axis, size in report.sizes.items()]
    return np.broadcast_to(np.arange(math.prod(sizes)).reshape(sizes), report.domain.shape)


def node_rows(report: ProgramReport) -> list[list[str] | str]:
    """One row for each node, with NODE_HEADS; a last line says how many are left out."""
    groups, nodes, partitions = (
        array.ravel() for array in (tensor_groups(report), report.nodes, np.arange(report.nodes.size))
    )
    names = sorted(set(nodes.tolist()))
    rows: list[list[str] | str] = [
        [str(node), *(format_range(sorted(set(array[nodes == node].tolist())))
                      for array in (report.domain.ravel(), partitions, groups))]
        for node in names[:NODE_ROWS_SHOWN]
    ]  # fmt: skip
    if len(names) > NODE_ROWS_SHOWN:
        rows.append(f"and {len(names) - NODE_ROWS_SHOWN} more nodes (--json shows all)")
    return rows


def flops_rows(report: ProgramReport) -> list[tuple[str, str]]:
    """(what, value) rows."""
    flops = report.flops
    rows = [
        ("executed by matmuls, iterations of loops counted", format_number(flops.executed / 1e12)),
        ("model, causal scores", format_number(flops.causal / 1e12)),
        ("model, full scores", format_number(flops.full / 1e12)),
        ("model, in kernels whose work is not counted as executed", format_number(flops.in_kernels / 1e12)),
        ("executed / model (full) outside of kernels", format_number(flops.ratio)),
        ("share that is recomputed (beyond full)", percent(flops.recompute)),
    ]
    return rows + [(f"not counted: {name}, opaque", f"{calls} calls") for name, calls in flops.opaque]


def traffic_rows(report: ProgramReport) -> list[list[str]]:
    """One row for each kind along the same axes."""
    return [
        [
            row.axes,
            row.kind,
            LINKS[row.link],
            "yes" if row.asynchronous else "no",
            str(row.calls),
            gib(row.payload),
            gib(row.bytes_sent),
            f"{row.seconds * 1e3:.1f}",
            percent(row.covered),
            groups_text(row.groups),
        ]
        for row in report.traffic
    ]


def source_lines(report: ProgramReport) -> list[str]:
    """Source lines of the collectives, one text for each row of the table."""
    return [
        f"{row.kind} over {row.axes}: {', '.join(row.sources[:SOURCES_SHOWN])}" for row in report.traffic if row.sources
    ]


def resharding_lines(report: ProgramReport) -> list[str]:
    """Resharding that the partitioner inserted, one line each."""
    lines = [
        f"involuntary full rematerialization: {one.shape} {operation(one.op_name) or one.instruction} {one.source} "
        f"from {one.before} to {one.after}"
        for one in report.rematerializations
    ]
    heavy = sorted(report.inserted_resharding, key=lambda one: -one.calls * one.payload)
    lines += [
        f"inserted by the partitioner: {one.kind} over {one.axes_label}, {one.calls} x {one.payload / 2**20:.1f} MiB, "
        f"{one.source or operation(one.op_name)}"
        for one in heavy[:RESHARDING_SHOWN]
    ]
    rest = heavy[RESHARDING_SHOWN:]
    if rest:
        lines.append(f"and {len(rest)} smaller ones, {gib(sum(one.calls * one.payload for one in rest))} GiB")
    return lines or ["no resharding was inserted by the partitioner"]


def proof_lines(report: ProgramReport) -> list[str]:
    """The proof line, and every group that breaks it."""
    lines = [f"tensor and expert groups inside a domain: {'yes' if report.proof.holds else 'no'}"]
    for one, groups in report.proof.guilty:
        lines.append(
            f"  {one.kind} over {one.axes_label} ({one.calls} calls, {one.source}) leaves its domain: "
            f"{len(groups)} groups, the first {_members(groups[0])} in domains {_domains(report, groups[0])}"
        )
    if report.proof.mixed:
        bytes_sent = sum(one.calls * one.bytes_sent for one in report.proof.mixed)
        lines.append(
            f"  {len(report.proof.mixed)} collectives mix tensor or expert with another axis, {gib(bytes_sent)} GiB"
        )
    return lines


def groups_text(groups: Sequence[Sequence[int]]) -> str:
    """'8 x 8: 0-7': eight groups of eight, the first has partitions 0 to 7; '0-56/8' has every eighth."""
    if not groups:
        return "-"
    return f"{len(groups)} x {len(groups[0])}: {_members(groups[0])}"


def note_lines(report: ProgramReport) -> list[str]:
    """Notes, and what the readers of the program did not count."""
    return [*report.notes, *(f"not understood, not counted: {what} ({where})" for what, where in report.unknown)]


def time_line(report: ProgramReport) -> str:
    """Seconds of tracing and compilation, and the XLA options used."""
    return f"traced in {report.trace_seconds:.1f} s, compiled in {report.compile_seconds:.1f} s; {options(report)}"


def options(report: ProgramReport) -> str:
    """The XLA options used."""
    used = ", ".join(f"{name}={value}" for name, value in report.options.items()) or "none set"
    return f"xla options: {used}; jax {report.version}"


def operation(op_name: str) -> str:
    """The last two parts of an operation's name: without the names of transformations around it."""
    return "/".join(op_name.split("/")[-2:])


def _members(group: Sequence[int]) -> str:
    text = format_range(group)
    if len(group) > MEMBERS_SHOWN and "-" not in text:
        return f"{' '.join(map(str, group[:MEMBERS_SHOWN]))} and {len(group) - MEMBERS_SHOWN} more"
    return text.replace(",", "")


def _domains(report: ProgramReport, group: Sequence[int]) -> str:
    return ", ".join(map(str, sorted({int(report.domain.ravel()[member]) for member in group})))


def _sum(report: ProgramReport, key: tuple[str, str, str], field: str) -> int:
    return sum(getattr(row, field) for row in report.traffic if (row.axes, row.kind, row.link) == key)
