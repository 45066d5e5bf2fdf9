"""A configuration resolved on devices: everything that is decided before data or weights exist."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.config import ConfigError, RunConfig, TrainConfig
from jaxtrain.data import FIELDS, Phase, phases_of
from jaxtrain.mesh.layout import Layout, build_layout, bytes_per_device, extend_spec, flatten_paths
from jaxtrain.mesh.param import Param, show_axes
from jaxtrain.mesh.rules import Rules, resolve_rules
from jaxtrain.mesh.topology import Topology, build_topology
from jaxtrain.nn.decoder import check_segments, layers_of
from jaxtrain.nn.model import Model, build
from jaxtrain.numerics.precision import Precision
from jaxtrain.numerics.remat import check_remat
from jaxtrain.ops.attention import Choice, choose_for
from jaxtrain.optim import build_optimizer, schedule_end
from jaxtrain.pipeline.schedule import make_schedule, schedule_shape
from jaxtrain.pipeline.split import loops_of, split_stages
from jaxtrain.pipeline.staged import StagedModel, stage_model
from jaxtrain.pipeline.stages import Stages
from jaxtrain.pipeline.table import Schedule
from jaxtrain.train.batch import BatchShape, batch_sharding, split_batch
from jaxtrain.train.experts import check_experts, crossing_pairs
from jaxtrain.train.options import check_options
from jaxtrain.train.state import (
    TrainState,
    abstract_state,
    init_state,
    stacked_leaves,
    state_bytes_per_device,
    state_from_params,
)
from jaxtrain.train.step import Batch, Step


@dataclass(frozen=True)
class Setup:
    """Mesh, rules, layout, batch plans and step of one configuration.

    `plan` and `abstract_batch` have the shape of train.global_batch and data.seq_len; `phases` are those of the run,
    one without data.schedule, and `plans` how the batches of each are cut.
    """

    config: RunConfig
    topology: Topology
    mesh: Mesh
    model: Model
    rules: Rules
    layout: Layout
    batch_shape: BatchShape
    phases: tuple[Phase, ...]
    batch_shapes: tuple[BatchShape, ...]
    attention: dict[int, Choice]
    """Row length -> how its attention is computed, and why."""
    step: Step

    @cached_property
    def abstract(self) -> TrainState:
        """The train state's shapes and shardings."""
        return abstract_state(self.model, self.step.optimizer, self.config.precision, self.layout, self.mesh)

    @cached_property
    def expert_row_bytes(self) -> int:
        """Bytes of a token's row on its way to an expert."""
        return self.config.model.d_model * self.step.precision.compute.itemsize

    @cached_property
    def expert_crossings(self) -> np.ndarray:
        """Share of the expert groups in which two members lie in different fast domains, [P, P]."""
        return crossing_pairs(self.topology, self.rules)

    @cached_property
    def checkpoint_layout(self) -> TrainState:
        """The state as checkpoints hold it, layers in the model's order: shapes and shardings."""
        return jax.tree.map(self._checkpoint_leaf, self.abstract, self._reordered)

    def to_checkpoint(self, state: TrainState) -> TrainState:
        """A state as checkpoints hold it, bit for bit; the state itself where its layers lie in the model's order."""
        return self._reorder(state, "from_stack", self.checkpoint_layout)

    def from_checkpoint(self, checkpoint_layout: TrainState) -> TrainState:
        """The inverse of `to_saved`."""
        return self._reorder(checkpoint_layout, "to_stack", self.abstract)

    @cached_property
    def _reordered(self) -> TrainState:
        """Tree of str over the state: the stack whose rows a leaf has in stage order, "" for none."""
        if not isinstance(self.model, StagedModel) or self.model.stages.identity:
            return jax.tree.map(lambda _: "", self.abstract)
        return stacked_leaves(self.model.params, self.step.optimizer, self.abstract, self.model.stages.rows)

    def _checkpoint_leaf(self, leaf: jax.ShapeDtypeStruct, stack: str) -> jax.ShapeDtypeStruct:
        if not stack:
            return leaf
        spec = leaf.sharding.spec  # type: ignore[union-attr]
        shape = (layers_of(self.config.model, stack), *leaf.shape[1:])
        if shape[0] % self.topology.sizes["pipe"]:
            # Fewer layers than places need not divide: another dimension takes the axis, so that no device holds all.
            bare = PartitionSpec(None, *spec[1:])
            names = ("layers", *("other",) * (len(shape) - 1))
            spec = extend_spec(Param(shape, names), bare, ("pipe",), self.topology.sizes) or bare
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(self.mesh, spec))

    def _reorder(self, state: TrainState, way: str, target: TrainState) -> TrainState:
        if not any(jax.tree.leaves(self._reordered)):
            return state
        function = getattr(self.model, way)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, target)

        def reorder(state: TrainState) -> TrainState:
            return jax.tree.map(lambda leaf, stack: function(stack, leaf) if stack else leaf, state, self._reordered)

        return jax.jit(reorder, out_shardings=shardings)(state)

    @cached_property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of a batch field [A, B, L]."""
        return batch_sharding(self.batch_shape, self.layout, self.mesh)

    @cached_property
    def abstract_batch(self) -> Batch:
        """Shapes of one global batch."""
        return self._batch_of(self.batch_shape, self.config.data.seq_len)

    def phase_batch(self, phase: int) -> Batch:
        """Shapes of one global batch of a phase."""
        return self._batch_of(self.batch_shapes[phase], self.phases[phase].seq_len)

    def _batch_of(self, plan: BatchShape, length: int) -> Batch:
        shape = (plan.accumulation, plan.rows, plan.stored(length))
        field = jax.ShapeDtypeStruct(shape, np.int32, sharding=self.batch_sharding)
        return dict.fromkeys(FIELDS, field)  # type: ignore[arg-type]

    def init_state(self) -> TrainState:
        """A newborn state, each leaf in its shards."""
        return init_state(self.model, self.step.optimizer, self.config.precision, self.abstract, self.config.train.seed)

    @property
    def canonical(self) -> Model:
        """The model with its layers in order, as checkpoints and the hub have it."""
        return self.model.canonical if isinstance(self.model, StagedModel) else self.model

    def checkpoint_state_from_params(self, params: Any) -> TrainState:
        """The state before the first update of given weights, as `saved` describes both; they are not copied."""
        return state_from_params(params, self.step.optimizer, self.config.precision, self.checkpoint_layout)

    def state_from_params(self, params: Any) -> TrainState:
        """`adopt_saved`, ready to be trained."""
        return self.from_checkpoint(self.checkpoint_state_from_params(params))


def resolve(config: RunConfig, devices: list[Any] | None = None) -> Setup:
    """Resolve mesh, rules, layout and batch of a configuration on these devices (default: all of this job).

    Raises ConfigError where they do not fit together.
    """
    topology = build_topology(config.mesh, config.cluster, devices)
    mesh = topology.mesh()
    model = canonical = build(config.model)
    if topology.sizes["pipe"] > 1:
        model = stage_model(canonical, assign_stages(config, canonical, topology.sizes["pipe"]))
    rules = resolve_rules(config.rules)
    layout = build_layout(model.params, rules, topology.sizes, Precision(config.precision).separate_master_params)
    phases = phases_of(config.data, config.train)
    row_devices = math.prod(topology.sizes[axis] for axis in layout.sequence_axes)
    row_multiple = math.prod(topology.sizes[axis] for axis in rules.axes("residual_seq"))
    plan, *plans = (
        replace(
            split_batch(train_of(config), topology.sizes, layout.batch_axes, rows),
            row_devices=row_devices, row_multiple=row_multiple,
        )
        for rows in (None, *(phase.global_batch for phase in phases))
    )  # fmt: skip
    if isinstance(model, StagedModel):
        # Phases of data.schedule may have other numbers of microbatches: what cannot run is refused before the first.
        shapes = [schedule_shape(config.pipeline, topology.sizes["pipe"], each.accumulation) for each in (plan, *plans)]
        schedules = [make_schedule(config.pipeline.schedule, shape) for shape in shapes]
        notes = pipeline_notes(config, model, layout, schedules[0])
        layout = replace(layout, notes=(*layout.notes, *notes))
    schedule_end(config.optimizer, config.train.steps)
    check_remat(config.remat, config.model)
    check_experts(config.model)
    if model is canonical:
        check_segments(config.remat, config.model)
    check_options(config.xla)
    lengths = dict.fromkeys((config.data.seq_len, *(phase.seq_len for phase in phases)))
    device, split = topology.devices.flat[0], bool(layout.sequence_axes)
    attention = {length: choose_for(config, device, length, split) for length in lengths}
    optimizer = build_optimizer(config.optimizer, canonical.params)
    step = Step(config, model, optimizer, layout, rules, mesh)
    return Setup(config, topology, mesh, model, rules, layout, plan, phases, tuple(plans), attention, step)


def assign_stages(config: RunConfig, model: Model, stages: int) -> Stages:
    """Which layers of `model` lie on which of `stages` stages; raises ConfigError where they cannot be cut so."""
    chunks = schedule_shape(config.pipeline, stages, config.pipeline.microbatches or 1).chunks
    split = split_stages(model, config.pipeline, stages, chunks)
    loops_of(split.pattern, config.remat.every)
    return Stages(split.places, split.pattern, model.stacks)


def pipeline_notes(config: RunConfig, model: StagedModel, layout: Layout, schedule: Schedule) -> tuple[str, ...]:
    """What a pipelined run costs that its settings do not say."""
    chunks = schedule.shape.chunks
    notes = [
        f"pipeline: {schedule.name}, {schedule.ticks} ticks an update, {schedule.bubble():.1%} of the time idle; "
        f"a stage keeps layer inputs of {schedule.kept_slots} microbatches"
    ]
    if config.remat.policy == "none":
        notes.append(
            "pipeline: remat.policy none is taken for full, the backward pass computes a layer again from its kept "
            "input; dots and names keep more of it"
        )
    itemsize = 4 if config.precision.compute == "float32" else 2
    if config.model.mtp:
        held = bytes_per_device(model.params["mtp"], layout.weights["mtp"], layout.sizes, itemsize)
        notes.append(
            f"pipeline: blocks of model.mtp {config.model.mtp} belong to no stage: all stages compute them alike "
            f"when a microbatch leaves the last, and each device holds {held / 1e9:.3g} GB of their weights"
        )
    gathered = tuple(axis for axis in layout.batch_axes if axis not in layout.deferred_axes)
    if gathered:
        sizes = {**layout.sizes, **dict.fromkeys(gathered, 1)}
        layers, specs = ({stack: tree[stack] for stack in model.stages.rows} for tree in (model.params, layout.weights))
        bytes_of = partial(bytes_per_device, layers, specs, itemsize=itemsize)
        tick = (bytes_of(sizes=sizes) - bytes_of(sizes=layout.sizes)) / chunks
        ticks = sum(schedule.places(kind) for kind in "FBW")
        notes.append(
            f"pipeline: weights are sharded over {show_axes(gathered)} (ZeRO-3), so each stage gathers its layers "
            f"again in every forward and backward: {tick * ticks / 1e9:.3g} GB to a device an update; rules.preset "
            "zero1 or zero2 gathers once"
        )
    return tuple(notes)


def train_of(config: RunConfig) -> TrainConfig:
    """The train section with pipeline.microbatches as accumulation; ConfigError where both are set and differ."""
    train, microbatches = config.train, config.pipeline.microbatches
    if microbatches is None:
        return train
    if train.accumulation not in (None, microbatches):
        raise ConfigError(
            f"pipeline.microbatches {microbatches} is not train.accumulation {train.accumulation}: microbatches of a "
            "pipeline are the accumulation, set one of them"
        )
    return train.model_copy(update={"accumulation": microbatches})


def describe_sharding(setup: Setup) -> dict[str, Any]:
    """What `sharding.json` records: mesh, devices and the PartitionSpecs of every parameter."""
    flat = {part: flatten_paths(tree) for part, tree in setup.layout.parts.items()}
    parameters = {
        path: {"shape": param.shape, "names": param.names, **{part: str(flat[part][path]) for part in flat}}
        for path, param in flatten_paths(setup.model.params).items()
    }
    return {
        "mesh": setup.topology.sizes,
        "devices": [int(device.id) for device in setup.topology.devices.ravel()],
        "deferred_axes": setup.layout.deferred_axes,
        "batch": str(setup.batch_sharding.spec),
        "state_bytes_per_device": state_bytes_per_device(setup.abstract),
        "parameters": parameters,
    }
