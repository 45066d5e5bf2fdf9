"""A report as tables on a terminal, and two reports side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from jaxtrain.config import diff_configs
from jaxtrain.program.report import ProgramReport
from jaxtrain.report.tables import format_integer, format_number, gib, percent

TRAFFIC_HEADS = ("over", "kind", "domain", "async", "calls", "GiB", "wire", "ms", "covered", "groups")
KEPT_WHOLE = ("over", "kind", "line", "GiB", "setting")
MEMBERS_SHOWN = 8
SOURCES_SHOWN = 3
RESHARDING_SHOWN = 8
LINKS = {"fast": "inside", "network": "across"}
LEGEND = (
    "GiB: bytes of the arrays; wire: GiB that a device sends over the limiting link; covered: share of the "
    "transfer time (at the link's published speed) behind matmuls scheduled between start and done"
)


def print_compiled(report: ProgramReport, console: Console) -> None:
    """Print memory, FLOPs, collectives, inventions and the proof line."""
    console.print(headline(report))
    console.print(_table("Memory of a device", ["", "GiB"], [[name, value] for name, value in memory_rows(report)]))
    console.print(
        _table(
            "Largest buffers alive at the peak",
            ["GiB", "array", "made by", "line"],
            [
                [gib(one.bytes), one.shape, operation(one.op_name) or one.name, one.source]
                for one in report.memory.largest
            ],
        )
    )
    console.print(_table("FLOPs of a device, an update", ["", "TFLOP"], [list(row) for row in flops_rows(report)]))
    console.print(
        _table(
            f"Collectives of a device, an update ({report.reductions.calls} gradient reductions, "
            f"{gib(report.reductions.bytes)} GiB)",
            TRAFFIC_HEADS,
            traffic_rows(report),
        )
    )
    console.print("\n".join(source_lines(report)), style="dim")
    console.print(LEGEND, style="dim")
    for line in resharding_lines(report):
        console.print(line)
    for line in proof_lines(report):
        console.print(line, style="green" if report.proof.holds else "bold red")
    for note in (*report.notes, *(f"not understood, not counted: {what} ({where})" for what, where in report.unknown)):
        console.print(f"note: {note}", style="yellow")
    console.print(
        f"traced in {report.trace_seconds:.1f} s, compiled in {report.compile_seconds:.1f} s; {options(report)}"
    )


def print_compiled_diff(a: ProgramReport, b: ProgramReport, names: tuple[str, str], console: Console) -> None:
    """Print two reports side by side: settings that differ, then every figure."""
    settings = diff_configs(a.config, b.config)
    console.print(
        _table("Settings that differ", ["setting", *names], [[key, str(x), str(y)] for key, x, y in settings])
    )
    console.print(_table("Compiled", ["", *names, "ratio"], compiled_diff_rows(a, b)))
    for name, report in zip(names, (a, b), strict=True):
        for line in proof_lines(report):
            console.print(f"{name}: {line}", style="green" if report.proof.holds else "bold red")


def compiled_diff_rows(a: ProgramReport, b: ProgramReport) -> list[list[str]]:
    """Rows of [figure, value of a, value of b, b / a]."""
    keys = sorted({(row.axes, row.kind, row.link) for report in (a, b) for row in report.traffic})
    figures: list[tuple[str, Callable[[ProgramReport], float], Callable[[float], str]]] = [
        ("devices", lambda r: r.devices, format_integer),
        ("peak GiB", lambda r: r.memory.peak, gib),
        ("spare GiB", lambda r: r.memory.spare or 0, gib),
        ("state and batch GiB", lambda r: r.memory.arguments, gib),
        ("host GiB", lambda r: r.memory.host, gib),
        ("executed TFLOP", lambda r: r.flops.executed / 1e12, format_number),
        ("executed / model (full, no kernels)", lambda r: r.flops.ratio, format_number),
        ("recompute share", lambda r: r.flops.recompute, percent),
        ("gradient reductions", lambda r: r.reductions.calls, format_integer),
        ("gradient reductions GiB", lambda r: r.reductions.bytes, gib),
        ("wire inside domains GiB", lambda r: r.link_bytes("fast"), gib),
        ("wire across domains GiB", lambda r: r.link_bytes("network"), gib),
        ("covered inside", lambda r: r.coverage.get("fast", 1.0), percent),
        ("covered across", lambda r: r.coverage.get("network", 1.0), percent),
        ("inventions", lambda r: len(r.inserted_resharding) + len(r.rematerializations), format_integer),
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
    rows = report.config["train"]["global_batch"]
    return (
        f"{report.parameters / 1e9:.3f} B parameters, {rows} rows of {report.config['data']['seq_len']} = "
        f"microbatch {report.microbatch} x accumulation {report.accumulation} on {report.devices} x {report.card} "
        f"({report.cluster}, {report.target}): mesh {mesh}"
    )


def fit_line(report: ProgramReport) -> str:
    """Whether it fits, and by how much."""
    memory = report.memory
    if memory.card is None or memory.spare is None:
        return f"peak {gib(memory.peak)} GiB; cluster.memory_gb is null, so nothing says whether that fits"
    card = f"the card's {gib(memory.card)} GiB ({memory.card / 1e9:g} GB)"
    if memory.fits:
        return f"fits: peak {gib(memory.peak)} of {card}, {gib(memory.spare)} GiB spare"
    return f"does not fit: peak {gib(memory.peak)} GiB, {gib(-memory.spare)} GiB more than {card}"


def memory_rows(report: ProgramReport) -> list[tuple[str, str]]:
    """(what, GiB) rows."""
    memory = report.memory
    rows = [
        ("peak", gib(memory.peak)),
        (fit_line(report), gib(memory.spare) if memory.spare is not None else "-"),
        ("alive at the peak, the rest lies between buffers", gib(memory.live)),
        ("state and batch (arguments)", gib(memory.arguments)),
        ("temporaries", gib(memory.temporaries)),
        ("in the host's memory", gib(memory.host)),
    ]
    return rows


def flops_rows(report: ProgramReport) -> list[tuple[str, str]]:
    """(what, value) rows."""
    flops = report.flops
    rows = [
        ("executed by matmuls, loops counted", format_number(flops.executed / 1e12)),
        ("model, causal scores", format_number(flops.causal / 1e12)),
        ("model, full scores", format_number(flops.full / 1e12)),
        ("of it in kernels, not counted as executed", format_number(flops.in_kernels / 1e12)),
        ("executed / model (full) outside of kernels", format_number(flops.ratio)),
        ("share computed again (beyond full)", percent(flops.recompute)),
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
    """Which lines of the program the collectives come from, one line a row of the table."""
    return [
        f"{row.kind} over {row.axes}: {', '.join(row.sources[:SOURCES_SHOWN])}" for row in report.traffic if row.sources
    ]


def resharding_lines(report: ProgramReport) -> list[str]:
    """What the partitioner had to invent, one line each."""
    lines = [
        f"involuntary full rematerialization: {one.shape} {operation(one.op_name) or one.instruction} {one.source} "
        f"from {one.before} to {one.after}"
        for one in report.rematerializations
    ]
    heavy = sorted(report.inserted_resharding, key=lambda one: -one.calls * one.payload)
    lines += [
        f"invented by the partitioner: {one.kind} over {one.axes_label}, {one.calls} x {one.payload / 2**20:.1f} MiB, "
        f"{one.source or operation(one.op_name)}"
        for one in heavy[:RESHARDING_SHOWN]
    ]
    rest = heavy[RESHARDING_SHOWN:]
    if rest:
        lines.append(f"and {len(rest)} smaller inventions, {gib(sum(one.calls * one.payload for one in rest))} GiB")
    return lines or ["the partitioner invented nothing"]


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
    """'8 x 8: 0-7' for eight groups of eight, the first of them 0 to 7; '0-56/8' counts by eights."""
    if not groups:
        return "-"
    return f"{len(groups)} x {len(groups[0])}: {_members(groups[0])}"


def options(report: ProgramReport) -> str:
    """The XLA options used."""
    used = ", ".join(f"{name}={value}" for name, value in report.options.items()) or "none set"
    return f"xla options: {used}; jax {report.version}"


def operation(op_name: str) -> str:
    """An operation's name without the scaffolding of transformations: its last two parts."""
    return "/".join(op_name.split("/")[-2:])


def _members(group: Sequence[int]) -> str:
    steps = {b - a for a, b in pairwise(group)}
    if len(group) > 2 and len(steps) == 1:
        step = steps.pop()
        return f"{group[0]}-{group[-1]}{f'/{step}' if step != 1 else ''}"
    shown = " ".join(map(str, group[:MEMBERS_SHOWN]))
    return shown + (" .." if len(group) > MEMBERS_SHOWN else "")


def _domains(report: ProgramReport, group: Sequence[int]) -> str:
    return ", ".join(map(str, sorted({int(report.domain.ravel()[member]) for member in group})))


def _sum(report: ProgramReport, key: tuple[str, str, str], field: str) -> int:
    return sum(getattr(row, field) for row in report.traffic if (row.axes, row.kind, row.link) == key)


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    columns = [
        Column(head, justify="right" if i and rows and _numeric(rows, i) else "left", no_wrap=head in KEPT_WHOLE)
        for i, head in enumerate(heads)
    ]
    table = Table(*columns, title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for row in rows:
        table.add_row(*row)
    return table


def _numeric(rows: Sequence[Sequence[str]], i: int) -> bool:
    return all(row[i][:1] in "-0123456789" for row in rows)
