"""Reading checkpoints: read-only, so that any process may read while another one trains and saves.

The arrays are restored onto any mesh, a few leaves at a time. Orbax commits a checkpoint atomically but does not detect
altered bytes; the digests of the record do.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from jaxtrain.checkpoint.digest import digest, flatten_state
from jaxtrain.checkpoint.files import (
    STATE,
    CheckpointRecord,
    DamagedError,
    UnreadableError,
    hide_late_callbacks,
    list_steps,
    read_patiently,
    read_record,
    release_memory,
)
from jaxtrain.config import ConfigError, StorageError
from jaxtrain.launch.coordination import exchange, process_name

logger = logging.getLogger(__name__)

READ_LIMIT = 3600.0
"""Seconds that the processes may differ in reading a checkpoint."""


class Restored(NamedTuple):
    """The contents of a checkpoint: step number, state with the requested shardings, data position, metadata."""

    step: int
    state: Any
    data: dict[str, Any]
    meta: dict[str, Any]
    seconds: float = 0.0
    """Time of reading and verifying."""
    bytes: int = 0
    """Bytes of the arrays that were read, over all processes."""


class CheckpointReader:
    """The checkpoints of a directory, read-only. `restore` is a collective: all processes must call it."""

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory).absolute()
        self._damaged: list[int] = []
        hide_late_callbacks()

    def restore(self, abstract_state: Any, subset: bool = False, only: int | None = None) -> Restored | None:
        """The newest intact checkpoint, sharded like `abstract_state` (ShapeDtypeStructs); None if there is none.

        `only` considers the checkpoint of this step alone.

        Every leaf is a new buffer, safe to donate; the peak is the state and its largest leaf. With `subset`,
        `abstract_state` may lack leaves of the checkpoint: they are neither read nor verified. A damaged checkpoint is
        logged and the previous one is tried; one that a writer removes meanwhile is left out. Raises StorageError if
        the file system refuses to read a checkpoint that may be intact, ConfigError if no checkpoint is intact or if
        it holds the state of another model.
        """
        reasons: dict[int, str] = {}
        while (step := self._newest(reasons, only)) is not None:
            begin = time.perf_counter()
            restored, reason = self._restore_step(step, abstract_state, subset)
            if restored is not None:
                self._damaged = [step for step, reason in reasons.items() if reason]
                return restored._replace(seconds=time.perf_counter() - begin)
            if reason:
                logger.warning("checkpoint %s of %s is damaged: %s", step, self.directory, reason)
            else:
                logger.warning("checkpoint %s of %s was removed while it was read", step, self.directory)
            reasons[step] = reason
        lines = "".join(f"\n  step {step}: {reason}" for step, reason in reasons.items() if reason)
        if not lines:
            return None
        raise ConfigError(
            f"no checkpoint in {self.directory} can be read:{lines}\n"
            "restore the directory from a copy, or move it away to start from the beginning"
        )

    def latest(self) -> int | None:
        """The newest step."""
        return max(self.steps(), default=None)

    def read_meta(self, step: int) -> dict[str, Any]:
        """The metadata of a checkpoint; raises ConfigError if its record is damaged, StorageError if unreadable."""
        where = f"checkpoint {step} of {self.directory}"
        try:
            return dict(read_patiently(lambda: read_record(self.directory / str(step)), where)["meta"])
        except DamagedError as error:
            raise ConfigError(f"{where} cannot be read: {error}") from None
        except UnreadableError as error:
            raise StorageError(_unreadable(where, str(error))) from None

    def steps(self) -> list[int]:
        """The steps that have a committed checkpoint, ascending; raises StorageError if they cannot be listed."""
        try:
            return read_patiently(lambda: list_steps(self.directory), str(self.directory))
        except (DamagedError, UnreadableError) as error:
            raise StorageError(_unreadable(str(self.directory), str(error))) from None

    def _newest(self, tried: dict[int, str], only: int | None = None) -> int | None:
        """The newest step of process 0 that was not tried yet, or `only`. A collective."""
        steps = exchange("checkpoints to restore", self.steps() if jax.process_index() == 0 else [], READ_LIMIT)[0]
        return max((step for step in steps if step not in tried and only in (None, step)), default=None)

    def _restore_step(self, step: int, abstract_state: Any, subset: bool) -> tuple[Restored | None, str]:
        """One checkpoint, or the reason why it is damaged, "" if it was removed meanwhile. A collective."""
        folder, where = self.directory / str(step), f"checkpoint {step} of {self.directory}"
        expected = flatten_state(abstract_state)
        record: CheckpointRecord = {}
        problem: tuple[str, str] | None = None
        try:
            record = read_patiently(lambda: read_record(folder), where)
        except (DamagedError, UnreadableError) as error:
            problem = _problem(folder, error)
        if verdict := _shared(where, problem):
            return None, verdict[1]
        _check_leaves(where, record["leaves"], expected, subset)
        for attempt in (1, 2):
            leaves: dict[str, jax.Array] = {}
            try:
                leaves = read_patiently(lambda: read_leaves(folder, expected), where)
            except (DamagedError, UnreadableError) as error:
                problem = _problem(folder, error)
            if verdict := _shared(where, problem):
                return None, verdict[1]
            state = jax.tree.unflatten(jax.tree.structure(abstract_state), list(leaves.values()))
            altered = [path for path, value in digest(state).items() if record["digests"][path] != value]
            if not altered:
                size = sum(bytes_of(leaf) for leaf in expected.values())
                return Restored(step, state, record["data"], record["meta"], bytes=size), ""
            if attempt == 1:
                logger.warning("%s: altered bytes in %s, reading again", where, list_some(altered))
        return None, f"altered bytes in {list_some(altered)}"


def read_leaves(folder: Path, wanted: dict[str, Any]) -> dict[str, jax.Array]:
    """The leaves of a checkpoint's folder, sharded as `wanted` (path -> ShapeDtypeStruct) says.

    A few leaves are read at a time, together no larger than the largest one. Raises errors of many types where bytes
    are missing or cannot be decoded.
    """
    handler = ocp.PyTreeCheckpointHandler()
    read: dict[str, jax.Array] = {}
    for part in _parts(wanted):
        args = ocp.args.PyTreeRestore(
            part, restore_args=ocp.checkpoint_utils.construct_restore_args(part), partial_restore=True
        )
        leaves = handler.restore(epath.Path(folder / STATE), args=args)
        if missing := part.keys() - leaves.keys():
            raise DamagedError(f"no arrays for {list_some(sorted(missing))}")
        # Arrays may share memory with the reader, and donated leaves must not.
        read |= {path: jnp.copy(leaves.pop(path)) for path in part}
        jax.block_until_ready([read[path] for path in part])
        del leaves
        release_memory()
    return read


def describe_leaf(leaf: Any) -> str:
    """'float32[2, 3]', as records have it."""
    return f"{leaf.dtype}{list(leaf.shape)}"


def bytes_of(leaf: Any) -> int:
    """Bytes of a leaf's elements over all devices, replicas counted once."""
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def list_some(items: list[str], separator: str = ", ") -> str:
    """The first eight items and the number of the others."""
    return separator.join(items[:8]) + (f"{separator}and {len(items) - 8} more" if len(items) > 8 else "")


def _parts(wanted: dict[str, Any]) -> Iterator[dict[str, Any]]:
    limit = max((bytes_of(leaf) for leaf in wanted.values()), default=0)
    part: dict[str, Any] = {}
    size = 0
    for path, leaf in wanted.items():
        if part and size + bytes_of(leaf) > limit:
            yield part
            part, size = {}, 0
        part[path] = leaf
        size += bytes_of(leaf)
    if part:
        yield part


def _check_leaves(where: str, stored: dict[str, str], expected: dict[str, Any], subset: bool) -> None:
    described = {path: describe_leaf(leaf) for path, leaf in expected.items()}
    others = [] if subset else [path for path in stored if path not in described]
    differing = [
        f"{path}: checkpoint has {stored.get(path, 'nothing')}, configuration needs {described.get(path, 'nothing')}"
        for path in [*described, *others]
        if stored.get(path) != described.get(path)
    ]
    if differing:
        raise ConfigError(
            f"{where} holds the state of another configuration:\n  "
            + list_some(differing, "\n  ")
            + "\nuse the model, optimizer and precision settings that it was saved with, or another run directory"
        )


def _problem(folder: Path, error: Exception) -> tuple[str, str]:
    """(kind, text): "gone" where the whole checkpoint is not there, else "unreadable" or "damaged"."""
    if not folder.is_dir():
        return "gone", "it is not there"
    return ("damaged" if isinstance(error, DamagedError) else "unreadable"), str(error)


def _shared(where: str, problem: tuple[str, str] | None) -> tuple[str, str] | None:
    """What all processes make of their problems with a checkpoint: None if none has one. A collective.

    ("gone", "") if it was removed, ("damaged", reason); raises StorageError where it may be intact.
    """
    problems = exchange("restore", problem, READ_LIMIT)
    found = [(rank, *one) for rank, one in enumerate(problems) if one]
    if not found:
        return None
    if all(kind == "gone" for _, kind, _ in found) and problems[0]:
        return "gone", ""
    for rank, kind, text in found:
        name = "" if jax.process_count() == 1 else f"{process_name(rank)}: "
        if kind == "gone":
            raise StorageError(
                f"{where} is there for process 0 but not for {name.removesuffix(': ')}: the run directory must be on a "
                "file system that all hosts share"
            )
        if kind == "unreadable":
            raise StorageError(_unreadable(where, f"{name}{text}"))
    rank, _, text = found[0]
    return "damaged", text if jax.process_count() == 1 else f"{process_name(rank)}: {text}"


def _unreadable(where: str, cause: str) -> str:
    return (
        f"{where} cannot be read ({cause}): it may be intact, so nothing was changed; repair the file system or its "
        "permissions and run the same command again"
    )
