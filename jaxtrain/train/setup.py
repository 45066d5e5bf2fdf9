"""A configuration resolved on devices: everything that is decided before data or weights exist."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxtrain.config import ConfigError, RunConfig, TrainConfig
from jaxtrain.data import FIELDS, Phase, phases_of
from jaxtrain.mesh.layout import Layout, flatten_paths, plan_layout
from jaxtrain.mesh.rules import Rules, resolve_rules
from jaxtrain.mesh.topology import Topology, build_topology
from jaxtrain.nn.model import Model, build
from jaxtrain.numerics.precision import Precision
from jaxtrain.numerics.remat import check_remat
from jaxtrain.optim import build_optimizer, schedule_end
from jaxtrain.pipeline.staged import stage_model
from jaxtrain.pipeline.stages import Stages
from jaxtrain.train.batch import BatchPlan, batch_sharding, plan_batch
from jaxtrain.train.options import check_options
from jaxtrain.train.state import State, abstract_state, create_state, state_bytes_per_device
from jaxtrain.train.step import Batch, Step

UNTRAINABLE = {
    "seq": "context parallelism",
    "expert": "expert dispatch",
}


@dataclass(frozen=True)
class Setup:
    """Mesh, rules, layout, batch plans and step of one configuration.

    `plan` and `abstract_batch` have the shape of train.global_batch and data.length; `phases` are those of the run,
    one without data.schedule, and `plans` how the batches of each are cut.
    """

    config: RunConfig
    topology: Topology
    mesh: Mesh
    model: Model
    rules: Rules
    layout: Layout
    plan: BatchPlan
    phases: tuple[Phase, ...]
    plans: tuple[BatchPlan, ...]
    step: Step

    @cached_property
    def abstract(self) -> State:
        """The train state's shapes and shardings."""
        return abstract_state(self.model, self.step.optimizer, self.config.precision, self.layout, self.mesh)

    @cached_property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of a batch field [A, B, L]."""
        return batch_sharding(self.plan, self.layout, self.mesh)

    @cached_property
    def abstract_batch(self) -> Batch:
        """Shapes of one global batch."""
        return self._batch_of(self.plan, self.config.data.length)

    def phase_batch(self, phase: int) -> Batch:
        """Shapes of one global batch of a phase."""
        return self._batch_of(self.plans[phase], self.phases[phase].length)

    def _batch_of(self, plan: BatchPlan, length: int) -> Batch:
        shape = (plan.accumulation, plan.rows, length)
        field = jax.ShapeDtypeStruct(shape, np.int32, sharding=self.batch_sharding)
        return dict.fromkeys(FIELDS, field)  # type: ignore[arg-type]

    def create_state(self) -> State:
        """A newborn state, each leaf in its shards."""
        return create_state(
            self.model, self.step.optimizer, self.config.precision, self.abstract, self.config.train.seed
        )


def resolve(config: RunConfig, devices: list[Any] | None = None) -> Setup:
    """Resolve mesh, rules, layout and batch of a configuration on these devices (default: all of this job).

    Raises ConfigError where they do not fit together, or where an axis is asked for that cannot be trained yet.
    """
    topology = build_topology(config.mesh, config.cluster, devices)
    for axis, what in UNTRAINABLE.items():
        if topology.sizes[axis] > 1:  # type: ignore[index]
            raise ConfigError(
                f"mesh.{axis} is {topology.sizes[axis]}: training with {what} is not built yet; "  # type: ignore[index]
                f"set mesh.{axis}: 1 (inspect describes such a mesh already)"
            )
    mesh = topology.mesh()
    model = build(config.model)
    if topology.sizes["pipe"] > 1:
        model = stage_model(model, plan_stages(config, topology.sizes["pipe"]))
    rules = resolve_rules(config.rules)
    layout = plan_layout(model.params, rules, topology.sizes, Precision(config.precision).separate_masters)
    phases = phases_of(config.data, config.train)
    plan, *plans = (
        plan_batch(_train_of(config), topology.sizes, layout.batch_axes, rows)
        for rows in (None, *(phase.global_batch for phase in phases))
    )
    schedule_end(config.optimizer, config.train.updates)
    check_remat(config.remat, config.model)
    check_options(config.xla)
    optimizer = build_optimizer(config.optimizer, model.params)
    step = Step(config, model, optimizer, layout, rules, mesh)
    return Setup(config, topology, mesh, model, rules, layout, plan, phases, tuple(plans), step)


def plan_stages(config: RunConfig, stages: int) -> Stages:
    """Which layers lie on which of `stages` stages."""
    counts = [config.model.n_layers // stages] * stages
    return Stages.of(counts, stages)


def _train_of(config: RunConfig) -> TrainConfig:
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
    flat = {
        part: flatten_paths(getattr(setup.layout, part)) for part in ("weights", "masters", "gradients", "optimizer")
    }
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
