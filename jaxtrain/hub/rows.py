"""How one tensor of the hub lies in a parameter, slice by slice.

A row names the dims of both by letters: "HE,D" is a hub's matrix whose rows are heads x width and whose columns are the
model's width, "DHE" the parameter. A hub's dim is a product of letters, outermost first; a parameter's dim is one.

D model, H heads, K kv heads, E head width, F feed-forward, V vocabulary, X experts, R latent, L learned positions,
I inputs of a projection; P counts parameters that share one tensor of the hub.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Span = tuple[int, int]
Sizes = Mapping[str, int]

PART = "P"
ROTARY = "rotary"


@dataclass(frozen=True)
class TensorRow:
    """One tensor of the hub as (a part of) one parameter."""

    name: str
    """The hub's name; {layer} and {expert} are numbers, and stand for leading dims of the parameter."""
    hub: str
    """Dims of the hub's tensor."""
    ours: str
    """Dims of the parameter, those that the name counts left out."""
    part: int = 0
    """Which entry of P this parameter is."""
    parts: int = 1
    """Length of P."""
    turned: str = ""
    """The rotary tail of this dim rotates neighbours in the hub, and halves here."""


def at(name: str, hub: str, ours: str = "", part: int = 0, parts: int = 1, turned: str = "") -> TensorRow:
    """A row; `ours` is the hub's dims in their order where it is left out."""
    return TensorRow(name, hub, ours or hub.replace(",", ""), part, parts, turned)


def hub_shape(row: TensorRow, sizes: Sizes) -> tuple[int, ...]:
    """Shape of the hub's tensor; `sizes` of every letter."""
    return tuple(math.prod(_size(row, sizes, letter) for letter in dim) for dim in row.hub.split(","))


def read(
    row: TensorRow, sizes: Sizes, spans: Sequence[Span], fetch: Callable[[tuple[slice, ...]], np.ndarray]
) -> np.ndarray:
    """The block `spans` (one a dim of ours) of the parameter, from the slices of the hub's tensor that hold it."""
    wanted = dict(zip(row.ours, spans, strict=True)) | {PART: (row.part, row.part + 1)}
    if row.turned:
        wanted[row.turned] = (0, sizes[row.turned])
    slices, shape, cuts = [], [], []
    for dim in row.hub.split(","):
        run, lengths, inner = _cover(dim, [_size(row, sizes, letter) for letter in dim], [wanted[x] for x in dim])
        slices.append(run)
        shape += lengths
        cuts += inner
    block = fetch(tuple(slices)).reshape(shape)[tuple(cuts)]
    letters = row.hub.replace(",", "")
    if PART in letters:
        block = block.squeeze(letters.index(PART))
        letters = letters.replace(PART, "")
    block = block.transpose([letters.index(letter) for letter in row.ours])
    if row.turned:
        axis = row.ours.index(row.turned)
        block = block.take(halves_from_pairs(sizes[row.turned], sizes[ROTARY])[slice(*spans[axis])], axis)
    return block


def write(rows: Sequence[tuple[TensorRow, np.ndarray]], sizes: Sizes) -> np.ndarray:
    """The hub's tensor that these rows, with their whole parameters, make up."""
    ordered = sorted(rows, key=lambda pair: pair[0].part)
    first = ordered[0][0]
    letters = first.hub.replace(",", "")
    arrays = []
    for row, array in ordered:
        if row.turned:
            order = np.argsort(halves_from_pairs(sizes[row.turned], sizes[ROTARY]))
            array = array.take(order, row.ours.index(row.turned))
        arrays.append(array.transpose([row.ours.index(letter) for letter in letters if letter != PART]))
    whole = np.stack(arrays, letters.index(PART)) if PART in letters else arrays[0]
    return whole.reshape(hub_shape(first, sizes))


def halves_from_pairs(width: int, rotary: int) -> np.ndarray:
    """Index [width] that takes the last `rotary` entries from pairs (2i, 2i + 1) to pairs (i, i + rotary / 2)."""
    turned = np.arange(width)
    tail = turned[width - rotary :].copy()
    turned[width - rotary :] = np.concatenate([tail[0::2], tail[1::2]])
    return turned


def _size(row: TensorRow, sizes: Sizes, letter: str) -> int:
    return row.parts if letter == PART else sizes[letter]


def _cover(dim: str, lengths: list[int], spans: list[Span]) -> tuple[slice, list[int], list[slice]]:
    """The run of a product dim that holds all `spans`, its shape by letters, and the cut that leaves the spans."""
    start = 0
    for depth, (lo, hi) in enumerate(spans):
        inner = math.prod(lengths[depth + 1 :])
        # Only under a single outer entry is a span of the next letter one run.
        if hi - lo != 1 or depth == len(dim) - 1:
            break
        start += lo * inner
    shape = [1] * depth + [hi - lo] + lengths[depth + 1 :]
    cuts = [slice(None)] * (depth + 1) + [slice(*span) for span in spans[depth + 1 :]]
    return slice(start + lo * inner, start + hi * inner), shape, cuts
