"""Ragged all-to-all: slices of uneven size along mesh axes, inside a shard_map region.

S rows of the operand, R rows of the result, D width, N devices of a group, Z slices (Z / N to each device).
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.ops.batching import one_by_one


class RaggedSlices(NamedTuple):
    """The slices that a device sends; slice i goes to device i // (Z / N) of its group. All int32 [Z]."""

    start: jax.Array
    """First row of the slice in the operand."""
    size: jax.Array
    """Number of rows."""
    target: jax.Array
    """First row of the slice in the receiver's result."""
    received: jax.Array
    """Sizes of the slices that this device receives, ordered by sender."""


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def exchange(
    x_SD: jax.Array, slices: RaggedSlices, inverse: RaggedSlices, rows: int, axes: tuple[str, ...], platform: str
) -> jax.Array:
    """Exchange slices among the devices of a group; [R, D] with `rows` = R, rows that receive nothing are 0.

    `inverse` sends every slice back: the gradient uses it.
    """
    send = {"cpu": _emulated}.get(platform, _native)
    return one_by_one(partial(send, rows, axes))(x_SD, slices)


def _forward(
    x_SD: jax.Array, slices: RaggedSlices, inverse: RaggedSlices, rows: int, axes: tuple[str, ...], platform: str
) -> tuple[jax.Array, Any]:
    # An empty array passes the number of rows of the operand to the backward pass.
    return exchange(x_SD, slices, inverse, rows, axes, platform), (slices, inverse, jnp.zeros((x_SD.shape[0], 0)))


def _backward(
    rows: int, axes: tuple[str, ...], platform: str, residuals: Any, cotangent_RD: jax.Array
) -> tuple[jax.Array, None, None]:
    slices, inverse, operand = residuals
    return exchange(cotangent_RD, inverse, slices, operand.shape[0], axes, platform), None, None


exchange.defvjp(_forward, _backward)


def _native(rows: int, axes: tuple[str, ...], x_SD: jax.Array, slices: RaggedSlices) -> jax.Array:
    out_RD = jnp.zeros((rows, x_SD.shape[1]), x_SD.dtype)
    return lax.ragged_all_to_all(x_SD, out_RD, *slices, axis_name=axes)


def _emulated(rows: int, axes: tuple[str, ...], x_SD: jax.Array, slices: RaggedSlices) -> jax.Array:
    """Emulation for platforms without ragged_all_to_all: send every row to every device."""
    n = lax.axis_size(axes)
    index_S1 = jnp.arange(x_SD.shape[0])[:, None]
    inside_SZ = (index_S1 >= slices.start) & (index_S1 < slices.start + slices.size)
    slice_S, sent_S = jnp.argmax(inside_SZ, axis=1), jnp.any(inside_SZ, axis=1)
    target_S = (slices.target - slices.start)[slice_S] + index_S1[:, 0]
    peer_S = slice_S // (slices.start.shape[0] // n)
    sends_NS = sent_S & (peer_S == jnp.arange(n)[:, None])
    # Rows for other devices are sent as zeros with an index past the result, and dropped there.
    x_NSD = lax.all_to_all(jnp.where(sends_NS[..., None], x_SD, 0), axes, 0, 0, tiled=True)
    target_NS = lax.all_to_all(jnp.where(sends_NS, target_S, rows), axes, 0, 0, tiled=True)
    out_RD = jnp.zeros((rows, x_SD.shape[1]), x_SD.dtype)
    return out_RD.at[target_NS.reshape(-1)].set(x_NSD.reshape(-1, x_SD.shape[1]), mode="drop")
