"""Zig-zag order: a worked example, balance compared with contiguous order, padding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtrain.ops.zigzag import padded_length, scored_blocks, shifted_indices, zigzag_order


def test_worked_example_of_two_devices() -> None:
    # Requirements section 5: length 8,192, CP=2: rank 0 holds 0-2047 and 6144-8191, rank 1 holds 2048-6143.
    first, second = zigzag_order(8192, 2).reshape(2, -1)
    np.testing.assert_array_equal(first, [*range(2048), *range(6144, 8192)])
    np.testing.assert_array_equal(second, range(2048, 6144))


@pytest.mark.parametrize("devices", [2, 4, 8, 16])
@pytest.mark.parametrize("blocks_a_chunk", [1, 2, 4])
def test_devices_score_equal_numbers_of_blocks(devices: int, blocks_a_chunk: int) -> None:
    length, block = 2 * devices * blocks_a_chunk * 16, 16
    zigzag = scored_blocks(zigzag_order(length, devices), devices, block)
    contiguous = scored_blocks(np.arange(length), devices, block)
    n = length // block
    assert zigzag.sum() == contiguous.sum() == n * (n + 1) // 2
    assert np.ptp(zigzag) <= 1
    # Except for the diagonal, the last of n contiguous devices scores 2n - 1 times as many blocks as the first.
    c = 2 * blocks_a_chunk
    np.testing.assert_array_equal(contiguous, [c * c * i + c * (c + 1) // 2 for i in range(devices)])


@given(st.integers(1, 5), st.integers(1, 40))
def test_every_token_is_stored_once_and_one_device_stores_the_natural_order(devices: int, chunk: int) -> None:
    order = zigzag_order(2 * devices * chunk, devices)
    assert sorted(order) == list(range(2 * devices * chunk))
    # A device's tokens are two contiguous chunks, the earlier one first.
    chunks = order.reshape(devices, 2, chunk)
    assert (np.diff(chunks, axis=2) == 1).all() and (chunks[:, 0, 0] < chunks[:, 1, 0]).all()
    np.testing.assert_array_equal(zigzag_order(2 * chunk, 1), np.arange(2 * chunk))


@given(st.integers(1, 300), st.integers(1, 8), st.integers(1, 12))
def test_padded_length_is_the_smallest_that_divides(length: int, devices: int, multiple: int) -> None:
    got = padded_length(length, devices, multiple)
    fits = [n for n in range(length, length + 2 * devices * multiple) if n % (2 * devices) == n % multiple == 0]
    assert got == (fits[0] if devices > 1 else length)


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 20))
def test_shifted_indices(devices: int, chunk: int, by: int) -> None:
    length = 2 * devices * chunk
    order = zigzag_order(length, devices)
    indices, exists = shifted_indices(length, devices, by)
    sequence = np.arange(length) * 3
    np.testing.assert_array_equal(exists, order + by < length)
    np.testing.assert_array_equal(sequence[order][indices][exists], sequence[order[exists] + by])
    np.testing.assert_array_equal(indices[~exists], np.arange(length)[~exists])


def test_one_device_takes_any_length() -> None:
    np.testing.assert_array_equal(shifted_indices(5, 1, 2)[0], [2, 3, 4, 3, 4])
