"""Flat files that are read by slices."""

from __future__ import annotations

import os
import weakref
from functools import lru_cache
from pathlib import Path

import numpy as np

from jaxtrain.config import ConfigError

# A corpus may have more shards than a process may hold open; reopening costs microseconds.
OPEN_FILES = 256
Version = tuple[int, int]


class Stored:
    """A file of numbers, sliced like an array; each slice is read when it is asked for.

    A memory map would leave every page it touched in the resident memory of this process, and kill it where the file
    was cut short meanwhile; that is a ConfigError here. Raises OSError when the file cannot be opened.
    """

    def __init__(self, path: Path, dtype: np.dtype | type) -> None:
        self._path, self._dtype = path, np.dtype(dtype)
        status = os.stat(path)
        self._version = (status.st_ino, status.st_mtime_ns)
        _opened(path, self._version)
        self._length = status.st_size // self._dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: slice, /) -> np.ndarray:
        start, stop, step = place.indices(self._length)
        assert step == 1, place
        width = self._dtype.itemsize
        try:
            file = _opened(self._path, self._version)
            data = os.pread(file.number, max(stop - start, 0) * width, start * width)
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be read any more ({error.strerror}): mend that, resume") from None
        if len(data) != max(stop - start, 0) * width:
            raise ConfigError(
                f"{self._path} was cut short under this run: {len(data)} bytes at {start * width} where "
                f"{(stop - start) * width} were; restore the file, then resume"
            )
        return np.frombuffer(data, self._dtype)


class _File:
    """An open file, closed with its last user."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.number)


@lru_cache(maxsize=OPEN_FILES)
def _opened(path: Path, version: Version) -> _File:
    file = _File(path)
    status = os.fstat(file.number)
    if (status.st_ino, status.st_mtime_ns) != version:
        raise ConfigError(f"{path} was written anew under this run: restore the file, then resume")
    return file
