"""Notes of a resolved configuration: costs and consequences that no setting states."""

from __future__ import annotations

from functools import partial

from jaxtrain.config import RunConfig
from jaxtrain.mesh.layout import Layout, bytes_per_device
from jaxtrain.mesh.param import show_axes
from jaxtrain.pipeline.staged import StagedModel
from jaxtrain.pipeline.table import Schedule


def pipeline_notes(config: RunConfig, model: StagedModel, layout: Layout, schedule: Schedule) -> tuple[str, ...]:
    """Bubble, memory and traffic of a pipelined run."""
    notes = [
        f"pipeline: {schedule.name}, {schedule.ticks} ticks a step, {schedule.bubble():.1%} of the time idle; "
        f"a stage keeps layer inputs of {schedule.residual_slots} microbatches"
    ]
    slots = model.stages.layers.size
    if slots > config.model.n_layers:
        notes.append(f"stages differ: {slots - config.model.n_layers} of {slots} layer slots are empty, and counted")
    if config.remat.policy == "none":
        notes.append(
            "pipeline: remat.policy none acts as full, the backward pass computes a layer again from its saved input; "
            "dots and names save more of it"
        )
    itemsize = 4 if config.precision.compute == "float32" else 2
    if config.model.mtp:
        held = bytes_per_device(model.params["mtp"], layout.weights["mtp"], layout.sizes, itemsize)
        notes.append(
            f"pipeline: blocks of model.mtp {config.model.mtp} belong to no stage: all stages compute them when a "
            f"microbatch leaves the last stage, and each device holds {held / 1e9:.3g} GB of their weights"
        )
    gathered = tuple(axis for axis in layout.batch_axes if axis not in layout.deferred_axes)
    if gathered:
        sizes = {**layout.sizes, **dict.fromkeys(gathered, 1)}
        layers, specs = ({stack: tree[stack] for stack in model.stages.rows} for tree in (model.params, layout.weights))
        bytes_of = partial(bytes_per_device, layers, specs, itemsize=itemsize)
        tick = (bytes_of(sizes=sizes) - bytes_of(sizes=layout.sizes)) / schedule.shape.chunks
        ticks = sum(schedule.ticks_with(kind) for kind in "FBW")
        notes.append(
            f"pipeline: weights are sharded over {show_axes(gathered)} (ZeRO-3), so each stage gathers its layers "
            f"again in every forward and backward: {tick * ticks / 1e9:.3g} GB to a device a step; rules.preset "
            "zero1 or zero2 gathers once"
        )
    return tuple(notes)
