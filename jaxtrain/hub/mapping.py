"""How a hub tensor maps to a parameter, read and written slice by slice.

A mapping names the dims of both with letters. "HE,D" is a hub matrix of shape [heads * head_dim, d_model], and "DHE" is
the parameter [d_model, heads, head_dim]. A dim of the hub tensor is a product of letters, outermost first; a dim of the
parameter is one letter.

D model, H heads, K kv heads, E head width, F feed-forward, V vocabulary, X experts, R latent, L learned positions,
I inputs of a projection. P counts the parameters that share one hub tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

DimRange = tuple[int, int]
DimSizes = Mapping[str, int]

PART = "P"
ROTARY = "rotary"


@dataclass(frozen=True)
class TensorMapping:
    """One hub tensor as a parameter, or as the part of it that several parameters share."""

    name: str
    """The hub's name; {layer} and {expert} are numbers and correspond to leading dims of the parameter."""
    hub_dims: str
    """Dims of the hub tensor."""
    param_dims: str
    """Dims of the parameter, without the leading dims that the name counts."""
    part: int = 0
    """Index of this parameter in P."""
    parts: int = 1
    """Size of P."""
    interleaved: str = ""
    """The dim in whose rotary tail the hub rotates neighbouring pairs; the parameter rotates its two halves."""


def tensor(
    name: str, hub_dims: str, param_dims: str = "", part: int = 0, parts: int = 1, interleaved: str = ""
) -> TensorMapping:
    """A mapping; `param_dims` defaults to the hub's dims in their order."""
    return TensorMapping(name, hub_dims, param_dims or hub_dims.replace(",", ""), part, parts, interleaved)


def hub_shape(mapping: TensorMapping, sizes: DimSizes) -> tuple[int, ...]:
    """Shape of the hub tensor; `sizes` of every letter."""
    return tuple(math.prod(_size(mapping, sizes, letter) for letter in dim) for dim in mapping.hub_dims.split(","))


def read_block(
    mapping: TensorMapping,
    sizes: DimSizes,
    ranges: Sequence[DimRange],
    fetch: Callable[[tuple[slice, ...]], np.ndarray],
) -> np.ndarray:
    """A block of the parameter, one range per dim, from the slice of the hub tensor that contains it."""
    wanted = dict(zip(mapping.param_dims, ranges, strict=True)) | {PART: (mapping.part, mapping.part + 1)}
    if mapping.interleaved:
        wanted[mapping.interleaved] = (0, sizes[mapping.interleaved])
    slices, shape, cuts = [], [], []
    for dim in mapping.hub_dims.split(","):
        enclosing, dim_shape, dim_cuts = _enclosing_slice(
            dim, [_size(mapping, sizes, letter) for letter in dim], [wanted[letter] for letter in dim]
        )
        slices.append(enclosing)
        shape += dim_shape
        cuts += dim_cuts
    block = fetch(tuple(slices)).reshape(shape)[tuple(cuts)]
    letters = mapping.hub_dims.replace(",", "")
    if PART in letters:
        block = block.squeeze(letters.index(PART))
        letters = letters.replace(PART, "")
    block = block.transpose([letters.index(letter) for letter in mapping.param_dims])
    if mapping.interleaved:
        axis = mapping.param_dims.index(mapping.interleaved)
        order = halves_from_pairs(sizes[mapping.interleaved], sizes[ROTARY])
        block = block.take(order[slice(*ranges[axis])], axis)
    return block


def join_parts(parts: Sequence[tuple[TensorMapping, np.ndarray]], sizes: DimSizes) -> np.ndarray:
    """The hub tensor that consists of these parameters; the inverse of `read_block`."""
    ordered = sorted(parts, key=lambda pair: pair[0].part)
    first = ordered[0][0]
    letters = first.hub_dims.replace(",", "")
    arrays = []
    for mapping, array in ordered:
        if mapping.interleaved:
            order = np.argsort(halves_from_pairs(sizes[mapping.interleaved], sizes[ROTARY]))
            array = array.take(order, mapping.param_dims.index(mapping.interleaved))
        arrays.append(array.transpose([mapping.param_dims.index(letter) for letter in letters if letter != PART]))
    whole = np.stack(arrays, letters.index(PART)) if PART in letters else arrays[0]
    return whole.reshape(hub_shape(first, sizes))


def halves_from_pairs(width: int, rotary: int) -> np.ndarray:
    """Index [width] that reorders the last `rotary` entries from pairs (2i, 2i + 1) to pairs (i, i + rotary / 2)."""
    order = np.arange(width)
    tail = order[width - rotary :].copy()
    order[width - rotary :] = np.concatenate([tail[0::2], tail[1::2]])
    return order


def _size(mapping: TensorMapping, sizes: DimSizes, letter: str) -> int:
    return mapping.parts if letter == PART else sizes[letter]


def _enclosing_slice(dim: str, sizes: list[int], ranges: list[DimRange]) -> tuple[slice, list[int], list[slice]]:
    """The smallest slice of a product dim that contains `ranges`, its shape by letters, and the cut to the ranges."""
    start = 0
    for depth, (lo, hi) in enumerate(ranges):
        inner = math.prod(sizes[depth + 1 :])
        # A range of the next letter is contiguous only under a single index of this letter.
        if hi - lo != 1 or depth == len(dim) - 1:
            break
        start += lo * inner
    shape = [1] * depth + [hi - lo] + sizes[depth + 1 :]
    cuts = [slice(None)] * (depth + 1) + [slice(*dim_range) for dim_range in ranges[depth + 1 :]]
    return slice(start + lo * inner, start + hi * inner), shape, cuts
