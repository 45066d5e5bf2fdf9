"""Zig-zag order: which tokens of a row a device holds, so that causal attention is equal work for all.

A row split over n devices is cut into 2n chunks; device i holds chunks i and 2n - 1 - i, the early one first. A query
of chunk a sees the chunks up to a, so that every device has 2n + 1 pairs of chunks to score (Brandon et al. 2023).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def chunks_of(place: int, devices: int) -> tuple[int, int]:
    """The two chunks, of 2 x devices, that the device at `place` holds."""
    return place, 2 * devices - 1 - place


def row_order(length: int, devices: int) -> NDArray[np.int64]:
    """Index in the row of each stored token [length]; the n-th of `devices` holds the n-th run of them.

    `length` is a multiple of 2 x devices; one device keeps the order of the row.
    """
    chunks = np.arange(length).reshape(2 * devices, -1)
    return np.concatenate([chunks[list(chunks_of(place, devices))].ravel() for place in range(devices)])


def places_after(length: int, devices: int, by: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Where the token `by` further in the row is stored, for each stored token, and whether the row has it [length].

    A token without one has its own place.
    """
    order = row_order(length, devices) if devices > 1 else np.arange(length)
    there = order + by < length
    return np.argsort(order)[np.where(there, order + by, order)], there


def padded_length(length: int, devices: int, multiple: int = 1) -> int:
    """The least length from `length` up that both 2 x devices and `multiple` divide; one device needs no padding."""
    step = int(np.lcm(2 * devices, multiple)) if devices > 1 else 1
    return -(-length // step) * step


def scored_blocks(order: NDArray[np.int64], devices: int, block: int) -> NDArray[np.int64]:
    """Blocks of `block` x `block` scores with anything visible in causal attention, those of each device's queries."""
    first, last = (pick(order.reshape(-1, block), axis=1) for pick in (np.min, np.max))
    return (last[:, None] >= first[None, :]).reshape(devices, -1).sum(axis=1)
