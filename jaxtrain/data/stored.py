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
    """A file of numbers, sliced like an array; each slice is read on access.

    A memory map would keep every page it touched in this process' resident memory, and would kill the process if the
    file was truncated meanwhile; here that is a ConfigError. The numbers begin `offset` bytes into the file. Raises
    OSError when it cannot be opened.
    """

    def __init__(self, path: Path, dtype: np.dtype | type, offset: int = 0) -> None:
        self._path, self._dtype, self._offset = path, np.dtype(dtype), offset
        status = os.stat(path)
        self._version = (status.st_ino, status.st_mtime_ns)
        _opened(path, self._version)
        self._length = (status.st_size - offset) // self._dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, span: slice, /) -> np.ndarray:
        start, stop, step = span.indices(self._length)
        assert step == 1, span
        width = self._dtype.itemsize
        try:
            file = _opened(self._path, self._version)
            data = os.pread(file.number, max(stop - start, 0) * width, self._offset + start * width)
        except OSError as error:
            raise ConfigError(
                f"{self._path} cannot be read any more ({error.strerror}): restore the file, then resume"
            ) from None
        if len(data) != max(stop - start, 0) * width:
            raise ConfigError(
                f"{self._path} was truncated during this run: {len(data)} bytes at {self._offset + start * width} "
                f"where {(stop - start) * width} were; restore the file, then resume"
            )
        return np.frombuffer(data, self._dtype)


class _File:
    """An open file, closed when its last user is gone."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.number)


@lru_cache(maxsize=OPEN_FILES)
def _opened(path: Path, version: Version) -> _File:
    file = _File(path)
    status = os.fstat(file.number)
    if (status.st_ino, status.st_mtime_ns) != version:
        raise ConfigError(f"{path} was replaced during this run: restore the file, then resume")
    return file
