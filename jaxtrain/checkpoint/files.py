"""Files of a checkpoint directory: steps, records, and errors of reading that are worth another try.

A checkpoint is the folder STEP/ with the arrays in STEP/state (Orbax, by path) and one JSON record in STEP/record:
data position, metadata, the digest and shape of every leaf, and a hash of the record itself.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

CheckpointRecord = dict[str, Any]

STATE = "state"
RECORD = "record/metadata"
READ_DELAYS = (0.1, 0.5, 2.0, 8.0)
"""Seconds before each further attempt of a read that the file system refused."""
ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
"""System errors that say that a file is not there; every other one says nothing about its content."""
REFUSED = ("RESOURCE_EXHAUSTED", "UNAVAILABLE", "PERMISSION_DENIED", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED")
"""Statuses of the array library that say nothing about the content either."""


class DamagedError(Exception):
    """A checkpoint whose bytes are missing, altered or not decodable."""


class UnreadableError(Exception):
    """A checkpoint that the file system or the memory of this machine refused to read; it may be intact."""


def list_steps(directory: Path) -> list[int]:
    """Steps that have a committed checkpoint, ascending; [] where the directory does not exist."""
    try:
        names = [entry.name for entry in directory.iterdir()]
    except FileNotFoundError:
        return []
    return sorted(int(name) for name in names if name.isdecimal())


def read_record(step_dir: Path) -> CheckpointRecord:
    """The record of a checkpoint; raises DamagedError where it is missing or altered, OSError if it cannot be read."""
    try:
        record = json.loads((step_dir / RECORD).read_bytes())
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError) as error:
        raise DamagedError(f"record: {describe_error(error)}") from None
    if not isinstance(record, dict) or record.get("sha256") != with_hash(record)["sha256"]:
        raise DamagedError("record: altered bytes")
    return record


def with_hash(record: CheckpointRecord) -> CheckpointRecord:
    """The record as it is after a JSON round trip, with a hash of its contents."""
    contents = json.loads(json.dumps({key: value for key, value in record.items() if key != "sha256"}))
    text = json.dumps(contents, sort_keys=True)
    return {**contents, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def write_synced(path: Path, record: CheckpointRecord) -> None:
    """Write a record and its folder, on disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        json.dump(record, file)
        file.flush()
        os.fsync(file.fileno())


def sync_files(folder: Path, deep: bool = True) -> None:
    """Put a folder's entries on disk, with all files and folders below it where `deep`."""
    for path in [*(folder.rglob("*") if deep else ()), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@functools.cache
def hide_late_callbacks() -> None:
    """Print no tracebacks of the other arrays of a read or write that has failed already.

    Orbax raises the first error and closes its event loop; the array library's threads report to it once per array.
    """
    show = sys.unraisablehook

    def hook(raised: sys.UnraisableHookArgs) -> None:
        if not str(raised.exc_value).startswith(
            ("Event loop is closed", "Encountered error while reading array index")
        ):
            show(raised)

    sys.unraisablehook = hook
    logging.getLogger("asyncio").addFilter(lambda record: not _is_late(record.exc_info[1] if record.exc_info else None))


def _is_late(error: BaseException | None) -> bool:
    """Whether an error that nobody waits for is of a file of an unfinished checkpoint."""
    return isinstance(error, OSError) and ".tmp/" in str(error.filename)


def release_memory() -> None:
    """Give freed memory back to the system, after each save and each part of a restore.

    Both allocate in new threads. glibc keeps what they free in up to eight arenas a core, and fills them one after the
    other: without this call the resident memory grows for hundreds of saves.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def read_patiently[T](read: Callable[[], T], what: str) -> T:
    """The result of `read`; what the file system refuses is tried again with growing delays, each one logged.

    Raises UnreadableError where it stays refused, and DamagedError for bytes that are missing or not decodable; those
    are read twice.
    """
    delays = list(READ_DELAYS)
    damaged = False
    while True:
        try:
            return read()
        except Exception as error:  # the array library raises errors of many types
            refused, cause = was_refused(error), describe_error(error)
            if not delays or (not refused and damaged):
                kind = UnreadableError if refused else DamagedError
                raise kind(cause) from error
            damaged = not refused
            if refused:
                logger.warning("%s cannot be read (%s): trying again in %.1f s", what, cause, delays[0])
            time.sleep(delays.pop(0))


def was_refused(error: BaseException) -> bool:
    """Whether an error of reading says nothing about the content: I/O errors, permissions, timeouts, memory."""
    causes = _causes(error)
    if any(isinstance(cause, DamagedError) for cause in causes):
        return False
    if (number := system_error(error)) is not None:
        return number not in ABSENT
    return any(
        isinstance(cause, MemoryError) or any(status in _first_line(cause) for status in REFUSED) for cause in causes
    )


def system_error(error: BaseException) -> int | None:
    """The number of the system's error (errno) behind an exception, None if there is none."""
    for cause in _causes(error):
        if isinstance(cause, OSError) and cause.errno is not None:
            return cause.errno
        # The array library quotes the system's error.
        if code := re.search(r"os_error_code='(\d+)'", str(cause)):
            return int(code.group(1))
    return None


def removed_while_trained(what: str) -> str:
    """The message where somebody else removed files of a run."""
    return (
        f"{what} was removed or replaced while this process trained there: nothing more is written; restore the "
        "directory and run the same command again to resume, or start a new run"
    )


def describe_error(error: BaseException) -> str:
    """Type and first line of the error at the root of an exception."""
    root = list(_causes(error))[-1]
    return f"{root}" if isinstance(root, DamagedError) else f"{type(root).__name__}: {_first_line(root)}"


def _causes(error: BaseException) -> list[BaseException]:
    causes = [error]
    while (cause := causes[-1].__cause__) is not None and cause not in causes:
        causes.append(cause)
    return causes


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]
