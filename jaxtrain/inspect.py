"""How a configuration is sharded over a mesh, without the devices: tables for the shell, figures for a notebook.

from jaxtrain.config import load_config
from jaxtrain.inspect import inspect
inspect(load_config("models/llama3_8b", ["mesh.tensor=8", "rules.preset=[tensor, fsdp]"]), cluster="h100_8x8").print()
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from rich.console import Console

from jaxtrain.config import AXES, ConfigError, RunConfig, diff_configs, named_cluster, nearest, replace, to_tree
from jaxtrain.mesh.layout import PARTS, Layout, bytes_per_device, flatten_paths, local_shape
from jaxtrain.mesh.param import Param, show_axes, spec_axes
from jaxtrain.mesh.resolution import Reason
from jaxtrain.mesh.rules import ACTIVATION_ONLY, EXTRAS, NAMES, resolve_rules
from jaxtrain.mesh.topology import Topology, build_topology, described_devices, node_size
from jaxtrain.nn.layer_table import mixture_layers
from jaxtrain.nn.model import build
from jaxtrain.numerics.precision import Precision
from jaxtrain.optim import build_optimizer
from jaxtrain.pipeline.schedule import Schedule, ScheduleTimeline, classic_orders, timeline
from jaxtrain.pipeline.split import StageSplit, split_stages
from jaxtrain.pipeline.table import Costs
from jaxtrain.program.cards import capability_of
from jaxtrain.report.mesh import plot_mesh
from jaxtrain.report.schedule import print_schedule, schedule_svg
from jaxtrain.report.sharding import plot_shards, plot_shards_before_after, print_difference, print_inspection
from jaxtrain.report.tables import format_bytes
from jaxtrain.train.batch import BatchShape
from jaxtrain.train.experts import cross_domain_tokens, crossing_pairs
from jaxtrain.train.resolve import Resolved, resolve

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def inspect(config: RunConfig, devices: int | None = None, cluster: str | None = None) -> Inspection:
    """Shard a configuration over `devices` described devices of a cluster (name or YAML file), without running it.

    Default: config.cluster if it is described, else the devices of this process. Raises ConfigError for whatever
    training would refuse: sizes, groups that span domains, rules, batch arithmetic.
    """
    if cluster is not None:
        config = config.model_copy(update={"cluster": named_cluster(cluster)})
    machine = config.cluster
    if devices is not None and devices < 1:
        raise ConfigError(f"devices is {devices}: describe at least one")
    described = devices is not None or machine.nodes is not None
    devices_found = described_devices(machine, devices, capability_of(machine)) if described else list(jax.devices())
    topology = build_topology(config.mesh, machine, devices_found)
    resolved = resolve(config, topology)
    notes = []
    if described and machine.devices_per_node is None:
        notes.append(f"cluster.devices_per_node is null: nodes of {node_size(topology)} devices are assumed")
    if config.data.seq_len in resolved.attention:
        notes.append(f"attention: {resolved.attention[config.data.seq_len]}")
    return Inspection(resolved, devices, (*notes, *resolved.notes))


@dataclass(frozen=True, eq=False)
class Inspection:
    """A configuration on a mesh: the sharding of each parameter, the rules behind it, and bytes."""

    resolved: Resolved
    described_devices: int | None
    notes: tuple[str, ...]

    @property
    def config(self) -> RunConfig:
        """The configuration, with the described cluster."""
        return self.resolved.config

    @property
    def topology(self) -> Topology:
        """Devices on the mesh."""
        return self.resolved.topology

    @property
    def params(self) -> Any:
        """Tree of Param, in stage order under a pipeline."""
        return self.resolved.model.params

    @property
    def layout(self) -> Layout:
        """Specs of every parameter."""
        return self.resolved.layout

    @cached_property
    def parameters(self) -> list[dict[str, Any]]:
        """One row for each parameter: path, shape, names, specs, reason of each dimension, local shape, bytes."""
        size, sizes = Precision(self.config.precision).compute.itemsize, self.topology.sizes
        return [
            {
                "path": path,
                "shape": list(param.shape),
                "names": list(param.names),
                **{f"{part}_spec": _spec_lists(spec) for part, spec in specs.items()},
                "dimensions": [_reason_dict(reason) for reason in self.layout.resolved[path].reasons],
                "local_shape": list(local_shape(param.shape, specs["weights"], sizes)),
                "bytes": bytes_per_device(param, specs["weights"], sizes, size),
            }
            for path, (param, specs) in self.layout.by_path(self.params).items()
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
        """One row for each node: its domains, its device ids and their mesh coordinates on each axis."""
        where: dict[int, list[tuple[int, ...]]] = {}
        for coordinates, device in np.ndenumerate(self.topology.devices):
            where.setdefault(device.process_index, []).append(coordinates)
        return [
            {
                "node": node,
                "domains": sorted({int(self.topology.domain[coordinates]) for coordinates in members}),
                "devices": sorted(int(self.topology.devices[coordinates].id) for coordinates in members),
                **{axis: sorted({coordinates[i] for coordinates in members}) for i, axis in enumerate(AXES)},
            }
            for node, members in sorted(where.items())
        ]

    @cached_property
    def expert_traffic(self) -> list[str]:
        """What an expert group that spans domains sends between them, with and without group-limited routing."""
        model, sizes, rules = self.config.model, self.topology.sizes, self.layout.rules
        crossed = cross_domain_tokens(model, crossing_pairs(self.topology, rules))
        if crossed is None:
            return []
        sharing = {"pipe", *(axis for name in ("batch", "seq_len", "experts") for axis in rules.axes(name))}
        tokens = self.config.train.global_batch * self.config.data.seq_len / math.prod(sizes[axis] for axis in sharing)
        token_bytes = model.d_model * Precision(self.config.precision).compute.itemsize
        # There and back, forward and backward.
        scale = 4 * token_bytes * sum(mixture_layers(model).values()) * tokens
        limited = f"{model.moe.top_groups} of {model.moe.groups} groups"
        sent, once, once_limited = (
            format_bytes(int(share * scale)) for share in (crossed.sent, crossed.once, crossed.once_limited)
        )
        return [
            f"expert groups span domains: {crossed.sent:.2f} of the {model.moe.top_k} copies of a token go to another "
            f"domain, {sent} a device and step, with or without groups (one copy for each choice)",
            f"one copy for each domain would be {once} without group-limited routing and {once_limited} with {limited}",
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
        print_inspection(self, console or Console())

    def diff(self, *others: str | Inspection) -> Difference:
        """What changes under `section.key=value` overrides, or between this and another Inspection."""
        if len(others) == 1 and isinstance(others[0], Inspection):
            return Difference(self, others[0])
        overrides = [other for other in others if isinstance(other, str)]
        return Difference(self, inspect(replace(self.config, *overrides), self.described_devices))

    def shards(self, path: str) -> dict[int, tuple[tuple[int, int], ...]]:
        """Device id -> (start, stop) in each dimension of the shard of a parameter's weights that it holds."""
        param, spec = self.find(path)
        sizes, dims = self.topology.sizes, spec_axes(spec, len(param.shape))
        out = {}
        for coordinates, device in np.ndenumerate(self.topology.devices):
            at = dict(zip(AXES, coordinates, strict=True))
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
        """Devices on their nodes, coloured by (data, pipe) coordinate, labelled with mesh coordinates."""
        return plot_mesh(self.topology)

    def plot_parameter(self, path: str) -> Figure:
        """One parameter's shards: devices of one colour hold the same shard; labels are index ranges."""
        return plot_shards(self, path)

    def plot_before_after(self, path: str, *overrides: str) -> Figure:
        """One parameter's shards now and under `section.key=value` overrides, side by side."""
        return plot_shards_before_after(self.diff(*overrides), path, " ".join(overrides))

    def find(self, path: str) -> tuple[Param, PartitionSpec]:
        """A parameter and the spec of its weights; ConfigError for an unknown path."""
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
        """Parameters whose rows differ, with both rows (None where one inspection lacks the parameter)."""
        rows = [{row["path"]: row for row in one.parameters} for one in (self.before, self.after)]
        return [
            {"path": path, "before": rows[0].get(path), "after": rows[1].get(path)}
            for path in dict.fromkeys([*rows[0], *rows[1]])
            if rows[0].get(path) != rows[1].get(path)
        ]

    @property
    def reasons(self) -> list[str]:
        """Why settings that differ change no layout, one sentence each; empty where a layout changes."""
        parts = [
            [
                {key: row[key] for key in ("shape", "bytes", *(f"{part}_spec" for part in PARTS))}
                for row in one.parameters
            ]
            for one in (self.before, self.after)
        ]
        if parts[0] != parts[1] or self.before.topology.sizes != self.after.topology.sizes:
            return []
        return [self._reason(key) for key, _, _ in self.settings]

    def _reason(self, key: str) -> str:
        section, _, name = key.partition(".")
        if section == "mesh":
            return f"{key}: the mesh has the same sizes before and after"
        if section != "rules" or name not in (*NAMES, *EXTRAS):
            return f"{key} does not affect how parameters are sharded"
        old, new = (one.layout.rules.entry(name).axes for one in (self.before, self.after))
        sizes, fast = self.after.topology.sizes, min(8, int(np.bincount(self.after.topology.domain.ravel()).max()))
        idle = [axis for axis in dict.fromkeys((*new, *old)) if sizes[axis] == 1]
        if idle and len(idle) == len({*new, *old}):
            several = " and ".join(f"mesh.{axis} has size 1" for axis in idle)
            rest = "" if self.after.config.mesh.data == -1 or idle[0] == "data" else "mesh.data=-1 "
            trial = f"; try {rest}mesh.{idle[0]}={fast}" if fast > 1 else "; it needs more devices (--devices)"
            return f"{several}: the rule has no effect{trial}"
        if old == new:
            return f"{key}: {name} is {show_axes(new)} before and after"
        if name in ACTIVATION_ONLY:
            return f"{key} shards activations: no parameter changes"
        return f"{key}: no parameter has a dimension {name} that changes from {show_axes(old)} to {show_axes(new)}"

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
        print_difference(self, console or Console())


def inspect_schedule(config: RunConfig, devices: int | None = None, cluster: str | None = None) -> ScheduleInspection:
    """The pipeline schedule of a configuration on the devices of `inspect`; raises ConfigError like training.

    A notebook displays the result as SVG; `print` writes tables.
    """
    one = inspect(config, devices, cluster)
    stages = one.topology.sizes["pipe"]
    if stages == 1:
        raise ConfigError("mesh.pipe is 1: there is no pipeline to show; set mesh.pipe to the number of stages")
    resolved = one.resolved
    assert resolved.schedule is not None
    split = split_stages(build(one.config.model), one.config.pipeline, stages, resolved.schedule.shape.chunks)
    return ScheduleInspection(one, resolved.batch_shape, resolved.schedule, split)


@dataclass(frozen=True, eq=False)
class ScheduleInspection:
    """A schedule and its consequences: layers and nodes of each stage, time, memory."""

    inspection: Inspection
    batch_shape: BatchShape
    schedule: Schedule
    split: StageSplit

    @cached_property
    def classic(self) -> ScheduleTimeline:
        """Timeline of the same order of work on stages that run one operation at a time, without recomputation."""
        return timeline(classic_orders(self.schedule), self.schedule.shape)

    @property
    def costs(self) -> Costs:
        """Time of each operation of a chunk: the backward recomputes the forward, except under remat.policy dots."""
        return Costs(1, 1, 1, 0 if self.inspection.config.remat.policy == "dots" else 1)

    @property
    def formula(self) -> float:
        """(P-1)/(vM+P-1), the bubble of a schedule whose backward is not split."""
        P, v, M = self.schedule.shape
        return (P - 1) / (v * M + P - 1)

    @cached_property
    def slot_bytes(self) -> dict[str, int]:
        """Bytes of one slot on a device: the residual stream of a microbatch; "kept": one for each remat.every layers.

        Values that remat.policy dots or names saves, and those that a split backward passes to its second half, are
        not included: they depend on the operations of a layer.
        """
        config, sizes = self.inspection.config, self.inspection.topology.sizes
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
        """Nodes (processes) of a stage."""
        return sorted({int(device.process_index) for device in self.inspection.topology.devices[:, stage].ravel()})

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
        """Print tables and plots."""
        print_schedule(self, console or Console())

    def svg(self) -> str:
        """Both plots as one SVG document."""
        return schedule_svg(self)

    def _repr_svg_(self) -> str:
        return self.svg()


def _spec_lists(spec: PartitionSpec) -> list[list[str]]:
    return [list(axes) for axes in spec_axes(spec, len(spec))]


def _reason_dict(reason: Reason) -> dict[str, Any]:
    return {
        "name": reason.name,
        "axes": list(reason.axes),
        "asked": list(reason.asked),
        "origin": reason.origin,
        "losers": [{"origin": origin, "axes": list(axes)} for origin, axes in reason.losers],
        "note": reason.note,
    }
