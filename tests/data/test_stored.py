"""Flat files read by slices."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.config import ConfigError
from jaxtrain.data.stored import OPEN_FILES, Stored

NUMBERS = np.arange(3000, dtype="<u2")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stored") / "numbers.bin"
    NUMBERS.tofile(path)
    return path


@given(start=st.integers(0, 3100), size=st.integers(0, 400))
@settings(max_examples=60, deadline=None)
def test_slices_are_those_of_the_array(path, start, size):
    stored = Stored(path, np.dtype("<u2"))
    got = stored[start : start + size]
    assert len(stored) == 3000 and got.dtype == np.uint16 and np.array_equal(got, NUMBERS[start : start + size])
    assert np.array_equal(stored[:5], NUMBERS[:5])


def test_a_truncated_file_is_one_message(path, tmp_path):
    short = tmp_path / "short.bin"
    short.write_bytes(path.read_bytes())
    stored = Stored(short, np.dtype("<u2"))
    os.truncate(short, 1000)
    assert stored[490:500][-1] == 499
    with pytest.raises(ConfigError, match=r"short.bin was truncated during this run: 20 bytes at 980 where 40 were"):
        stored[490:510]


def test_more_files_than_are_held_open(tmp_path):
    for number in range(2 * OPEN_FILES):
        np.full(3, number, "<u2").tofile(tmp_path / f"{number}.bin")
    before = len(os.listdir("/proc/self/fd"))
    many = [Stored(tmp_path / f"{number}.bin", np.dtype("<u2")) for number in range(2 * OPEN_FILES)]
    for _ in range(2):
        assert [int(stored[1:2][0]) for stored in many] == list(range(2 * OPEN_FILES))
    assert len(os.listdir("/proc/self/fd")) <= before + OPEN_FILES
    (tmp_path / "0.bin").unlink()
    np.full(3, 9, "<u2").tofile(tmp_path / "0.bin")
    with pytest.raises(ConfigError, match=r"0\.bin was replaced during this run"):
        many[0][0:1]
