"""Checkpoints: saved together at an update border, verified when read, restored onto any mesh.

A step holds the state's arrays (Orbax, by path) and one JSON record: data position, meta, the digest and shape of
every leaf, and a hash of the record itself. Orbax commits a step atomically but does not notice altered bytes; the
digests do.
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
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from jaxtrain.checkpoint.digest import digest, flatten
from jaxtrain.config import CheckpointConfig, ConfigError

log = logging.getLogger(__name__)

CheckpointRecord = dict[str, Any]


class Restored(NamedTuple):
    """What a checkpoint held: update count, state on its target shardings, data position, meta."""

    step: int
    state: Any
    data: dict[str, Any]
    meta: dict[str, Any]


class UnreadableError(Exception):
    """A step whose bytes are missing, altered or not JSON."""


class Checkpoints:
    """The checkpoints of one run directory; every method is called by all processes alike."""

    def __init__(self, directory: Path, config: CheckpointConfig) -> None:
        """Open or create `directory`, clearing half-written steps; ConfigError where it cannot be written."""
        self.directory = Path(directory).absolute()
        self._rejected: list[int] = []
        options = ocp.CheckpointManagerOptions(
            max_to_keep=config.keep,
            enable_async_checkpointing=config.asynchronous,
            cleanup_tmp_directories=True,
            lightweight_initialize=True,
        )
        with self._writing():
            self._manager = ocp.CheckpointManager(self.directory, options=options)

    def save(self, step: int, state: Any, data: dict[str, Any], meta: dict[str, Any]) -> bool:
        """Write `state` (arrays), `data` and `meta` (JSON, equal on all processes); False if the step is saved already.

        Returns when the state may be donated; writing goes on in the background, and what went wrong there is raised
        by the next call. Raises ConfigError where the directory cannot be written.
        """
        self._set_rejected_aside()
        if step in self._manager.all_steps():
            return False
        leaves = flatten(state)
        shapes = {path: _describe(leaf) for path, leaf in leaves.items()}
        record = _seal({"data": data, "meta": meta, "digests": digest(state), "leaves": shapes})
        args = ocp.args.Composite(state=ocp.args.StandardSave(leaves), record=ocp.args.JsonSave(record))
        with self._writing():
            return self._manager.save(step, args=args, force=True)

    def restore(self, abstract_state: Any) -> Restored | None:
        """The newest intact step on the shardings of `abstract_state` (ShapeDtypeStructs); None if none was saved.

        Every leaf is a fresh buffer, safe to donate. A damaged step is reported and the one before is tried; the next
        save sets it aside. Raises ConfigError where no step is intact, or where a step holds another model's state.
        """
        self.wait()
        reasons: dict[int, str] = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            restored, reason = self._try(step, abstract_state)
            if restored is not None:
                self._rejected = list(reasons)
                return restored
            log.warning("checkpoint %s of %s is damaged: %s", step, self.directory, reason)
            reasons[step] = reason
        if not reasons:
            return None
        lines = "".join(f"\n  step {step}: {reason}" for step, reason in reasons.items())
        raise ConfigError(
            f"no checkpoint in {self.directory} can be read:{lines}\n"
            "restore the directory from a copy, or move it away to start from the beginning"
        )

    def read_meta(self, step: int) -> dict[str, Any]:
        """The meta saved with a step; ConfigError where its record cannot be read."""
        try:
            return self._read_record(step)["meta"]
        except UnreadableError as error:
            raise ConfigError(f"checkpoint {step} of {self.directory} cannot be read: {error}") from None

    def latest(self) -> int | None:
        """The newest step saved or being saved."""
        return self._manager.latest_step()

    def wait(self) -> None:
        """Return when everything is on disk; ConfigError where writing failed."""
        with self._writing():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait, then release the writer's threads."""
        with self._writing():
            self._manager.close()

    def _try(self, step: int, abstract_state: Any) -> tuple[Restored | None, str]:
        """One step, or why not: processes agree, since a file may be lost to one of them only."""
        reason, record = "", {}
        try:
            record = self._read_record(step)
        except UnreadableError as error:
            reason = str(error)
        if reason := _agree(reason):
            return None, reason
        self._check_tree(step, record["leaves"], abstract_state)
        try:
            state = self._read_state(step, abstract_state)
        except Exception as error:  # the array library raises whatever its file formats make of altered bytes
            reason = f"{type(error).__name__}: {_first_line(error)}"
        if reason := _agree(reason):
            return None, reason
        found = digest(state)
        altered = [path for path, value in record["digests"].items() if found[path] != value]
        if altered:
            return None, f"altered bytes in {_list(altered)}"
        return Restored(step, state, record["data"], record["meta"]), ""

    def _read_record(self, step: int) -> CheckpointRecord:
        try:
            args = ocp.args.Composite(record=ocp.args.JsonRestore())
            record = self._manager.restore(step, args=args)["record"]
        except Exception as error:  # missing, truncated or not JSON: each its own type
            raise UnreadableError(f"record: {type(error).__name__}: {_first_line(error)}") from None
        if not isinstance(record, dict) or record.get("sha256") != _seal(record)["sha256"]:
            raise UnreadableError("record: altered bytes")
        return record

    def _read_state(self, step: int, abstract_state: Any) -> Any:
        args = ocp.args.Composite(state=ocp.args.StandardRestore(flatten(abstract_state)))
        leaves = self._manager.restore(step, args=args)["state"]
        # What was read may share memory with the reader; a donated leaf must be its own. One at a time: half the peak.
        owned = [jnp.copy(leaves.pop(path)) for path in flatten(abstract_state)]
        return jax.tree.unflatten(jax.tree.structure(abstract_state), owned)

    def _check_tree(self, step: int, saved: dict[str, str], abstract_state: Any) -> None:
        wanted = {path: _describe(leaf) for path, leaf in flatten(abstract_state).items()}
        if saved == wanted:
            return
        differing = [
            f"{path}: saved {saved.get(path, 'nothing')}, wanted {wanted.get(path, 'nothing')}"
            for path in [*wanted, *(saved.keys() - wanted.keys())]
            if saved.get(path) != wanted.get(path)
        ]
        raise ConfigError(
            f"checkpoint {step} of {self.directory} holds the state of another configuration:\n  "
            + _list(differing, "\n  ")
            + "\nuse the model, optimizer and precision settings it was saved with, or another run directory"
        )

    def _set_rejected_aside(self) -> None:
        """Rename damaged steps that restore passed over, so that their numbers are free and nothing is lost."""
        if not self._rejected:
            return
        if jax.process_index() == 0:
            for step in self._rejected:
                names = (self.directory / f"damaged-{step}-{n}" for n in itertools.count())
                target = next(name for name in names if not name.exists())
                with self._writing():
                    (self.directory / str(step)).rename(target)
                log.warning("damaged checkpoint %s now lies in %s", step, target)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("damaged checkpoints set aside")
        self._rejected = []
        self._manager.reload()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # the array writer reports a full disk as a ValueError that quotes the system's error
            if not isinstance(error, OSError) and "os_error_code" not in str(error):
                raise
            cause = getattr(error, "strerror", None) or str(error).rsplit(": ", 1)[-1]
            raise ConfigError(
                f"checkpoint directory {self.directory} cannot be written ({cause}): "
                "free space or permit writing, or choose another run directory"
            ) from error


def _seal(record: CheckpointRecord) -> CheckpointRecord:
    """The record as JSON reads it back, with the hash of its contents."""
    contents = json.loads(json.dumps({key: value for key, value in record.items() if key != "sha256"}))
    text = json.dumps(contents, sort_keys=True)
    return {**contents, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def _agree(reason: str) -> str:
    """Empty if no process has a reason to give up, else this process's or a note on the others."""
    if jax.process_count() == 1:
        return reason
    failed = np.flatnonzero(multihost_utils.process_allgather(np.bool_(reason)))
    return reason or (f"unreadable on process {_list([str(i) for i in failed])}" if failed.size else "")


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


def _list(items: list[str], separator: str = ", ") -> str:
    return separator.join(items[:8]) + (f"{separator}and {len(items) - 8} more" if len(items) > 8 else "")
