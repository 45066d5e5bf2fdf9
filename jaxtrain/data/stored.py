"""Flat files that are read by slices."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

import numpy as np

from jaxtrain.config import ConfigError


class Stored:
    """A file of numbers, sliced like an array; each slice is read when it is asked for.

    A memory map would leave every page it touched in the resident memory of this process, and kill it where the file
    was cut short meanwhile; that is a ConfigError here. Raises OSError when the file cannot be opened.
    """

    def __init__(self, path: Path, dtype: np.dtype | type) -> None:
        self._path, self._dtype = path, np.dtype(dtype)
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self._length = os.fstat(self._file).st_size // self._dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: slice, /) -> np.ndarray:
        start, stop, step = place.indices(self._length)
        assert step == 1, place
        width = self._dtype.itemsize
        try:
            data = os.pread(self._file, max(stop - start, 0) * width, start * width)
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be read any more ({error.strerror}): mend that, resume") from None
        if len(data) != max(stop - start, 0) * width:
            raise ConfigError(
                f"{self._path} was cut short under this run: {len(data)} bytes at {start * width} where "
                f"{(stop - start) * width} were; restore the file, then resume"
            )
        return np.frombuffer(data, self._dtype)
