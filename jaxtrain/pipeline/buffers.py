"""Slots that a stage writes and reads in its loops, in the device's memory or in the host's.

S slots, N turns of a loop, B rows, L length, D model. A function here sees one stage.
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

RESIDUAL = ("batch", "residual_seq", "hidden")
"""Logical names of the residual stream's dims."""


def put(buffer: jax.Array, value: jax.Array, slot: jax.Array, n: jax.Array) -> jax.Array:
    """[S, N, ...] with `value` written in place into turn n of a slot; nowhere where it is -1."""
    at = jnp.maximum(slot, 0)
    return buffer.at[at, n].set(jnp.where(slot >= 0, value, buffer[at, n]))


def take(buffer: jax.Array, slot: jax.Array, n: jax.Array) -> jax.Array:
    """What lies in turn n of a slot; anything where it is -1."""
    return buffer[jnp.maximum(slot, 0), n]


@dataclass(frozen=True)
class SlotStore:
    """Where kept inputs of layers [B, L, D] lie: how slots are made [P, S, N, B, L, D], written and read."""

    make: Callable[[int, jax.ShapeDtypeStruct, int], jax.Array]
    put: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
    take: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def _zeros(stages: int, one: jax.ShapeDtypeStruct, slots: int) -> jax.Array:
    return jnp.zeros((stages, slots, *one.shape), one.dtype)


def _host_zeros(stages: int, one: jax.ShapeDtypeStruct, slots: int) -> jax.Array:
    # One more, into which goes what is for no slot: reading back what lies there would be a transfer.
    return jax.device_put(_zeros(stages, one, slots + 1), jax.memory.Space.Host)


def _host_put(buffer: jax.Array, value: jax.Array, slot: jax.Array, n: jax.Array) -> jax.Array:
    def write(buffer: jax.Array, value: jax.Array, slot: jax.Array, n: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(buffer, value[None, None], (slot, n, 0, 0, 0))

    spot = jnp.where(slot >= 0, slot, buffer.shape[0] - 1)
    return _by_device(write, 2, 0)(buffer, jax.device_put(value, jax.memory.Space.Host), spot, n)


def _host_take(buffer: jax.Array, slot: jax.Array, n: jax.Array) -> jax.Array:
    def read(buffer: jax.Array, slot: jax.Array, n: jax.Array) -> jax.Array:
        return lax.dynamic_slice(buffer, (slot, n, 0, 0, 0), (1, 1, *buffer.shape[2:]))[0, 0]

    return jax.device_put(_by_device(read, 1, 2)(buffer, jnp.maximum(slot, 0), n), jax.memory.Space.Device)


def _by_device(function: Callable[..., jax.Array], arrays: int, skipped: int) -> Callable[..., jax.Array]:
    """Each device moves its own shard by a plain slice: scatters and gathers, which vmap would make, are for devices.

    The first argument is a buffer, a second of two `arrays` a value; the result is a buffer less `skipped` dims.
    """
    alone = one_by_one(function)
    if active_mesh() is None:
        return alone
    residual = [active_axes(name) for name in RESIDUAL]
    buffer, value, number = make_spec([(), (), *residual]), make_spec(residual), make_spec([])
    inputs = (buffer, value)[:arrays] + (number, number)
    return shard_mapped(alone, inputs, value if skipped else buffer)


ON_DEVICE = SlotStore(_zeros, put, take)
HOSTED = SlotStore(_host_zeros, _host_put, _host_take)
