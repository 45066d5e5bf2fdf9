"""Batch arithmetic: global batch = microbatch x replicas x accumulation, and which sequences a process feeds.

Sequence g of the global batch (the order in which the stream yields them) is sequence g // A of microbatch g mod A.
The map does not depend on processes or devices, so every layout computes the same microbatches from the same sequences,
and any block of the batch dimension that a process holds is one contiguous range of sequences.

Where devices share sequences, the tokens of a sequence are stored in zig-zag order (ops/zigzag.py): they are reordered
here, on the host, and nowhere else. The model reads a token's segment and position, never its index.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxtrain.config import Axis, ConfigError, TrainConfig
from jaxtrain.data import FIELDS, IGNORE
from jaxtrain.mesh.layout import Layout
from jaxtrain.ops.zigzag import padded_length, zigzag_order


@dataclass(frozen=True)
class BatchShape:
    """How one global batch is split: sequences, replicas, microbatches a step.

    `sequence_devices` share each sequence, whose stored length is also a multiple of `length_multiple`.
    """

    global_batch: int
    replicas: int
    accumulation: int
    sequence_devices: int = 1
    length_multiple: int = 1

    @property
    def sequences(self) -> int:
        """Sequences of one microbatch over all replicas."""
        return self.global_batch // self.accumulation

    @property
    def microbatch(self) -> int:
        """Sequences that one replica computes at once."""
        return self.sequences // self.replicas

    def stored(self, length: int) -> int:
        """Tokens of a sequence of `length` as devices store it, with the padding that makes it divisible."""
        return padded_length(length, self.sequence_devices, self.length_multiple)

    def show_stored(self, length: int) -> str:
        """How many tokens of a sequence of `length` each device holds, and the padding, as text."""
        stored = self.stored(length)
        shares = f"{stored // self.sequence_devices} tokens of each sequence a device"
        if stored == length:
            return shares
        return (
            f"{shares}; {length} tokens do not divide and are padded to {stored}: {stored - length} a sequence, "
            f"{(stored - length) * self.global_batch:,} a step, not scored"
        )


def split_batch(
    train: TrainConfig, sizes: dict[Axis, int], batch_axes: tuple[Axis, ...], global_batch: int | None = None
) -> BatchShape:
    """Fill in microbatch or accumulation; raises ConfigError with the arithmetic when the numbers disagree.

    `global_batch` is that of one phase of data.schedule; None is train.global_batch.
    """
    replicas = math.prod(sizes[axis] for axis in batch_axes)
    total, micro, accumulation = global_batch or train.global_batch, train.microbatch, train.accumulation
    setting = "train.global_batch" if total == train.global_batch else "data.schedule: global_batch"
    axes = " x ".join(f"{axis} {sizes[axis]}" for axis in batch_axes) or "one device"
    if micro is not None and accumulation is None:
        accumulation = max(total // (micro * replicas), 1)
    accumulation = accumulation or 1
    if micro is not None and micro * replicas * accumulation != total:
        raise ConfigError(
            f"{setting} {total} is not train.microbatch {micro} x {replicas} replicas ({axes}) x "
            f"accumulation {accumulation} = {micro * replicas * accumulation}: change one of them"
        )
    if total % (replicas * accumulation):
        raise ConfigError(
            f"{setting} {total} does not divide into {replicas} replicas ({axes}) x accumulation "
            f"{accumulation} = {replicas * accumulation}: use a multiple of {replicas * accumulation}, "
            "another mesh or another train.accumulation"
        )
    return BatchShape(total, replicas, accumulation)


def batch_sharding(shape: BatchShape, layout: Layout, mesh: jax.sharding.Mesh) -> NamedSharding:
    """Sharding of a [A, B, L] batch array: microbatches whole, sequences over the batch axes, deferred first."""
    outer = layout.deferred_axes
    axes = (*outer, *(axis for axis in layout.batch_axes if axis not in outer))
    return NamedSharding(mesh, jax.sharding.PartitionSpec(None, axes or None, layout.sequence_axes or None))


def owned_rows(shape: BatchShape, sharding: NamedSharding, length: int) -> tuple[int, int]:
    """The range [lo, hi) of the global batch's sequences that the devices of this process hold."""
    dims = (shape.accumulation, shape.sequences, shape.stored(length))
    indices = sharding.addressable_devices_indices_map(dims).values()
    blocks = [index[1].indices(shape.sequences) for index in indices if index is not None]
    return min(b[0] for b in blocks) * shape.accumulation, max(b[1] for b in blocks) * shape.accumulation


def shard_batch(
    sequences: dict[str, np.ndarray], first: int, shape: BatchShape, sharding: NamedSharding
) -> dict[str, jax.Array]:
    """Host sequences [n, L] that start at global index `first` -> global arrays [A, B, stored L]."""

    def array(name: str) -> jax.Array:
        field = _stored(sequences[name], shape, IGNORE if name == "labels" else 0)

        def block(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            lo, hi, _ = index[1].indices(shape.sequences)
            run = field[lo * shape.accumulation - first : hi * shape.accumulation - first]
            return run[:, index[2]].reshape(hi - lo, shape.accumulation, -1).swapaxes(0, 1)

        return jax.make_array_from_callback((shape.accumulation, shape.sequences, field.shape[1]), sharding, block)

    return {name: array(name) for name in FIELDS}


def _stored(field: np.ndarray, shape: BatchShape, padding: int) -> np.ndarray:
    """Sequences [n, L] as devices store them: padded at the end, in zig-zag order."""
    if shape.sequence_devices == 1:
        return field
    length = shape.stored(field.shape[1])
    padded = np.pad(field, ((0, 0), (0, length - field.shape[1])), constant_values=padding)
    return padded[:, zigzag_order(length, shape.sequence_devices)]
