"""Zig-zag order: the tokens of a sequence that each device holds, so that causal attention is equal work on all.

A sequence over n devices is cut into 2n chunks; device i holds chunks i and 2n - 1 - i, the earlier one first. A query
of chunk a sees the chunks up to a, so every device scores 2n + 1 pairs of chunks (Brandon et al. 2023).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def chunks_of(device: int, devices: int) -> tuple[int, int]:
    """Indices of the two chunks, of 2 x devices, that one device holds."""
    return device, 2 * devices - 1 - device


def zigzag_order(length: int, devices: int) -> NDArray[np.int64]:
    """Index in the sequence of each stored token [length]; device n holds the n-th of `devices` equal parts.

    `length` is a multiple of 2 x devices; one device stores the natural order.
    """
    chunks = np.arange(length).reshape(2 * devices, -1)
    return np.concatenate([chunks[list(chunks_of(device, devices))].ravel() for device in range(devices)])


def shifted_indices(length: int, devices: int, by: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Storage index of the token `by` positions later in the sequence, for each stored token, and whether it exists.

    Both [length]. The index of a token without a later one is its own.
    """
    order = zigzag_order(length, devices) if devices > 1 else np.arange(length)
    exists = order + by < length
    return np.argsort(order)[np.where(exists, order + by, order)], exists


def padded_length(length: int, devices: int, multiple: int = 1) -> int:
    """The smallest length >= `length` that 2 x devices and `multiple` divide; one device needs no padding."""
    step = int(np.lcm(2 * devices, multiple)) if devices > 1 else 1
    return -(-length // step) * step


def scored_blocks(order: NDArray[np.int64], devices: int, block: int) -> NDArray[np.int64]:
    """Number of `block` x `block` blocks of scores with a visible pair in causal attention, per device."""
    first, last = (pick(order.reshape(-1, block), axis=1) for pick in (np.min, np.max))
    return (last[:, None] >= first[None, :]).reshape(devices, -1).sum(axis=1)
