"""Buffer slots for a stage's residuals, in the memory of the device or of the host.

S slots, N iterations of a loop, B sequences, L length, D model. The functions here see one stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.mesh.constraints import active_axes, active_mesh
from jaxtrain.mesh.param import make_spec
from jaxtrain.mesh.shard_map import shard_mapped
from jaxtrain.ops.batching import one_by_one

RESIDUAL_STREAM = ("batch", "residual_seq", "hidden")
"""Logical names of the residual stream's dims."""


def write_slot(buffer: jax.Array, value: jax.Array, slot: jax.Array, n: jax.Array) -> jax.Array:
    """[S, N, ...] with `value` written to iteration n of a slot; unchanged where the slot is -1."""
    index = jnp.maximum(slot, 0)
    return buffer.at[index, n].set(jnp.where(slot >= 0, value, buffer[index, n]))


def read_slot(buffer: jax.Array, slot: jax.Array, n: jax.Array) -> jax.Array:
    """The value of iteration n of a slot; an arbitrary value where the slot is -1."""
    return buffer[jnp.maximum(slot, 0), n]


@dataclass(frozen=True)
class SlotStore:
    """Memory for the saved inputs of segments [B, L, D]: make buffers [P, S, N, B, L, D], write and read slots."""

    make: Callable[[int, jax.ShapeDtypeStruct, int], jax.Array]
    write: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
    read: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def _zeros(stages: int, slot_shape: jax.ShapeDtypeStruct, slots: int) -> jax.Array:
    return jnp.zeros((stages, slots, *slot_shape.shape), slot_shape.dtype)


def _host_zeros(stages: int, slot_shape: jax.ShapeDtypeStruct, slots: int) -> jax.Array:
    # One more slot receives the values that belong to none: preserving a slot would read it back from the host.
    return jax.device_put(_zeros(stages, slot_shape, slots + 1), jax.memory.Space.Host)


def _host_write(buffer: jax.Array, value: jax.Array, slot: jax.Array, n: jax.Array) -> jax.Array:
    def write(buffer: jax.Array, value: jax.Array, slot: jax.Array, n: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(buffer, value[None, None], (slot, n, 0, 0, 0))

    index = jnp.where(slot >= 0, slot, buffer.shape[0] - 1)
    return _per_device(write, 2, 0)(buffer, jax.device_put(value, jax.memory.Space.Host), index, n)


def _host_read(buffer: jax.Array, slot: jax.Array, n: jax.Array) -> jax.Array:
    def read(buffer: jax.Array, slot: jax.Array, n: jax.Array) -> jax.Array:
        return lax.dynamic_slice(buffer, (slot, n, 0, 0, 0), (1, 1, *buffer.shape[2:]))[0, 0]

    return jax.device_put(_per_device(read, 1, 2)(buffer, jnp.maximum(slot, 0), n), jax.memory.Space.Device)


def _per_device(function: Callable[..., jax.Array], arrays: int, dropped: int) -> Callable[..., jax.Array]:
    """Apply `function` to each device's shard, so that it stays a plain slice under vmap.

    vmap would make a scatter or gather, which XLA cannot run on host memory. The first of `arrays` arguments is a
    buffer, the second a value; the result is a buffer without its first `dropped` dims.
    """
    unbatched = one_by_one(function)
    if active_mesh() is None:
        return unbatched
    stream = [active_axes(name) for name in RESIDUAL_STREAM]
    buffer, value, number = make_spec([(), (), *stream]), make_spec(stream), make_spec([])
    inputs = (buffer, value)[:arrays] + (number, number)
    return shard_mapped(unbatched, inputs, value if dropped else buffer)


DEVICE_STORE = SlotStore(_zeros, write_slot, read_slot)
HOST_STORE = SlotStore(_host_zeros, _host_write, _host_read)
