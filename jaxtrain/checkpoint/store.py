"""Checkpoints: state and data position saved together after a step, verified when read, restored onto any mesh.

A checkpoint holds the state's arrays (Orbax, by path) and one JSON record: data position, metadata, the digest and
shape of every leaf, and a hash of the record itself. Orbax commits a checkpoint atomically but does not detect altered
bytes; the digests do.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from jaxtrain.checkpoint.digest import digest, flatten_state
from jaxtrain.checkpoint.gather import orbax_without_collectives, shared_reason
from jaxtrain.config import CheckpointConfig, ConfigError
from jaxtrain.launch.coordination import wait_for_all

logger = logging.getLogger(__name__)

CheckpointRecord = dict[str, Any]
RESTORE_S = 3600.0
"""Seconds that one process may restore longer than another."""


class Restored(NamedTuple):
    """The contents of a checkpoint: step number, state with the requested shardings, data position, metadata."""

    step: int
    state: Any
    data: dict[str, Any]
    meta: dict[str, Any]


class UnreadableError(Exception):
    """A checkpoint whose bytes are missing, altered or not JSON."""


class Checkpoints:
    """The checkpoints of one run directory. Every method is a collective: all processes must call it."""

    def __init__(self, directory: Path, config: CheckpointConfig) -> None:
        """Open or create `directory` and delete incomplete checkpoints; ConfigError if it cannot be written."""
        self.directory = Path(directory).absolute()
        self._damaged: list[int] = []
        options = ocp.CheckpointManagerOptions(
            max_to_keep=config.keep,
            enable_async_checkpointing=config.asynchronous,
            cleanup_tmp_directories=True,
            lightweight_initialize=True,
        )
        orbax_without_collectives()
        with self._writing():
            self._manager = ocp.CheckpointManager(self.directory, options=options)

    def save(self, step: int, state: Any, data: dict[str, Any], meta: dict[str, Any]) -> bool:
        """Write `state` (arrays), `data` and `meta` (JSON, equal on all processes); False if the step already exists.

        Returns as soon as the state may be donated. Writing continues in the background; the next call raises its
        errors. Raises ConfigError if the directory cannot be written.
        """
        self._rename_damaged()
        if step in self._manager.all_steps():
            return False
        leaves = flatten_state(state)
        shapes = {path: _describe(leaf) for path, leaf in leaves.items()}
        record = _with_hash({"data": data, "meta": meta, "digests": digest(state), "leaves": shapes})
        args = ocp.args.Composite(state=ocp.args.StandardSave(leaves), record=ocp.args.JsonSave(record))
        with self._writing():
            return self._manager.save(step, args=args, force=True)

    def restore(self, abstract_state: Any) -> Restored | None:
        """The newest intact checkpoint, sharded like `abstract_state` (ShapeDtypeStructs); None if there is none.

        Every leaf is a new buffer, safe to donate. A damaged checkpoint is logged and the previous one is tried; the
        next save renames the damaged one. Raises ConfigError if no checkpoint is intact, or if it holds the state of
        another model.
        """
        self.wait()
        reasons: dict[int, str] = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            restored, reason = self._restore_step(step, abstract_state)
            if restored is not None:
                self._damaged = list(reasons)
                return restored
            logger.warning("checkpoint %s of %s is damaged: %s", step, self.directory, reason)
            reasons[step] = reason
        if not reasons:
            return None
        lines = "".join(f"\n  step {step}: {reason}" for step, reason in reasons.items())
        raise ConfigError(
            f"no checkpoint in {self.directory} can be read:{lines}\n"
            "restore the directory from a copy, or move it away to start from the beginning"
        )

    def read_meta(self, step: int) -> dict[str, Any]:
        """The metadata of a checkpoint; ConfigError if its record cannot be read."""
        try:
            return self._read_record(step)["meta"]
        except UnreadableError as error:
            raise ConfigError(f"checkpoint {step} of {self.directory} cannot be read: {error}") from None

    def latest(self) -> int | None:
        """The newest step that is saved or being saved."""
        return self._manager.latest_step()

    def wait(self) -> None:
        """Wait until everything is on disk; ConfigError if writing failed."""
        with self._writing():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait for writes, then release the writer's threads."""
        with self._writing():
            self._manager.close()

    def _restore_step(self, step: int, abstract_state: Any) -> tuple[Restored | None, str]:
        """One checkpoint, or the reason why it cannot be read.

        A file may be missing on one process only, so all processes agree on the outcome.
        """
        reason, record = "", {}
        try:
            record = self._read_record(step)
        except UnreadableError as error:
            reason = str(error)
        if reason := shared_reason("record read", reason):
            return None, reason
        self._check_tree(step, record["leaves"], abstract_state)
        try:
            state = self._read_state(step, abstract_state)
        except Exception as error:  # altered bytes raise errors of many types in the array library
            reason = f"{type(error).__name__}: {_first_line(error)}"
        if reason := shared_reason("state read", reason, RESTORE_S):
            return None, reason
        digests = digest(state)
        altered = [path for path, value in record["digests"].items() if digests[path] != value]
        if altered:
            return None, f"altered bytes in {_list(altered)}"
        return Restored(step, state, record["data"], record["meta"]), ""

    def _read_record(self, step: int) -> CheckpointRecord:
        try:
            args = ocp.args.Composite(record=ocp.args.JsonRestore())
            record = self._manager.restore(step, args=args)["record"]
        except Exception as error:  # missing, truncated and malformed files raise different types
            raise UnreadableError(f"record: {type(error).__name__}: {_first_line(error)}") from None
        if not isinstance(record, dict) or record.get("sha256") != _with_hash(record)["sha256"]:
            raise UnreadableError("record: altered bytes")
        return record

    def _read_state(self, step: int, abstract_state: Any) -> Any:
        args = ocp.args.Composite(state=ocp.args.StandardRestore(flatten_state(abstract_state)))
        leaves = self._manager.restore(step, args=args)["state"]
        # Arrays may share memory with the reader, and donated leaves must not. Copying one at a time halves the peak.
        copies = [jnp.copy(leaves.pop(path)) for path in flatten_state(abstract_state)]
        return jax.tree.unflatten(jax.tree.structure(abstract_state), copies)

    def _check_tree(self, step: int, stored: dict[str, str], abstract_state: Any) -> None:
        expected = {path: _describe(leaf) for path, leaf in flatten_state(abstract_state).items()}
        if stored == expected:
            return
        differing = [
            f"{path}: checkpoint has {stored.get(path, 'nothing')}, configuration needs {expected.get(path, 'nothing')}"
            for path in [*expected, *(stored.keys() - expected.keys())]
            if stored.get(path) != expected.get(path)
        ]
        raise ConfigError(
            f"checkpoint {step} of {self.directory} holds the state of another configuration:\n  "
            + _list(differing, "\n  ")
            + "\nuse the model, optimizer and precision settings that it was saved with, or another run directory"
        )

    def _rename_damaged(self) -> None:
        """Rename damaged checkpoints that restore skipped, so that their step numbers can be saved again."""
        if not self._damaged:
            return
        if jax.process_index() == 0:
            for step in self._damaged:
                names = (self.directory / f"damaged-{step}-{n}" for n in itertools.count())
                target = next(name for name in names if not name.exists())
                with self._writing():
                    (self.directory / str(step)).rename(target)
                logger.warning("damaged checkpoint %s renamed to %s", step, target)
        wait_for_all("damaged checkpoints renamed")
        self._damaged = []
        self._manager.reload()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # The array writer reports a full disk as a ValueError that quotes the system's error.
            if not isinstance(error, OSError) and "os_error_code" not in str(error):
                raise
            cause = getattr(error, "strerror", None) or str(error).rsplit(": ", 1)[-1]
            raise ConfigError(
                f"checkpoint directory {self.directory} cannot be written ({cause}): "
                "free space or permit writing, or choose another run directory"
            ) from error


def _with_hash(record: CheckpointRecord) -> CheckpointRecord:
    """The record as it is after a JSON round trip, with a hash of its contents."""
    contents = json.loads(json.dumps({key: value for key, value in record.items() if key != "sha256"}))
    text = json.dumps(contents, sort_keys=True)
    return {**contents, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


def _list(items: list[str], separator: str = ", ") -> str:
    return separator.join(items[:8]) + (f"{separator}and {len(items) - 8} more" if len(items) > 8 else "")
