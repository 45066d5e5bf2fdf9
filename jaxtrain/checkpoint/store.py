"""Checkpoints: state and data position saved together after a step, verified when read, restored onto any mesh.

A save copies the state to host memory, then a thread writes it to STEP.tmp. When the files of all processes are on
disk, process 0 renames the folder to STEP: a checkpoint is whole or not there. The format is in `files`, reading in
`reader`, rotation in `retention`. Processes agree through the coordination service, never by device collectives.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from jaxtrain.checkpoint.digest import digest, flatten_state
from jaxtrain.checkpoint.files import (
    RECORD,
    STATE,
    CheckpointRecord,
    DamagedError,
    describe_error,
    list_steps,
    read_record,
    release_memory,
    removed_while_trained,
    sync_files,
    system_error,
    with_hash,
    write_synced,
)
from jaxtrain.checkpoint.gather import shared_reason
from jaxtrain.checkpoint.reader import READ_LIMIT, CheckpointReader, Restored, bytes_of, describe_leaf
from jaxtrain.checkpoint.retention import Facts, WallClock, facts_of, retained
from jaxtrain.config import CheckpointConfig, StorageError

logger = logging.getLogger(__name__)

TEMPORARY = (".tmp", ".removed")
"""Endings of folders that are being written or removed; those that a kill left are removed at the next start."""
WRITE_LIMIT = 3600.0
"""Seconds that one process may write longer than another."""


class Checkpoints(CheckpointReader):
    """The checkpoints of one run directory, which this run writes. Every method is a collective of all processes."""

    def __init__(self, directory: Path, config: CheckpointConfig, on_saved: Callable[..., None] | None = None) -> None:
        """Open or create `directory` and delete incomplete checkpoints; StorageError if it cannot be written.

        `on_saved(step, blocked_s, bytes, write_s)` is called in the writer's thread when a checkpoint is on disk.
        """
        super().__init__(directory)
        self._config, self._on_saved = config, on_saved
        self._primary = jax.process_index() == 0
        self._clock = WallClock(config.every_minutes)
        self._facts: dict[int, Facts] = {}
        self._history: set[int] = set()
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._handle: int | None = None
        self._all_do("checkpoint directory", self._open)
        # Held open: the number of a removed folder would go to the next one.
        with contextlib.suppress(OSError):
            self._handle = os.open(self.directory, os.O_RDONLY)

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after `step`, by checkpoint.every or checkpoint.every_minutes."""
        every = self._config.every
        return (every is not None and step % every == 0) or self._clock.due(step)

    def save(self, step: int, state: Any, data: dict[str, Any], meta: dict[str, Any]) -> None:
        """Write `state` (arrays), `data` and `meta` (JSON, equal on all processes) as the checkpoint of `step`.

        Returns as soon as the state may be donated. Writing continues in the background; the next call raises its
        errors. A step that this run has saved or restored already is left as it is; one of another history (after a
        rollback) is replaced. Raises StorageError if the directory cannot be written.
        """
        begin = time.perf_counter()
        self.wait()
        self._clock.restart(step)
        if step in self._history:
            return
        self._all_do("checkpoint begun", lambda: self._begin(step))
        self._damaged = []
        leaves = flatten_state(state)
        size = sum(bytes_of(leaf) for leaf in leaves.values())
        shapes = {path: describe_leaf(leaf) for path, leaf in leaves.items()}
        record = with_hash({"data": data, "meta": meta, "digests": digest(state), "leaves": shapes})
        futures: list[Any] = []
        problem = ""
        try:
            futures = start_writing(self._draft(step) / STATE, leaves)
        except Exception as error:  # shared before it is raised: the other processes must not wait for this one
            problem = self._describe(error)
        self._history.add(step)
        blocked_s = time.perf_counter() - begin

        def write() -> None:
            try:
                self._commit(step, record, futures, problem)
                self._report(step, blocked_s, size, time.perf_counter() - begin - blocked_s)
            except Exception as error:  # raised by the next call of `wait`
                self._history.discard(step)
                self._failure = error
            futures.clear()
            release_memory()

        self._thread = threading.Thread(target=write, name=f"checkpoint {step}")
        self._thread.start()
        if not self._config.asynchronous:
            self.wait()

    def restore(self, abstract_state: Any, subset: bool = False, only: int | None = None) -> Restored | None:
        """As `CheckpointReader.restore`, after pending writes; the next save renames damaged checkpoints."""
        self.wait()
        restored = super().restore(abstract_state, subset, only)
        self._history = set() if restored is None else {restored.step}
        return restored

    def latest(self) -> int | None:
        """The newest step that is saved or being saved."""
        return max({*self.steps(), *self._history}, default=None)

    def discard_after(self, step: int) -> None:
        """Remove the checkpoints of later steps, which a rollback to `step` replays; StorageError if it fails."""
        self.wait()

        def discard() -> None:
            self._set_damaged_aside()
            for later in list_steps(self.directory):
                if later > step:
                    self._remove(later)

        self._all_do("checkpoints discarded", discard)
        self._damaged = []
        self._history = {s for s in self._history if s <= step}

    def wait(self) -> None:
        """Wait until everything is on disk; StorageError if writing failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        """Wait for writes."""
        try:
            self.wait()
        finally:
            if self._handle is not None:
                os.close(self._handle)
                self._handle = None

    def _open(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for entry in self.directory.iterdir():
            if entry.name.endswith(TEMPORARY) or ".orbax-checkpoint-tmp" in entry.name:
                shutil.rmtree(entry)
        for step in list_steps(self.directory):
            # A record that cannot be read says nothing: the checkpoint counts as neither good nor bad.
            with contextlib.suppress(DamagedError, OSError):
                self._facts[step] = facts_of(read_record(self.directory / str(step))["meta"])

    def _begin(self, step: int) -> None:
        """Set damaged checkpoints aside and create the folder to write to."""
        if self._was_removed():
            raise FileNotFoundError(self.directory)
        self._set_damaged_aside()
        shutil.rmtree(self._draft(step), ignore_errors=True)
        (self._draft(step) / STATE).mkdir(parents=True)

    def _set_damaged_aside(self) -> None:
        for damaged in self._damaged:
            names = (self.directory / f"damaged-{damaged}-{n}" for n in itertools.count())
            target = next(name for name in names if not name.exists())
            (self.directory / str(damaged)).rename(target)
            self._facts.pop(damaged, None)
            logger.warning("damaged checkpoint %s renamed to %s", damaged, target)

    def _commit(self, step: int, record: CheckpointRecord, futures: list[Any], problem: str) -> None:
        """Wait for the files of all processes, then make them the checkpoint of `step`."""
        try:
            for future in futures:
                future.result()
        except Exception as error:  # the array writer reports a full disk as a ValueError
            problem = problem or self._describe(error)
        problem = shared_reason("checkpoint written", problem, WRITE_LIMIT)
        if problem:
            if self._primary:
                shutil.rmtree(self._draft(step), ignore_errors=True)
                if self._was_removed():
                    # The array writer makes missing folders again.
                    with contextlib.suppress(OSError):
                        self.directory.rmdir()
                        self.directory.parent.rmdir()
            raise StorageError(problem)
        self._all_do("checkpoint committed", lambda: self._finish(step, record))

    def _finish(self, step: int, record: CheckpointRecord) -> None:
        draft, final = self._draft(step), self.directory / str(step)
        try:
            finish_writing(draft / STATE)
            write_synced(draft / RECORD, record)
            sync_files(draft)
            if final.exists():
                logger.warning("checkpoint %s of %s belongs to another history: replaced", step, self.directory)
                self._remove(step)
            draft.rename(final)
        except Exception:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        sync_files(self.directory, deep=False)
        self._facts[step] = facts_of(record["meta"])
        self._rotate()

    def _rotate(self) -> None:
        facts = {step: self._facts.get(step, Facts(good=False)) for step in list_steps(self.directory)}
        for step in sorted(facts.keys() - retained(facts, self._config) - set(self._damaged)):
            try:
                self._remove(step)
            except OSError as error:
                logger.warning("old checkpoint %s of %s cannot be removed: %s", step, self.directory, error)

    def _remove(self, step: int) -> None:
        """Remove a checkpoint; a reader or a kill sees it whole or not at all."""
        removed = self.directory / f"{step}{TEMPORARY[1]}"
        shutil.rmtree(removed, ignore_errors=True)
        (self.directory / str(step)).rename(removed)
        shutil.rmtree(removed)
        self._facts.pop(step, None)

    def _draft(self, step: int) -> Path:
        return self.directory / f"{step}{TEMPORARY[0]}"

    def _report(self, step: int, blocked_s: float, size: int, write_s: float) -> None:
        if self._primary and self._on_saved is not None:
            self._on_saved(step=step, blocked_s=blocked_s, bytes=size, write_s=write_s)

    def _all_do(self, name: str, action: Callable[[], None]) -> None:
        """Let process 0 act; StorageError on all processes where it fails."""
        problem = ""
        if self._primary:
            try:
                action()
            except Exception as error:  # the array writer reports a full disk as a ValueError
                problem = self._describe(error)
        if problem := shared_reason(name, problem, READ_LIMIT):
            raise StorageError(problem)

    def _was_removed(self) -> bool:
        """Whether the directory is not the one that was opened."""
        if self._handle is None:
            return False
        try:
            return not os.path.samestat(os.fstat(self._handle), self.directory.stat())
        except OSError:
            return True

    def _describe(self, error: Exception) -> str:
        if self._was_removed():
            return removed_while_trained(f"checkpoint directory {self.directory}")
        number = system_error(error)
        cause = describe_error(error) if number is None else f"{os.strerror(number)}: {describe_error(error)}"
        return (
            f"checkpoint directory {self.directory} cannot be written ({cause}): free space or permit writing and run "
            "the same command again, or choose another run directory"
        )


def start_writing(folder: Path, leaves: dict[str, Any]) -> list[Any]:
    """Copy the leaves to host memory and start writing this process's part of them to `folder`; futures to wait for."""
    args = ocp.args.StandardSave(leaves)
    return _run(lambda: ocp.StandardCheckpointHandler().async_save(epath.Path(folder), args=args)) or []


def finish_writing(folder: Path) -> None:
    """Merge the parts of all processes; for one process, after all have written."""
    ocp.StandardCheckpointHandler().finalize(epath.Path(folder))


def _run(start: Callable[[], Any]) -> Any:
    """The result of a coroutine, in a thread of its own: the caller may be inside an event loop (a notebook)."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((asyncio.run(start()), None))
        except BaseException as error:  # raised in the caller's thread
            outcome.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    result, error = outcome[0]
    if error is not None:
        raise error
    return result
