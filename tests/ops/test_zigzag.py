"""Zig-zag order: the worked value, balance beside contiguous order, padding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtrain.ops.zigzag import padded_length, places_after, row_order, scored_blocks


def test_worked_value_of_two_devices() -> None:
    # Requirements section 5: length 8,192, CP=2: rank 0 holds 0-2047 and 6144-8191, rank 1 holds 2048-6143.
    first, second = row_order(8192, 2).reshape(2, -1)
    np.testing.assert_array_equal(first, [*range(2048), *range(6144, 8192)])
    np.testing.assert_array_equal(second, range(2048, 6144))


@pytest.mark.parametrize("devices", [2, 4, 8, 16])
@pytest.mark.parametrize("blocks_a_chunk", [1, 2, 4])
def test_devices_score_equally_many_blocks(devices: int, blocks_a_chunk: int) -> None:
    length, block = 2 * devices * blocks_a_chunk * 16, 16
    zigzag = scored_blocks(row_order(length, devices), devices, block)
    contiguous = scored_blocks(np.arange(length), devices, block)
    n = length // block
    assert zigzag.sum() == contiguous.sum() == n * (n + 1) // 2
    assert np.ptp(zigzag) <= 1
    # By hand: the last of n contiguous devices scores 2n - 1 times what the first does, but for the diagonal.
    c = 2 * blocks_a_chunk
    np.testing.assert_array_equal(contiguous, [c * c * i + c * (c + 1) // 2 for i in range(devices)])


@given(st.integers(1, 5), st.integers(1, 40))
def test_every_token_is_held_once_and_one_device_keeps_the_order(devices: int, chunk: int) -> None:
    order = row_order(2 * devices * chunk, devices)
    assert sorted(order) == list(range(2 * devices * chunk))
    # Each half of a device's tokens is one run of the row, the early one first.
    runs = order.reshape(devices, 2, chunk)
    assert (np.diff(runs, axis=2) == 1).all() and (runs[:, 0, 0] < runs[:, 1, 0]).all()
    np.testing.assert_array_equal(row_order(2 * chunk, 1), np.arange(2 * chunk))


@given(st.integers(1, 300), st.integers(1, 8), st.integers(1, 12))
def test_padding_is_the_least_that_divides(length: int, devices: int, multiple: int) -> None:
    got = padded_length(length, devices, multiple)
    fits = [n for n in range(length, length + 2 * devices * multiple) if n % (2 * devices) == n % multiple == 0]
    assert got == (fits[0] if devices > 1 else length)


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 20))
def test_what_follows_a_token_is_found_where_it_is_stored(devices: int, chunk: int, by: int) -> None:
    length = 2 * devices * chunk
    order = row_order(length, devices)
    places, there = places_after(length, devices, by)
    row = np.arange(length) * 3
    np.testing.assert_array_equal(there, order + by < length)
    np.testing.assert_array_equal(row[order][places][there], row[order[there] + by])
    np.testing.assert_array_equal(places[~there], np.arange(length)[~there])


def test_a_row_of_one_device_may_have_any_length() -> None:
    np.testing.assert_array_equal(places_after(5, 1, 2)[0], [2, 3, 4, 3, 4])
