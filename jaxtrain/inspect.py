"""How a configuration lies on a mesh, without the devices: tables for the shell, figures for a notebook.

from jaxtrain.config import load_config
from jaxtrain.inspect import inspect
inspect(load_config("models/llama3_8b", ["mesh.tensor=8", "rules.preset=[tensor, fsdp]"]), cluster="h100_8x8").print()
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from rich.console import Console
from rich.table import Column, Table

from jaxtrain.config import AXES, Axis, ConfigError, RunConfig, diff_configs, load_config, nearest, replace, to_tree
from jaxtrain.mesh.layout import PARTS, Layout, bytes_per_device, flatten_paths, local_shape
from jaxtrain.mesh.param import Param, show_axes, spec_axes
from jaxtrain.mesh.picture import draw_devices, figure_of, node_size, place_labels
from jaxtrain.mesh.resolution import Reason
from jaxtrain.mesh.rules import NO_RULE
from jaxtrain.mesh.topology import Topology, build_topology
from jaxtrain.nn.decoder import mixture_layers
from jaxtrain.numerics.precision import Precision
from jaxtrain.optim import build_optimizer
from jaxtrain.program.cards import describe_machine
from jaxtrain.train.experts import cross_domain_tokens, crossing_pairs
from jaxtrain.train.resolve import resolve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FLOW: dict[Axis, str] = {
    "data": "gradients, and weights under FSDP",
    "pipe": "activations at stage borders",
    "tensor": "activations, several times a block",
    "seq": "keys and values, every block",
    "expert": "tokens, every expert block",
}
NODES_SHOWN = 16


def inspect(config: RunConfig, devices: int | None = None, cluster: str | None = None) -> Inspection:
    """Lay a configuration over `devices` imagined devices, over a described cluster (name or YAML file), or over both.

    Without either: config.cluster where it is described, else the devices that jax finds here. Raises ConfigError for
    whatever training would refuse: sizes, groups that span domains, rules, batch arithmetic.
    """
    if cluster is not None:
        path = cluster if Path(cluster).suffix else f"clusters/{cluster}"
        config = config.model_copy(update={"cluster": load_config(path).cluster})
    machine = config.cluster
    if devices is not None and devices < 1:
        raise ConfigError(f"devices is {devices}: describe at least one")
    described = devices is not None or machine.nodes is not None
    topology = build_topology(
        config.mesh, machine, describe_machine(machine, devices) if described else list(jax.devices())
    )
    resolved = resolve(config, topology)
    notes = []
    if described and machine.devices_per_node is None:
        notes.append(f"cluster.devices_per_node is null: nodes of {node_size(topology)} devices are assumed")
    if config.data.seq_len in resolved.attention:
        notes.append(f"attention: {resolved.attention[config.data.seq_len]}")
    params, layout = resolved.model.params, resolved.layout
    return Inspection(config, devices, topology, params, layout, (*notes, *resolved.notes))


@dataclass(frozen=True, eq=False)
class Inspection:
    """A configuration laid on a mesh: what lies where, why, and what it costs in bytes."""

    config: RunConfig
    imagined: int | None
    topology: Topology
    params: Any
    layout: Layout
    notes: tuple[str, ...]

    @cached_property
    def parameters(self) -> list[dict[str, Any]]:
        """One row a parameter: path, shape, names, specs, per-dimension reasons, local shape, bytes a device."""
        specs = {part: flatten_paths(tree) for part, tree in self.layout.parts.items()}
        size = Precision(self.config.precision).compute.itemsize
        return [
            {
                "path": path,
                "shape": list(param.shape),
                "names": list(param.names),
                **{f"{part}_spec": _plain_spec(specs[part][path]) for part in PARTS},
                "dimensions": [_plain_reason(reason) for reason in self.layout.resolved[path].reasons],
                "local_shape": list(local_shape(param.shape, specs["weights"][path], self.topology.sizes)),
                "bytes": size * math.prod(local_shape(param.shape, specs["weights"][path], self.topology.sizes)),
            }
            for path, param in flatten_paths(self.params).items()
        ]

    @cached_property
    def totals(self) -> dict[str, int]:
        """Elements of the model, and bytes a device of each part of the state and of the gradients.

        accumulator: float32 sums of one replica's gradients, before they are reduced over the deferred axes.
        """
        layout, sizes, precision = self.layout, self.topology.sizes, Precision(self.config.precision)

        def of(specs: Any, itemsize: int) -> int:
            return bytes_per_device(self.params, specs, sizes, itemsize)

        totals = {
            "parameters": sum(param.size for param in flatten_paths(self.params).values()),
            "weights": of(layout.weights, precision.compute.itemsize),
            "masters": of(layout.master_params, 4) if precision.separate_master_params else 0,
            "gradients": of(layout.gradients, 4),
            "accumulator": of(layout.weights, 4) if layout.deferred_axes else 0,
            "optimizer": self._optimizer_bytes(),
        }
        return totals | {"total": sum(totals[k] for k in ("weights", "masters", "gradients", "optimizer"))}

    def _optimizer_bytes(self) -> int:
        optimizer = build_optimizer(self.config.optimizer, self.params)
        arrays = jax.tree.map(lambda param: jax.ShapeDtypeStruct(param.shape, jnp.float32), self.params)
        state = jax.eval_shape(optimizer.init, arrays)
        return bytes_per_device(state, self.layout.optimizer_specs(state, self.params), self.topology.sizes)

    @cached_property
    def nodes(self) -> list[dict[str, Any]]:
        """One row a node: its domain, its device ids and the mesh coordinates that they cover on each axis."""
        where: dict[int, list[tuple[int, ...]]] = {}
        for place, device in np.ndenumerate(self.topology.devices):
            where.setdefault(device.process_index, []).append(place)
        return [
            {
                "node": node,
                "domains": sorted({int(self.topology.domain[place]) for place in places}),
                "devices": sorted(int(self.topology.devices[place].id) for place in places),
                **{axis: sorted({place[i] for place in places}) for i, axis in enumerate(AXES)},
            }
            for node, places in sorted(where.items())
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain values: parameters, totals (bytes a device), mesh, crossings, notes."""
        layout = self.layout
        return {
            "parameters": self.parameters,
            "totals": self.totals,
            "mesh": {
                "sizes": dict(self.topology.sizes),
                "devices": int(self.topology.devices.size),
                "domains": int(self.topology.domain.max()) + 1,
                "batch_axes": list(layout.batch_axes),
                "deferred_axes": list(layout.deferred_axes),
                "nodes": self.nodes,
            },
            "crossings": dict(self.topology.crossings()),
            "notes": list(self.notes),
        }

    def print(self, console: Console | None = None) -> None:
        """Print the tables."""
        console = console or Console()
        for table in (_mesh_table(self), _crossing_table(self), _parameter_table(self), _total_table([self.totals])):
            console.print(table)
        console.print(_reduction_line(self.layout))
        for note in (*self.notes, *_border_lines(self)):
            console.print(f"note: {note}", markup=False)

    def diff(self, *others: str | Inspection) -> Difference:
        """What changes under `section.key=value` overrides, or between this and another Inspection."""
        if len(others) == 1 and isinstance(others[0], Inspection):
            return Difference(self, others[0])
        overrides = [other for other in others if isinstance(other, str)]
        return Difference(self, inspect(replace(self.config, *overrides), self.imagined))

    def shards(self, path: str) -> dict[int, tuple[tuple[int, int], ...]]:
        """Device id -> (start, stop) in each dimension of the shard of a parameter's weights that it holds."""
        param, spec = self._find(path)
        sizes, dims = self.topology.sizes, spec_axes(spec, len(param.shape))
        out = {}
        for place, device in np.ndenumerate(self.topology.devices):
            at = dict(zip(AXES, place, strict=True))
            bounds = []
            for n, axes in zip(param.shape, dims, strict=True):
                index = 0
                for axis in axes:
                    index = index * sizes[axis] + at[axis]
                width = n // math.prod(sizes[axis] for axis in axes)
                bounds.append((index * width, (index + 1) * width))
            out[int(device.id)] = tuple(bounds)
        return out

    def plot_mesh(self) -> Figure:
        """Devices on their nodes, coloured by (data, pipe) coordinate and labelled with their place in the mesh."""
        colours = {
            int(device.id): place[0] * self.topology.sizes["pipe"] + place[1]
            for place, device in np.ndenumerate(self.topology.devices)
        }
        figure, (axes,) = figure_of(self.topology, 1)
        draw_devices(axes, self.topology, colours, place_labels(self.topology))
        axes.set_title("Devices on their nodes; one colour per (data, pipe) coordinate")
        return figure

    def plot_parameter(self, path: str) -> Figure:
        """One parameter's shards: devices of one colour hold the same shard, the label is its place in the tensor."""
        figure, (axes,) = figure_of(self.topology, 1)
        _draw_shards(axes, self, path)
        return figure

    def plot_before_after(self, path: str, *overrides: str) -> Figure:
        """One parameter's shards now and under `section.key=value` overrides, side by side."""
        difference = self.diff(*overrides)
        figure, panels = figure_of(self.topology, 2)
        for axes, one, when in zip(panels, (self, difference.after), ("before", " ".join(overrides)), strict=True):
            _draw_shards(axes, one, path)
            axes.set_title(f"{when}\n{axes.get_title()}", fontsize=9)
        return figure

    def _find(self, path: str) -> tuple[Param, PartitionSpec]:
        params = flatten_paths(self.params)
        if path not in params:
            raise ConfigError(f"no parameter {path!r}{nearest(path, params)}; parameters: {', '.join(params)}")
        return params[path], self.layout.resolved[path].spec


@dataclass(frozen=True, eq=False)
class Difference:
    """What differs between two inspections."""

    before: Inspection
    after: Inspection

    @property
    def settings(self) -> list[tuple[str, Any, Any]]:
        """Differing settings: dotted key, before, after."""
        return diff_configs(to_tree(self.before.config), to_tree(self.after.config))

    @property
    def parameters(self) -> list[dict[str, Any]]:
        """Parameters of which a row differs, with both rows (None where one lacks it)."""
        rows = [{row["path"]: row for row in one.parameters} for one in (self.before, self.after)]
        return [
            {"path": path, "before": rows[0].get(path), "after": rows[1].get(path)}
            for path in dict.fromkeys([*rows[0], *rows[1]])
            if rows[0].get(path) != rows[1].get(path)
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain values: settings, changed parameters, and totals, mesh, crossings, notes as [before, after]."""
        old, new = self.before.to_json(), self.after.to_json()
        return {
            "settings": [list(row) for row in self.settings],
            "parameters": self.parameters,
            **{key: [old[key], new[key]] for key in ("totals", "mesh", "crossings", "notes")},
        }

    def print(self, console: Console | None = None) -> None:
        """Print what changes."""
        console = console or Console()
        for key, old, new in self.settings:
            shown = ["null" if value is None else value for value in (old, new)]
            console.print(f"{key}: {shown[0]} -> {shown[1]}", markup=False, highlight=False)
        table = Table(_path_column(), "of", "before", "after", "rule of each dimension", "bytes before", "bytes after")
        for row in self.parameters:
            for cells in _changes(row["before"], row["after"]):
                table.add_row(row["path"], *cells)
        console.print(table if table.row_count else "no parameter's layout changes")
        console.print(_total_table([self.before.totals, self.after.totals]))
        crossings = [one.topology.crossings() for one in (self.before, self.after)]
        if crossings[0] != crossings[1]:
            console.print(_crossing_table(self.after))
        console.print(_reduction_line(self.after.layout))
        for note in self.after.notes:
            if note not in self.before.notes:
                console.print(f"new note: {note}", markup=False)


_ROWS = {
    "weights": "weights (compute dtype)",
    "masters": "master weights (float32)",
    "gradients": "gradients (float32, reduced)",
    "optimizer": "optimizer state",
    "total": "sum of these",
    "accumulator": "while accumulating: gradients of one replica (float32)",
}


def _mesh_table(one: Inspection) -> Table:
    sizes = one.topology.sizes
    used = [axis for axis in AXES if sizes[axis] > 1] or ["data"]
    name = f"{one.config.cluster.name}: " if one.topology.devices.size else ""
    table = Table("node", "domain", "devices", *used, title=f"{name}mesh {_show_sizes(sizes)} over nodes")
    for row in one.nodes[:NODES_SHOWN]:
        table.add_row(
            str(row["node"]), _span(row["domains"]), _span(row["devices"]), *(_span(row[axis]) for axis in used)
        )
    hidden = len(one.nodes) - NODES_SHOWN
    if hidden > 0:
        table.add_row("...", f"{hidden} more nodes (--json shows all)")
    return table


def _crossing_table(one: Inspection) -> Table:
    table = Table("axis", "size", "domains one group touches", "what flows", title="What crosses a domain border")
    for axis, touched in one.topology.crossings().items():
        if one.topology.sizes[axis] > 1:
            crosses = f"{touched}: crosses" if touched > 1 else "1: stays inside"
            table.add_row(axis, str(one.topology.sizes[axis]), crosses, FLOW[axis])
    return table


def _border_lines(one: Inspection) -> list[str]:
    """What an expert group that leaves its domain sends over the border, with and without group-limited routing."""
    model, sizes, rules = one.config.model, one.topology.sizes, one.layout.rules
    crossed = cross_domain_tokens(model, crossing_pairs(one.topology, rules))
    if crossed is None:
        return []
    sharing = {"pipe", *(axis for name in ("batch", "seq_len", "experts") for axis in rules.axes(name))}
    tokens = one.config.train.global_batch * one.config.data.seq_len / math.prod(sizes[axis] for axis in sharing)
    row = model.d_model * Precision(one.config.precision).compute.itemsize
    # There and back, forward and backward.
    a_row = 4 * row * sum(mixture_layers(model).values()) * tokens
    kept = f"{model.moe.top_groups} of {model.moe.groups} groups"
    return [
        f"experts leave their domain: a token sends {crossed.sent:.2f} of its {model.moe.top_k} rows across, "
        f"{_bytes(int(crossed.sent * a_row))} a device and update, with or without groups (one row a choice)",
        f"sent once a domain it would be {_bytes(int(crossed.once * a_row))} without group-limited routing and "
        f"{_bytes(int(crossed.once_limited * a_row))} with {kept}",
    ]


def _parameter_table(one: Inspection) -> Table:
    table = Table(
        "parameter", "shape", "spec", "rule of each dimension", "local shape", "bytes", title="Weights a device"
    )
    for row in one.parameters:
        shape = "\n".join(f"{name} {n}" for name, n in zip(row["names"], row["shape"], strict=True))
        local = " x ".join(map(str, row["local_shape"]))
        table.add_row(row["path"], shape, _show_spec(row["weights_spec"]), _why(row), local, _bytes(row["bytes"]))
    return table


def _path_column() -> Column:
    return Column("parameter", overflow="fold")


def _total_table(totals: list[dict[str, int]]) -> Table:
    heads = ["bytes a device"] if len(totals) == 1 else ["before", "after"]
    table = Table("", *heads, title=f"{totals[-1]['parameters']:,} parameters")
    for key, label in _ROWS.items():
        if any(one[key] for one in totals):
            table.add_row(label, *(f"{_bytes(one[key])} ({one[key]:,})" for one in totals))
    return table


def _reduction_line(layout: Layout) -> str:
    replicas = math.prod(layout.sizes[axis] for axis in layout.batch_axes)
    inside = [axis for axis in layout.batch_axes if axis not in layout.deferred_axes]
    parts = [f"batch over {show_axes(layout.batch_axes) if layout.batch_axes else 'one replica'} ({replicas} replicas)"]
    if layout.deferred_axes:
        parts.append(f"gradients reduced over {show_axes(layout.deferred_axes)} once an update")
    if inside:
        parts.append(f"over {show_axes(inside)} in every microbatch, where weights are sharded")
    return "; ".join(parts)


def _why(row: dict[str, Any]) -> str:
    lines = []
    for dim in row["dimensions"]:
        lost = "".join(f", over {lose['origin']} ({show_axes(lose['axes'])})" for lose in reversed(dim["losers"]))
        note = f" ({dim['note']})" if dim["note"] else ""
        idle = "" if dim["axes"] or dim["note"] or not dim["asked"] else " (size 1)"
        shown = show_axes(dim["asked"] if idle else dim["axes"])
        lines.append("-" if dim["origin"] == NO_RULE else f"{shown}{idle} by {dim['origin']}{lost}{note}")
    return "\n".join(lines)


def _changes(old: dict[str, Any] | None, new: dict[str, Any] | None) -> list[tuple[str, ...]]:
    """Cells of each differing spec of a parameter; parts that change alike share a row."""
    parts: dict[tuple[str, str], list[str]] = {}
    for part in PARTS:
        was, now = (_show_spec(row[f"{part}_spec"]) if row else "-" for row in (old, new))
        resized = part == "weights" and (old or {}).get("bytes") != (new or {}).get("bytes")
        if was != now or resized:
            parts.setdefault((was, now), []).append(part)
    rows = []
    for specs, names in parts.items():
        weights = "weights" in names
        sizes = [_bytes(row["bytes"]) if row and weights else "" for row in (old, new)]
        rows.append((", ".join(names), *specs, _why(new) if new and weights else "", *sizes))
    return rows


def _plain_spec(spec: PartitionSpec) -> list[list[str]]:
    return [list(axes) for axes in spec_axes(spec, len(spec))]


def _plain_reason(reason: Reason) -> dict[str, Any]:
    return {
        "name": reason.name,
        "axes": list(reason.axes),
        "asked": list(reason.asked),
        "origin": reason.origin,
        "losers": [{"origin": origin, "axes": list(axes)} for origin, axes in reason.losers],
        "note": reason.note,
    }


def _show_spec(spec: list[list[str]]) -> str:
    return "(" + ", ".join("+".join(axes) or "-" for axes in spec) + ")"


def _show_sizes(sizes: dict[Axis, int]) -> str:
    return " x ".join(f"{axis} {n}" for axis, n in sizes.items() if n > 1) or "of one device"


def _bytes(n: int) -> str:
    """Decimal units: GB is 10^9 bytes."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if n >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n} B"


def _span(numbers: list[int]) -> str:
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers))


def _draw_shards(axes: Axes, one: Inspection, path: str) -> None:
    param, spec = one._find(path)
    shards = one.shards(path)
    order = {bounds: i for i, bounds in enumerate(sorted(set(shards.values())))}
    cut = [i for i, dim in enumerate(spec_axes(spec, len(param.shape))) if dim]
    labels = {d: "\n".join(f"{a}:{b}" for a, b in (bounds[i] for i in cut)) for d, bounds in shards.items()}
    draw_devices(axes, one.topology, {d: order[bounds] for d, bounds in shards.items()}, labels)
    names = ", ".join(param.names[i] for i in cut)
    copies = len(shards) // len(order)
    what = f"cut along {names}" if cut else "whole everywhere"
    axes.set_title(f"{path} {param.shape}\n{what}; {len(order)} shards, {copies} copies of each", fontsize=9)
