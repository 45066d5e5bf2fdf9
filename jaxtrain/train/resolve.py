"""One derivation of everything that follows from a configuration and a topology, with and without devices.

`resolve` needs no devices: sizes, rules, layout, batch arithmetic, pipeline stages and schedules, attention backends,
every check and every note. Training, `inspect`, `compile`, `verify` and notebooks all call it. `Resolved.bind` adds
what needs devices: the jax mesh, the train step, shapes with shardings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxtrain.config import ConfigError, RunConfig, TrainConfig
from jaxtrain.data import FIELDS, Phase, phases_of
from jaxtrain.launch.coordination import host_numbers
from jaxtrain.mesh.layout import Layout, build_layout
from jaxtrain.mesh.rules import Rules, resolve_rules
from jaxtrain.mesh.topology import DescribedDevice, Topology, build_topology
from jaxtrain.nn.activations import ACTIVATIONS
from jaxtrain.nn.layer_table import check_segments
from jaxtrain.nn.model import Model, build
from jaxtrain.numerics.precision import Precision
from jaxtrain.numerics.remat import check_remat
from jaxtrain.ops.attention import BackendChoice, choose_for
from jaxtrain.optim import build_optimizer, schedule_end
from jaxtrain.pipeline.schedule import make_schedule, schedule_shape
from jaxtrain.pipeline.split import loops_of, split_stages
from jaxtrain.pipeline.staged import StagedModel, stage_model
from jaxtrain.pipeline.stages import Stages
from jaxtrain.pipeline.table import Schedule
from jaxtrain.train.batch import BatchShape, batch_sharding, split_batch
from jaxtrain.train.experts import check_experts, crossing_pairs
from jaxtrain.train.losses import check_losses
from jaxtrain.train.notes import pipeline_notes
from jaxtrain.train.options import check_options
from jaxtrain.train.recipe import check_recipe
from jaxtrain.train.state import TrainState, abstract_state, init_state
from jaxtrain.train.step import Batch, Step

DEVICE_INDEPENDENT = ("auto", "dense", "xla")
"""Attention backends that can be checked without knowing the card."""


@dataclass(frozen=True)
class Resolved:
    """A configuration on a topology, without devices.

    model: in stage order where mesh.pipe > 1. batch_shape: of train.global_batch and data.seq_len; phases: those of
    data.schedule (one without it), and batch_shapes those of each phase. schedule: the pipeline's for batch_shape, None
    without one. attention: sequence length -> backend and reason, empty where the card is unknown. notes: consequences
    that no setting states.
    """

    config: RunConfig
    topology: Topology
    model: Model
    rules: Rules
    layout: Layout
    batch_shape: BatchShape
    phases: tuple[Phase, ...]
    batch_shapes: tuple[BatchShape, ...]
    schedule: Schedule | None
    attention: dict[int, BackendChoice]
    notes: tuple[str, ...]

    @property
    def canonical(self) -> Model:
        """The model with its layers in the model's order, as checkpoints and hub folders store them."""
        return self.model.canonical if isinstance(self.model, StagedModel) else self.model

    @cached_property
    def expert_token_bytes(self) -> int:
        """Bytes of one token on its way to an expert."""
        return self.config.model.d_model * Precision(self.config.precision).compute.itemsize

    @cached_property
    def expert_crossings(self) -> np.ndarray:
        """Share of the expert groups in which two members are in different fast domains, [P, P]."""
        return crossing_pairs(self.topology, self.rules)

    def bind(self, devices: Sequence[Any] | None = None) -> Bound:
        """This configuration on real devices: those of its topology, or `devices` in its place.

        Raises ConfigError where `devices` do not form the same mesh.
        """
        topology = self.topology
        if devices is not None:
            topology = build_topology(self.config.mesh, self.config.cluster, devices)
            if topology.sizes != self.topology.sizes:
                raise ConfigError(
                    f"{len(devices)} devices form a mesh of {topology.sizes}, but the configuration was resolved for "
                    f"{self.topology.sizes}: resolve it on the topology of these devices"
                )
        mesh = topology.mesh()
        optimizer = build_optimizer(self.config.optimizer, self.canonical.params)
        step = Step(self.config, self.model, optimizer, self.layout, self.rules, mesh, self.config.data.seq_len)
        values = {field.name: getattr(self, field.name) for field in fields(Resolved)} | {"topology": topology}
        return Bound(**values, mesh=mesh, step=step)


@dataclass(frozen=True)
class Bound(Resolved):
    """A resolved configuration on real devices."""

    mesh: Mesh
    step: Step

    @cached_property
    def abstract(self) -> TrainState:
        """Shapes and shardings of the train state."""
        return abstract_state(self.model, self.step.optimizer, self.config.precision, self.layout, self.mesh)

    @cached_property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of a batch field [A, B, L]."""
        return batch_sharding(self.batch_shape, self.layout, self.mesh)

    @cached_property
    def abstract_batch(self) -> Batch:
        """Shapes and shardings of one global batch."""
        return self._abstract_batch(self.batch_shape, self.config.data.seq_len)

    def phase_step(self, phase: int) -> Step:
        """The step of a phase."""
        return replace(self.step, seq_len=self.phases[phase].seq_len)

    def phase_batch(self, phase: int) -> Batch:
        """Shapes and shardings of one global batch of a phase."""
        return self._abstract_batch(self.batch_shapes[phase], self.phases[phase].seq_len)

    def _abstract_batch(self, batch: BatchShape, length: int) -> Batch:
        shape = (batch.accumulation, batch.sequences, batch.stored(length))
        field = jax.ShapeDtypeStruct(shape, np.int32, sharding=self.batch_sharding)
        return dict.fromkeys(FIELDS, field)  # type: ignore[arg-type]

    def init_state(self) -> TrainState:
        """The initial train state, each leaf created in its shards."""
        return init_state(self.model, self.step.optimizer, self.config.precision, self.abstract, self.config.train.seed)


def bind(config: RunConfig, devices: Sequence[Any] | None = None) -> Bound:
    """`resolve` and `Resolved.bind` on these devices (default: all of this job); raises ConfigError like `resolve`."""
    return resolve(config, build_topology(config.mesh, config.cluster, devices, host_numbers())).bind()


def resolve(config: RunConfig, topology: Topology) -> Resolved:
    """Derive mesh, rules, layout, batch arithmetic, stages and schedules of a configuration on a topology.

    Raises ConfigError for whatever training would refuse before it reads data.
    """
    rules = resolve_rules(config.rules)
    canonical, model = _models(config, topology)
    layout = build_layout(model.params, rules, topology.sizes, Precision(config.precision).separate_master_params)
    phases = phases_of(config.data, config.train)
    shapes = _batch_shapes(config, topology, rules, layout, (None, *(phase.global_batch for phase in phases)))
    schedule, notes = None, layout.notes
    if isinstance(model, StagedModel):
        pipe = topology.sizes["pipe"]
        # Phases of data.schedule differ in microbatches: a phase that cannot run is refused before the first step.
        schedule, *_ = (
            make_schedule(config.pipeline.schedule, schedule_shape(config.pipeline, pipe, shape.accumulation))
            for shape in shapes
        )
        notes += pipeline_notes(config, model, layout, schedule)
    else:
        check_segments(config.remat, config.model)
    schedule_end(config.optimizer, config.train.steps)
    build_optimizer(config.optimizer, canonical.params)
    check_remat(config.remat, config.model, ACTIVATIONS[config.model.activation].gated)
    check_experts(config.model)
    check_losses(config)
    check_options(config.xla)
    notes += check_recipe(config.precision, topology.devices.flat[0], topology.sizes["pipe"], config.model.n_layers)
    attention = _attention(config, topology, layout, (config.data.seq_len, *(phase.seq_len for phase in phases)))
    return Resolved(config, topology, model, rules, layout, shapes[0], phases, shapes[1:], schedule, attention, notes)


def assign_stages(config: RunConfig, model: Model, stages: int) -> Stages:
    """Which layers of `model` each of `stages` stages holds; raises ConfigError where they cannot be split so."""
    chunks = schedule_shape(config.pipeline, stages, config.pipeline.microbatches or 1).chunks
    split = split_stages(model, config.pipeline, stages, chunks)
    loops_of(split.pattern, config.remat.every)
    return Stages(split.layers, split.pattern, model.stacks)


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


def _models(config: RunConfig, topology: Topology) -> tuple[Model, Model]:
    """The model in the model's order of layers, and in the order in which the mesh stores them."""
    canonical = build(config.model)
    if topology.sizes["pipe"] == 1:
        return canonical, canonical
    return canonical, stage_model(canonical, assign_stages(config, canonical, topology.sizes["pipe"]))


def _batch_shapes(
    config: RunConfig, topology: Topology, rules: Rules, layout: Layout, batches: Sequence[int | None]
) -> tuple[BatchShape, ...]:
    """Batch arithmetic of each global batch; None is train.global_batch."""
    sizes, train = topology.sizes, train_of(config)
    devices = math.prod(sizes[axis] for axis in layout.sequence_axes)
    multiple = math.prod(sizes[axis] for axis in rules.axes("residual_seq"))
    return tuple(
        replace(split_batch(train, sizes, layout.batch_axes, batch), sequence_devices=devices, length_multiple=multiple)
        for batch in batches
    )


def _attention(
    config: RunConfig, topology: Topology, layout: Layout, lengths: Sequence[int]
) -> dict[int, BackendChoice]:
    """Backend of each sequence length; what depends on the card is neither chosen nor checked where it is unknown."""
    device, split = topology.devices.flat[0], bool(layout.sequence_axes)
    described = isinstance(device, DescribedDevice)
    unknown = described and device.compute_capability is None
    if unknown and config.attention.backend not in DEVICE_INDEPENDENT:
        return {}
    choices = {length: choose_for(config, device, length, split, described) for length in dict.fromkeys(lengths)}
    return {} if unknown else choices
