"""Any block of a parameter comes from the slices of the hub's tensor that hold it, against plain numpy on the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.hub.rows import ROTARY, TensorRow, at, hub_shape, read, write

SIZES = {"D": 5, "H": 4, "K": 2, "E": 6, "F": 7, "X": 3, "R": 8, "V": 9, ROTARY: 4}
D, H, E, F, X, R = (SIZES[letter] for letter in "DHEFXR")


def neighbours_to_halves(array: np.ndarray, axis: int) -> np.ndarray:
    """One entry at a time: pairs (2i, 2i + 1) of the last 4 become (i, i + 2)."""
    moved = np.moveaxis(array.copy(), axis, 0)
    source, tail = np.moveaxis(array, axis, 0), array.shape[axis] - 4
    for pair in range(2):
        moved[tail + pair], moved[tail + 2 + pair] = source[tail + 2 * pair], source[tail + 2 * pair + 1]
    return np.moveaxis(moved, 0, axis)


# (rows that make up one tensor of the hub, the parameters of a tensor in plain numpy)
CASES: dict[str, tuple[list[TensorRow], Any]] = {
    "linear": ([at("w", "F,D", "DF")], lambda t: [t.T]),
    "heads": ([at("w", "HE,D", "DHE")], lambda t: [t.reshape(H, E, D).transpose(2, 0, 1)]),
    "out": ([at("w", "D,HE", "HED")], lambda t: [t.T.reshape(H, E, D)]),
    "joined": (
        [at("w", "D,PHE", "DHE", i, 3) for i in range(3)], lambda t: [p.reshape(D, H, E) for p in np.split(t, 3, 1)],
    ),
    "joined biases": ([at("w", "PHE", "HE", i, 3) for i in range(3)],
                      lambda t: [p.reshape(H, E) for p in np.split(t, 3)]),
    "woven experts": ([at("w", "X,D,FP", "XDF", i, 2) for i in range(2)], lambda t: [t[..., 0::2], t[..., 1::2]]),
    "turned heads": (
        [at("w", "HE,R", "RHE", turned="E")],
        lambda t: [neighbours_to_halves(t.T.reshape(R, H, E), 2)],
    ),
    "turned tail": ([at("w", "R,D", "DR", turned="R")], lambda t: [neighbours_to_halves(t.T, 1)]),
    "vector": ([at("w", "D")], lambda t: [t]),
}  # fmt: skip


def tensor_of(rows: list[TensorRow]) -> np.ndarray:
    shape = hub_shape(rows[0], SIZES)
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(list(CASES)), data=st.data())
def test_any_block_is_read_from_its_slices(name: str, data: st.DataObject) -> None:
    rows, plain = CASES[name]
    tensor = tensor_of(rows)
    for row, whole in zip(rows, plain(tensor), strict=True):
        assert whole.shape == tuple(SIZES[letter] for letter in row.ours)
        spans = []
        for size in whole.shape:
            lo = data.draw(st.integers(0, size - 1))
            spans.append((lo, data.draw(st.integers(lo + 1, size))))
        fetched: list[int] = []

        def fetch(slices: tuple[slice, ...], tensor: np.ndarray = tensor, fetched: list[int] = fetched) -> np.ndarray:
            fetched.append(tensor[slices].size)
            return tensor[slices]

        block = read(row, SIZES, spans, fetch)
        np.testing.assert_array_equal(block, whole[tuple(slice(*span) for span in spans)])
        # Nothing is read twice, and whole heads take no more than their own entries.
        assert len(fetched) == 1
        if "E" not in row.ours or spans[row.ours.index("E")] == (0, E):
            assert fetched[0] <= block.size * row.parts * (SIZES["R"] if row.turned else 1)


@pytest.mark.parametrize("name", CASES)
def test_writing_is_the_inverse(name: str) -> None:
    rows, plain = CASES[name]
    tensor = tensor_of(rows)
    parts = list(zip(rows, plain(tensor), strict=True))
    np.testing.assert_array_equal(write(parts[::-1], SIZES), tensor)


def test_one_head_reads_its_own_rows() -> None:
    row = at("w", "D,PHE", "DHE", 1, 3)
    tensor = tensor_of([row])
    seen = []
    read(row, SIZES, [(1, 3), (2, 3), (0, E)], lambda slices: seen.append(slices) or tensor[slices])  # type: ignore[func-returns-value]
    assert seen == [(slice(1, 3), slice(H * E + 2 * E, H * E + 3 * E))]
