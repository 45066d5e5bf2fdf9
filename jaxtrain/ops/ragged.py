"""An all-to-all of slices of uneven size along mesh axes, inside a manual region.

S rows sent, R rows of the result, D width, N devices of a group, Z slices, as many to each device.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.ops.batching import one_by_one


class Slices(NamedTuple):
    """What a device sends; slice i goes to device i // (Z / N) of its group. All int32 [Z]."""

    start: jax.Array
    """First row in what is sent."""
    size: jax.Array
    """Rows."""
    target: jax.Array
    """First row in the result of the device that receives it."""
    arriving: jax.Array
    """Rows of the slices that come from the others, those of the first device first."""


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def exchange(
    x_SD: jax.Array, there: Slices, back: Slices, rows: int, axes: tuple[str, ...], platform: str
) -> jax.Array:
    """Slices of every device of the group laid where they are wanted [R, D]; rows that nothing reaches are 0.

    `back` undoes `there`: it is the gradient's way.
    """
    send = {"cpu": _emulated}.get(platform, _native)
    return one_by_one(partial(send, rows, axes))(x_SD, there)


def _forward(
    x_SD: jax.Array, there: Slices, back: Slices, rows: int, axes: tuple[str, ...], platform: str
) -> tuple[jax.Array, Any]:
    # The operand's number of rows travels as the shape of an array that is never read.
    return exchange(x_SD, there, back, rows, axes, platform), (there, back, jnp.zeros((x_SD.shape[0], 0)))


def _backward(
    rows: int, axes: tuple[str, ...], platform: str, kept: Any, cotangent_RD: jax.Array
) -> tuple[jax.Array, None, None]:
    there, back, shape = kept
    return exchange(cotangent_RD, back, there, shape.shape[0], axes, platform), None, None


exchange.defvjp(_forward, _backward)


def _native(rows: int, axes: tuple[str, ...], x_SD: jax.Array, slices: Slices) -> jax.Array:
    out_RD = jnp.zeros((rows, x_SD.shape[1]), x_SD.dtype)
    return lax.ragged_all_to_all(x_SD, out_RD, *slices, axis_name=axes)


def _emulated(rows: int, axes: tuple[str, ...], x_SD: jax.Array, slices: Slices) -> jax.Array:
    """The same by an all-to-all of every row to every device, for platforms that have no ragged one."""
    n = lax.axis_size(axes)
    at_S1 = jnp.arange(x_SD.shape[0])[:, None]
    inside_SZ = (at_S1 >= slices.start) & (at_S1 < slices.start + slices.size)
    slice_S, sent_S = jnp.argmax(inside_SZ, axis=1), jnp.any(inside_SZ, axis=1)
    target_S = (slices.target - slices.start)[slice_S] + at_S1[:, 0]
    peer_S = slice_S // (slices.start.shape[0] // n)
    goes_NS = sent_S & (peer_S == jnp.arange(n)[:, None])
    # A row that is not meant for a device goes there too, to a place beyond its result.
    x_NSD = lax.all_to_all(jnp.where(goes_NS[..., None], x_SD, 0), axes, 0, 0, tiled=True)
    target_NS = lax.all_to_all(jnp.where(goes_NS, target_S, rows), axes, 0, 0, tiled=True)
    out_RD = jnp.zeros((rows, x_SD.shape[1]), x_SD.dtype)
    return out_RD.at[target_NS.reshape(-1)].set(x_NSD.reshape(-1, x_SD.shape[1]), mode="drop")
