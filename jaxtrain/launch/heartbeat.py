"""What this process does now, for the supervisor outside of it: phase, step, since when, and how long phases took.

The record is shared memory without a name: the supervisor creates it, the process inherits its descriptor. A report
costs microseconds, touches no file system, and nothing is left behind by a kill of either side.
"""

from __future__ import annotations

import faulthandler
import functools
import mmap
import os
import signal
import struct
import sys
import tempfile
import time
from dataclasses import dataclass

STATUS_FD = "JAXTRAIN_STATUS_FD"
"""Environment variable: the inherited descriptor of this process's record; unset: nothing is reported."""
RANK = "JAXTRAIN_RANK"
"""Environment variable: the rank that the supervisor gave to this process."""
GENERATION = "JAXTRAIN_GENERATION"
"""Environment variable: how often the supervisor has started the job, from 1."""

PHASES = ("start", "join", "data", "restore", "compile", "input", "step", "evaluation", "checkpoint", "barrier", "end")
"""In the order in which a step passes them."""
KEPT = 64
"""Durations kept for each phase, the newest."""

_MAGIC = b"jaxtrain status1"
# The version of the record is odd while it changes: version, phase, step (-1: none), since (monotonic), pid.
_HEAD = struct.Struct("<16sQqqdq")
_VERSION, _NOW = struct.Struct("<Q"), struct.Struct("<qqdq")
_COUNT, _DURATIONS = struct.Struct("<Q"), struct.Struct(f"<{KEPT}d")
_PHASE_SIZE = _COUNT.size + _DURATIONS.size
SIZE = _HEAD.size + len(PHASES) * _PHASE_SIZE


@dataclass(frozen=True)
class Status:
    """A process at one moment; `since` is on the clock time.monotonic(), which the processes of a machine share."""

    phase: str
    step: int | None
    since: float
    pid: int
    durations: dict[str, tuple[float, ...]]
    """Seconds of the newest visits of each phase, in no order."""


class Record:
    """One process's record: the supervisor's side creates it, `report` writes it, `read` reads it from any side."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, SIZE)
        self._version, self._phase, self._since = 0, -1, 0.0

    @classmethod
    def create(cls) -> Record:
        """An empty record in memory, without a name in any file system."""
        if sys.platform == "linux":
            fd = os.memfd_create("jaxtrain-status")
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        # Written, not truncated to its size: a full memory fails here and not by SIGBUS at a later report.
        os.pwrite(fd, _MAGIC.ljust(SIZE, b"\0"), 0)
        return cls(fd)

    def report(self, phase: str, step: int | None) -> None:
        """Enter a phase; the time since the last report is a duration of the phase before."""
        now, number = time.monotonic(), PHASES.index(phase)
        _VERSION.pack_into(self._memory, len(_MAGIC), self._version + 1)
        if self._phase >= 0:
            start = _HEAD.size + self._phase * _PHASE_SIZE
            (count,) = _COUNT.unpack_from(self._memory, start)
            struct.pack_into("<d", self._memory, start + _COUNT.size + 8 * (count % KEPT), now - self._since)
            _COUNT.pack_into(self._memory, start, count + 1)
        _NOW.pack_into(
            self._memory, len(_MAGIC) + _VERSION.size, number, -1 if step is None else step, now, os.getpid()
        )
        self._phase, self._since = number, now
        self._version += 2
        _VERSION.pack_into(self._memory, len(_MAGIC), self._version)

    def read(self) -> Status | None:
        """The process's status, None before its first report."""
        for _ in range(100):
            content = bytes(self._memory)
            magic, version, phase, step, since, pid = _HEAD.unpack_from(content)
            if magic != _MAGIC or version == 0:
                return None
            if version % 2 == 0 and _VERSION.unpack_from(self._memory, len(_MAGIC))[0] == version:
                durations = {name: _durations(content, i) for i, name in enumerate(PHASES)}
                return Status(PHASES[phase], None if step < 0 else step, since, pid, durations)
            time.sleep(1e-5)
        return None  # killed between two writes of one report

    def close(self) -> None:
        """Release the memory."""
        self._memory.close()
        os.close(self.fd)


def report_phase(phase: str, step: int | None = None) -> None:
    """Report that this process enters one of PHASES, at a step; does nothing without a supervisor.

    The first report also makes SIGQUIT print the stacks of all threads on stderr, even while the main thread is in
    native code.
    """
    if (record := _inherited()) is not None:
        record.report(phase, step)


@functools.cache
def _inherited() -> Record | None:
    try:
        fd = int(os.environ.get(STATUS_FD, ""))
        if os.pread(fd, len(_MAGIC), 0) != _MAGIC:
            return None
        record = Record(fd)
    except (ValueError, OSError):
        # A child of a supervised process: the descriptor was closed or is another file.
        return None
    faulthandler.register(signal.SIGQUIT, file=sys.__stderr__ or 2, all_threads=True, chain=False)
    return record


def _durations(content: bytes, phase: int) -> tuple[float, ...]:
    start = _HEAD.size + phase * _PHASE_SIZE
    (count,) = _COUNT.unpack_from(content, start)
    return _DURATIONS.unpack_from(content, start + _COUNT.size)[: min(count, KEPT)]
