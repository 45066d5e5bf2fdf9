"""The lines that a run prints before its first step: everything that was resolved, by name."""

from __future__ import annotations

from jaxtrain.config import RunConfig
from jaxtrain.data import Corpus
from jaxtrain.mesh.param import show_axes
from jaxtrain.train.experts import loads_every
from jaxtrain.train.resolve import Bound
from jaxtrain.train.state import state_bytes_per_device


def startup_report(bound: Bound, corpus: Corpus) -> list[str]:
    """Model, mesh, batch, attention, corpus and the notes of the resolved configuration, one line each."""
    config, context = bound.config, bound.config.attention.context_parallel
    sizes = {axis: size for axis, size in bound.topology.sizes.items() if size > 1}
    mesh = " x ".join(f"{axis} {size}" for axis, size in sizes.items()) or "one device"
    numbers = ", ".join(
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}"
        for name, value in corpus.describe().items()
    )
    phases = list(zip(bound.phases, bound.batch_shapes, strict=True))
    return [
        f"model: {bound.model.count():,} parameters, {config.precision.compute}; mesh: {mesh}; "
        f"rules: {', '.join(config.rules.preset)}",
        *(
            f"batch{f' from step {phase.start + 1} on' if phase.start else ''}: {shape.global_batch} sequences = "
            f"{shape.microbatch} a microbatch x {shape.replicas} replicas x {shape.accumulation} microbatches, "
            f"{phase.seq_len} tokens each"
            for phase, shape in phases
        ),
        *dict.fromkeys(
            f"sequences are split over {show_axes(bound.layout.sequence_axes)} in zig-zag order, "
            f"attention.context_parallel {context}: {shape.show_stored(phase.seq_len)}"
            for phase, shape in phases
            if shape.sequence_devices > 1
        ),
        *(
            f"attention{f' of sequences of {length}' if len(bound.attention) > 1 else ''}: {choice}"
            for length, choice in bound.attention.items()
        ),
        *(
            f"balancing loss over the global batch: each step of {shape.accumulation} microbatches counts the load of "
            "experts in a forward pass of its own before the first one"
            for shape in dict.fromkeys(bound.batch_shapes)
            if bound.step.counts_first(shape.accumulation)
        ),
        *(
            f"expert_load is recorded every {every} steps only: it has {config.model.moe.experts} numbers a layer"
            for every in [loads_every(config.model)]
            if every > 1
        ),
        f"corpus: {numbers}",
        f"tokenizer: {corpus.tokenizer.describe()}",
        *replay_notes(bound),
        *(f"layout: {note}" for note in bound.notes),
    ]


def unscored_notes(config: RunConfig, corpus: Corpus) -> list[str]:
    """Documents that take room in the batches and train nothing, a line for each source that has some."""
    return [
        f"data.sources[{number}] ({config.data.sources[number].path}): {count:,} training documents have no scored "
        "token: they take room in the batches and train nothing"
        for number, count in enumerate(corpus.unscored)
        if count
    ]


def replay_notes(bound: Bound) -> list[str]:
    """What guard.replay_every costs and covers here."""
    guard, every = bound.config.guard, bound.config.checkpoint.every
    if guard.replay_every is None:
        return []
    size = sum(state_bytes_per_device(bound.abstract).values())
    lines = [
        f"replay: one step in {guard.replay_every} is computed twice and compared on all devices (guard.replay_every); "
        f"it holds a second state, {size:,} bytes more on each device"
    ]
    if every is not None and every % guard.replay_every:
        lines.append(
            f"replay: checkpoint.every {every} is no multiple of guard.replay_every {guard.replay_every}: checkpoints "
            "between replays are not compared before they are saved"
        )
    return lines
