"""Blocks of parameters read from slices of hub tensors, against NumPy on whole tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.hub.mapping import ROTARY, TensorMapping, hub_shape, join_parts, read_block, tensor

SIZES = {"D": 5, "H": 4, "K": 2, "E": 6, "F": 7, "X": 3, "R": 8, "V": 9, ROTARY: 4}
D, H, E, F, X, R = (SIZES[letter] for letter in "DHEFXR")


def pairs_to_halves(array: np.ndarray, axis: int) -> np.ndarray:
    """Entry by entry: pairs (2i, 2i + 1) of the last 4 become (i, i + 2)."""
    moved = np.moveaxis(array.copy(), axis, 0)
    source, tail = np.moveaxis(array, axis, 0), array.shape[axis] - 4
    for pair in range(2):
        moved[tail + pair], moved[tail + 2 + pair] = source[tail + 2 * pair], source[tail + 2 * pair + 1]
    return np.moveaxis(moved, 0, axis)


# {case: (mappings of one hub tensor, NumPy function from the tensor to the parameters)}
CASES: dict[str, tuple[list[TensorMapping], Any]] = {
    "linear": ([tensor("w", "F,D", "DF")], lambda t: [t.T]),
    "heads": ([tensor("w", "HE,D", "DHE")], lambda t: [t.reshape(H, E, D).transpose(2, 0, 1)]),
    "out": ([tensor("w", "D,HE", "HED")], lambda t: [t.T.reshape(H, E, D)]),
    "joined": (
        [tensor("w", "D,PHE", "DHE", i, 3) for i in range(3)],
        lambda t: [p.reshape(D, H, E) for p in np.split(t, 3, 1)],
    ),
    "joined biases": ([tensor("w", "PHE", "HE", i, 3) for i in range(3)],
                      lambda t: [p.reshape(H, E) for p in np.split(t, 3)]),
    "interleaved experts": (
        [tensor("w", "X,D,FP", "XDF", i, 2) for i in range(2)], lambda t: [t[..., 0::2], t[..., 1::2]],
    ),
    "interleaved heads": (
        [tensor("w", "HE,R", "RHE", interleaved="E")],
        lambda t: [pairs_to_halves(t.T.reshape(R, H, E), 2)],
    ),
    "interleaved tail": ([tensor("w", "R,D", "DR", interleaved="R")], lambda t: [pairs_to_halves(t.T, 1)]),
    "vector": ([tensor("w", "D")], lambda t: [t]),
}  # fmt: skip


def hub_tensor(mappings: list[TensorMapping]) -> np.ndarray:
    shape = hub_shape(mappings[0], SIZES)
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(list(CASES)), data=st.data())
def test_any_block_is_read_from_its_slices(name: str, data: st.DataObject) -> None:
    mappings, reference = CASES[name]
    array = hub_tensor(mappings)
    for mapping, whole in zip(mappings, reference(array), strict=True):
        assert whole.shape == tuple(SIZES[letter] for letter in mapping.param_dims)
        ranges = []
        for size in whole.shape:
            lo = data.draw(st.integers(0, size - 1))
            ranges.append((lo, data.draw(st.integers(lo + 1, size))))
        fetched: list[int] = []

        def fetch(slices: tuple[slice, ...], array: np.ndarray = array, fetched: list[int] = fetched) -> np.ndarray:
            fetched.append(array[slices].size)
            return array[slices]

        block = read_block(mapping, SIZES, ranges, fetch)
        np.testing.assert_array_equal(block, whole[tuple(slice(*dim_range) for dim_range in ranges)])
        # One read, and no more entries than needed if heads are read whole.
        assert len(fetched) == 1
        if "E" not in mapping.param_dims or ranges[mapping.param_dims.index("E")] == (0, E):
            assert fetched[0] <= block.size * mapping.parts * (SIZES["R"] if mapping.interleaved else 1)


@pytest.mark.parametrize("name", CASES)
def test_joining_is_the_inverse(name: str) -> None:
    mappings, reference = CASES[name]
    array = hub_tensor(mappings)
    parts = list(zip(mappings, reference(array), strict=True))
    np.testing.assert_array_equal(join_parts(parts[::-1], SIZES), array)


def test_one_head_reads_only_its_entries() -> None:
    mapping = tensor("w", "D,PHE", "DHE", 1, 3)
    array = hub_tensor([mapping])
    reads = []
    read_block(mapping, SIZES, [(1, 3), (2, 3), (0, E)], lambda slices: reads.append(slices) or array[slices])  # type: ignore[func-returns-value]
    assert reads == [(slice(1, 3), slice(H * E + 2 * E, H * E + 3 * E))]
