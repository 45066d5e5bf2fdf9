"""Checkpoints: state and data position saved together after a step, verified when read, restored onto any mesh.

The format is in `files`, reading in `reader`.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxtrain.checkpoint.digest import digest, flatten_state
from jaxtrain.checkpoint.files import with_hash
from jaxtrain.checkpoint.gather import orbax_without_collectives
from jaxtrain.checkpoint.reader import CheckpointReader, Restored, describe_leaf
from jaxtrain.config import CheckpointConfig, StorageError
from jaxtrain.launch.coordination import wait_for_all

logger = logging.getLogger(__name__)


class Checkpoints(CheckpointReader):
    """The checkpoints of one run directory, which this run writes. Every method is a collective of all processes."""

    def __init__(self, directory: Path, config: CheckpointConfig) -> None:
        """Open or create `directory` and delete incomplete checkpoints; StorageError if it cannot be written."""
        super().__init__(directory)
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
        errors. Raises StorageError if the directory cannot be written.
        """
        self._rename_damaged()
        if step in self._manager.all_steps():
            return False
        leaves = flatten_state(state)
        shapes = {path: describe_leaf(leaf) for path, leaf in leaves.items()}
        record = with_hash({"data": data, "meta": meta, "digests": digest(state), "leaves": shapes})
        args = ocp.args.Composite(state=ocp.args.StandardSave(leaves), record=ocp.args.JsonSave(record))
        with self._writing():
            return self._manager.save(step, args=args, force=True)

    def restore(self, abstract_state: Any, subset: bool = False, only: int | None = None) -> Restored | None:
        """As `CheckpointReader.restore`, after pending writes; the next save renames damaged checkpoints."""
        self.wait()
        return super().restore(abstract_state, subset, only)

    def latest(self) -> int | None:
        """The newest step that is saved or being saved."""
        return self._manager.latest_step()

    def wait(self) -> None:
        """Wait until everything is on disk; StorageError if writing failed."""
        with self._writing():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait for writes, then release the writer's threads."""
        with self._writing():
            self._manager.close()

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
            raise StorageError(
                f"checkpoint directory {self.directory} cannot be written ({cause}): "
                "free space or permit writing, or choose another run directory"
            ) from error
