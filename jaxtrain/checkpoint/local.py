"""Checkpoints on each node's local disk, with copies in other nodes, between two durable ones (emergency checkpoints).

**Files.** DIRECTORY/RUN/STEP-TOKEN/UNIT.shards, where RUN identifies the run directory, TOKEN the save, and UNIT a part
of the state (checkpoint/units.py). A file is a hash, a header (record of the save as a durable checkpoint has it, and
path, index, offset and SHA-256 of each shard), then the shards. It appears by rename, after fsync.

**Saving.** Each process copies its shards to host memory; a thread writes the files that are this process's part of its
node. When all have told through the coordination service that theirs are on disk, the processes that the plan names
fetch copies from the other nodes' disks (checkpoint/peers.py). When all have told that theirs arrived, older saves are
removed. A save that fails is reported and removed; the run goes on, the durable checkpoints protect it.

**Restoring.** Each process lists the files of its node and tells step, token and unit; all compute the same choice:
the newest save of which every unit is on some disk, if it is newer than the newest durable checkpoint (where that is
damaged, than the one before). Whoever answers for a file verifies its hashes; damaged ones are removed, and the choice
is made again. Then nodes fetch what the plan wants on their disk: a replaced node gets its shards, and the copies that
it held. Each process reads its shards from its node's disk, and the digests of the restored state are compared with
those of the record. Whatever cannot be read, fetched or verified leads to an older save or to the durable checkpoint.
Files of another run, mesh, number of processes or grouping of processes into nodes are ignored, and that is printed.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.checkpoint.digest import digest, flatten_state
from jaxtrain.checkpoint.files import DamagedError, describe_error, release_memory, sync_files
from jaxtrain.checkpoint.gather import shared_reason
from jaxtrain.checkpoint.peers import PeerError, Peers
from jaxtrain.checkpoint.reader import READ_LIMIT, Restored
from jaxtrain.checkpoint.unitfiles import read_header, read_shard, verify_unit, write_unit
from jaxtrain.checkpoint.units import (
    Choice,
    Held,
    Index,
    Unit,
    choose,
    layout_hash,
    normal_index,
    plan_units,
    tier_bytes,
)
from jaxtrain.config import ConfigError, LocalTierConfig, StorageError
from jaxtrain.launch.coordination import exchange, host_numbers, process_name, rank_and_count

logger = logging.getLogger(__name__)

WRITE_LIMIT = 3600.0
"""Seconds that one process may write or fetch longer than another."""
RUN = re.compile(r"[0-9a-f]{32}")
"""Names of the folders of runs."""
SAVE = re.compile(r"(\d+)-([0-9a-f]+)")
"""Names of the folders of saves."""
ATTEMPTS = 3
"""Processes that are asked for a file, one after the other."""


class LocalTier:
    """The local checkpoints of one run. Every method is a collective of all processes."""

    def __init__(
        self,
        config: LocalTierConfig,
        run: str,
        abstract: Any,
        on_saved: Callable[..., None] | None = None,
    ) -> None:
        """`run`: identity of the run, equal on all processes; `abstract`: shapes and shardings of the state.

        `on_saved(step, blocked_s, write_s, bytes, copied)` is called in process 0 when a save is on all disks. Raises
        ConfigError for a directory that is no local disk, StorageError where it cannot be written.
        """
        self._config, self._run, self._on_saved = config, run, on_saved
        self._rank = rank_and_count()[0]
        self._nodes = host_numbers() or (0,)
        self._node = self._nodes[self._rank]
        self._mates = [rank for rank, node in enumerate(self._nodes) if node == self._node]
        self._leaves = flatten_state(abstract)
        self._structure = jax.tree.structure(abstract)
        self.units = plan_units(self._leaves, lambda device: device.process_index, self._nodes, config.peers)
        self._layout = layout_hash(self.units)
        assert config.directory is not None, "without a directory there is no local tier"
        self._base = _expand(config.directory)
        self._root = self._base / run
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self.newest: int | None = None
        """The step of the newest save that this start has restored or written."""
        self._open()
        self._peers = Peers(self._root, self._nodes) if len(set(self._nodes)) > 1 else None

    def notes(self) -> list[str]:
        """What is saved where, for the start of a run; and what is on the disks that is not of this run."""
        size, nodes = tier_bytes(self.units), len(set(self._nodes))
        copied = "held by data-parallel replicas in other nodes, nothing is sent"
        if nodes == 1 and self._config.peers:
            copied = "none, there is one node: a lost disk falls back to the durable checkpoint"
        elif not self._config.peers:
            copied = "none (checkpoint.local.peers 0)"
        elif size.sent:
            copied = f"{size.copies:,} bytes a node are fetched from other nodes"
        lines = [
            f"local checkpoints: every {self._config.every} steps in {self._config.directory} of each node, "
            f"{size.own:,} bytes of its own shards; copies of other nodes' shards: {copied}"
        ]
        found = exchange("local checkpoints of others", self._strangers())
        if foreign := sum(one["runs"] for one in found if one):
            lines.append(f"local checkpoints: {foreign} folders of other runs are ignored (remove them to free space)")
        return lines

    def due(self, step: int) -> bool:
        """Whether a save is due after `step`."""
        return step % self._config.every == 0

    def save(self, step: int, state: Any, data: dict[str, Any], meta: dict[str, Any]) -> None:
        """Write `state`, `data` and `meta` (JSON, equal on all processes) as the local checkpoint of `step`.

        Returns as soon as the state may be donated; what fails later is logged, and nothing is raised.
        """
        begin = time.perf_counter()
        self.wait()
        token = exchange("local checkpoint begun", secrets.token_hex(8), WRITE_LIMIT)[0]
        mine = [unit for unit in self.units if unit.writers.get(self._node) == self._rank]
        leaves = flatten_state(state)
        header = {
            "run": self._run, "step": step, "token": token, "layout": self._layout, "data": data, "meta": meta,
            "digests": digest(state),
        }  # fmt: skip
        wanted = {(shard.path, shard.where) for unit in mine for shard in unit.shards}
        shards = host_shards(leaves, wanted)
        blocked_s = time.perf_counter() - begin

        def write() -> None:
            try:
                self._write(step, token, header, mine, shards)
                shards.clear()
                release_memory()
                self.newest = step
                if self._rank == 0 and self._on_saved is not None:
                    size, write_s = tier_bytes(self.units), time.perf_counter() - begin - blocked_s
                    self._on_saved(step=step, blocked_s=blocked_s, write_s=write_s, bytes=size.total, copied=size.sent)
            except StorageError as error:
                if self._rank == 0:
                    logger.warning("local checkpoint of step %s failed, the run goes on: %s", step, error)
                self._remove(f"{step}-{token}")
            except Exception as error:  # raised by the next call of `wait`
                self._failure = error

        self._thread = threading.Thread(target=write, name=f"local checkpoint {step}")
        self._thread.start()

    def restore(self, newer_than: int) -> Restored | None:
        """The newest complete and intact save of a step after `newer_than` (that of process 0), else None.

        Every leaf is a new buffer, sharded as the run's state.
        """
        self.wait()
        begin = time.perf_counter()
        newer_than = exchange("local checkpoints wanted", newer_than, READ_LIMIT)[0]
        failed: set[tuple[int, str]] = set()
        while True:
            held = [[(s, t, u) for s, t, u in files] for files in exchange("local files", self._held(), READ_LIMIT)]
            choice = choose(held, len(self.units), newer_than, failed)
            if choice is None:
                self._explain(held, newer_than)
                return None
            if any(exchange("local files verified", self._remove_damaged(choice), READ_LIMIT)):
                continue
            if reason := shared_reason("local files fetched", self._repair(choice), WRITE_LIMIT):
                restored = None
            else:
                restored, reason = self._load(choice)
            if restored is not None:
                self.newest = restored.step
                self._report_lost(choice)
                return restored._replace(seconds=time.perf_counter() - begin)
            if self._rank == 0:
                logger.warning("local checkpoint of step %s cannot be restored: %s", choice.step, reason)
            failed.add((choice.step, choice.token))

    def discard_after(self, step: int) -> None:
        """Remove the saves of later steps: they belong to a history that the run has left."""
        self.wait()
        if self.newest is not None and self.newest > step:
            self.newest = None
        if self._rank == self._mates[0]:
            for name, (later, _) in self._saves().items():
                if later > step:
                    self._remove(name)
        exchange("local checkpoints discarded", None, WRITE_LIMIT)

    def wait(self) -> None:
        """Wait until the last save is on all disks, or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        """Wait for the last save and stop serving files."""
        try:
            self.wait()
        finally:
            if self._peers is not None:
                self._peers.close()

    def _open(self) -> None:
        """Create the run's folder on each node, remove unfinished files, and see that each node has its own disk."""
        token = exchange("local disks begun", secrets.token_hex(8))[0]
        problem, mark = "", self._base / f".node-{self._node}-{token}"
        if self._rank == self._mates[0]:
            try:
                self._root.mkdir(parents=True, exist_ok=True)
                for left in self._root.rglob("*.tmp"):
                    left.unlink()
                mark.touch()
            except OSError as error:
                problem = (
                    f"checkpoint.local.directory {self._base} cannot be written ({error.strerror}): create it on the "
                    "local disk of every node, or permit writing"
                )
        if reason := shared_reason("local checkpoint directory", problem):
            raise StorageError(reason)
        try:
            marks = sorted(path.name.split("-")[1] for path in self._base.glob(f".node-*-{token}"))
        except OSError:
            marks = []
        seen = exchange("local disks", marks)
        if self._rank == self._mates[0]:
            mark.unlink(missing_ok=True)
        for rank, (node, names) in enumerate(zip(self._nodes, seen, strict=True)):
            if names != [str(node)]:
                which = ", ".join(process_name(int(name)) for name in names) or "no process"
                raise ConfigError(
                    f"checkpoint.local.directory {self._config.directory} is not one folder of each node: "
                    f"{process_name(rank)} shares it with the nodes of {which}, its node is that of "
                    f"{process_name(node)}: name a folder on the node's own disk (JAXTRAIN_HOST names a process's node)"
                )

    def _write(
        self, step: int, token: str, header: dict[str, Any], mine: list[Unit], shards: dict[Any, np.ndarray]
    ) -> None:
        """Write this process's files, fetch its copies, and remove older saves; StorageError on all where one fails."""
        name, problem = f"{step}-{token}", ""
        try:
            (self._root / name).mkdir(parents=True, exist_ok=True)
            for unit in mine:
                write_unit(self._path(name, unit.number), header, unit, shards)
        except OSError as error:
            problem = f"{self._base} cannot be written ({error.strerror or error})"
        if reason := shared_reason("local checkpoint written", problem, WRITE_LIMIT):
            raise StorageError(reason)
        try:
            for unit in self.units:
                if unit.copies.get(self._node) == self._rank:
                    self._fetch(name, unit.number, list(unit.writers.values()))
        except (OSError, PeerError, DamagedError) as error:
            problem = f"copies of other nodes' shards: {describe_error(error)}"
        if reason := shared_reason("local checkpoint copied", problem, WRITE_LIMIT):
            raise StorageError(reason)
        if self._rank == self._mates[0]:
            self._rotate(step, name)

    def _rotate(self, step: int, newest: str) -> None:
        """Keep the newest checkpoint.local.keep steps up to `step`, one save of each."""
        saves = self._saves()
        before = sorted({at for at, _ in saves.values() if at < step}, reverse=True)[: self._config.keep - 1]
        for name, (at, _) in saves.items():
            if name != newest and at not in before:
                self._remove(name)

    def _saves(self) -> dict[str, tuple[int, str]]:
        """Folder -> (step, token) of the saves on this node's disk."""
        try:
            names = os.listdir(self._root)
        except OSError:
            return {}
        found = {name: match for name in names if (match := SAVE.fullmatch(name))}
        return {name: (int(match[1]), match[2]) for name, match in found.items()}

    def _held(self) -> list[Held]:
        """The files of this node that this process answers for, by their headers."""
        files = sorted(path for name in self._saves() for path in (self._root / name).glob("*.shards"))
        found = []
        for path in files[self._mates.index(self._rank) :: len(self._mates)]:
            try:
                header, _ = read_header(path)
            except (DamagedError, OSError) as error:
                logger.warning("local checkpoint file %s is left out: %s", path, describe_error(error))
                continue
            if header["layout"] == self._layout and header["run"] == self._run:
                found.append((int(header["step"]), str(header["token"]), int(header["unit"])))
        return found

    def _remove_damaged(self, choice: Choice) -> bool:
        """Verify the files of a choice that this process answers for; whether one is damaged, and was removed."""
        name, removed = f"{choice.step}-{choice.token}", False
        for unit, ranks in choice.sources.items():
            if self._rank in ranks:
                path = self._path(name, unit)
                try:
                    verify_unit(path)
                except (DamagedError, OSError) as error:
                    logger.warning("local checkpoint file %s is removed: %s", path, describe_error(error))
                    with contextlib.suppress(OSError):
                        path.unlink(missing_ok=True)
                    removed = True
        return removed

    def _repair(self, choice: Choice) -> str:
        """Fetch what the plan wants this process to hold and its node lacks; why a needed file is not had, else ''."""
        name = f"{choice.step}-{choice.token}"
        for unit in self.units:
            sources = choice.sources[unit.number]
            if unit.keepers.get(self._node) != self._rank or {*sources} & {*self._mates}:
                continue
            try:
                (self._root / name).mkdir(parents=True, exist_ok=True)
                self._fetch(name, unit.number, sources)
            except (OSError, PeerError, DamagedError) as error:
                if self._node in unit.writers:
                    return f"unit {unit.number}: {describe_error(error)}"
                logger.warning("a copy of local checkpoint %s is missing here: %s", choice.step, describe_error(error))
        return ""

    def _fetch(self, name: str, unit: int, ranks: list[int]) -> None:
        """Fetch a file from one of the processes and verify it; raises the last one's error."""
        assert self._peers is not None, "with one node nothing is fetched"
        path = self._path(name, unit)
        draft = path.with_suffix(".tmp")
        # Many processes may want the same file: each begins with another holder.
        turn = self._rank % len(ranks)
        for attempt, rank in enumerate((ranks[turn:] + ranks[:turn])[:ATTEMPTS], 1):
            try:
                with draft.open("wb") as file:
                    self._peers.fetch(rank, f"{name}/{path.name}", file)
                    file.flush()
                    os.fsync(file.fileno())
                verify_unit(draft)
                draft.rename(path)
                sync_files(path.parent, deep=False)
                return
            except (PeerError, DamagedError):
                draft.unlink(missing_ok=True)
                if attempt == min(len(ranks), ATTEMPTS):
                    raise

    def _load(self, choice: Choice) -> tuple[Restored | None, str]:
        """The state from this node's files, or the reason why it is not the one that was saved. A collective."""
        name, problem = f"{choice.step}-{choice.token}", ""
        leaves: dict[str, jax.Array] = {}
        header: dict[str, Any] = {}
        try:
            found: dict[tuple[str, Index], tuple[Path, int, dict[str, Any]]] = {}
            for unit in self.units:
                if self._rank in unit.holders:
                    path = self._path(name, unit.number)
                    header, begin = read_header(path)
                    for entry in header["shards"]:
                        found[entry["path"], tuple(map(tuple, entry["index"]))] = path, begin, entry
            for path_of_leaf, leaf in self._leaves.items():
                leaves[path_of_leaf] = _restore_leaf(path_of_leaf, leaf, found)
        except (OSError, DamagedError, KeyError) as error:
            problem = describe_error(error)
        release_memory()
        if reason := shared_reason("local files read", problem, READ_LIMIT):
            return None, reason
        state = jax.tree.unflatten(self._structure, list(leaves.values()))
        altered = [path for path, value in digest(state).items() if header["digests"][path] != value]
        if altered:
            return None, f"other digests of {', '.join(altered[:8])}"
        size = sum(unit.bytes for unit in self.units)
        return Restored(choice.step, state, header["data"], header["meta"], bytes=size), ""

    def _report_lost(self, choice: Choice) -> None:
        """Say which nodes had lost shards."""
        nodes = sorted({*self._nodes})
        for node in nodes:
            mates = {rank for rank, its in enumerate(self._nodes) if its == node}
            missing = [u for u in self.units if node in u.writers and not mates & {*choice.sources[u.number]}]
            if missing and self._rank == 0:
                logger.warning(
                    "local checkpoint of step %s: the node of %s had lost %s of its shards' bytes, its peers gave them",
                    choice.step, process_name(min(mates)), f"{sum(u.bytes for u in missing):,}",
                )  # fmt: skip

    def _explain(self, held: list[list[Held]], newer_than: int) -> None:
        """Say why no local save is restored, where there are newer ones than the durable checkpoint."""
        steps = sorted({step for files in held for step, _, _ in files if step > newer_than})
        others = sum(one["layouts"] for one in exchange("local layouts", self._strangers()) if one)
        if self._rank != 0:
            return
        if steps:
            logger.warning(
                "local checkpoints of steps %s are not complete on the disks that are left: the durable one is used",
                ", ".join(map(str, steps[-4:])),
            )
        elif others:
            logger.warning(
                "local checkpoints of another mesh, number of processes or grouping into nodes are ignored: the "
                "durable one is used"
            )

    def _strangers(self) -> dict[str, int] | None:
        """In one process of a node: folders of other runs, and saves of this run with another layout."""
        if self._rank != self._mates[0]:
            return None
        runs = sum(bool(RUN.fullmatch(path.name)) and path.name != self._run for path in self._base.iterdir())
        layouts = 0
        for name in self._saves():
            for path in list((self._root / name).glob("*.shards"))[:1]:
                with contextlib.suppress(DamagedError, OSError):
                    layouts += read_header(path)[0]["layout"] != self._layout
        return {"runs": runs, "layouts": layouts}

    def _path(self, save: str, unit: int) -> Path:
        return self._root / save / f"{unit}.shards"

    def _remove(self, name: str) -> None:
        shutil.rmtree(self._root / name, ignore_errors=True)


def run_identity(run_dir: Path) -> str:
    """The identity of a run directory on local disks: of a random text in RUN/local_id, and of its path. A collective.

    A directory that was removed and made again, copied or moved is another run. Only process 0 reads the file, and
    creates it where it is missing.
    """
    identity = problem = ""
    if rank_and_count()[0] == 0:
        path = run_dir / "local_id"
        try:
            if not path.exists():
                path.write_text(secrets.token_hex(16))
            identity = hashlib.sha256(f"{path.read_text()} {run_dir.resolve()}".encode()).hexdigest()[:32]
        except OSError as error:
            problem = f"{path} cannot be read or written ({error.strerror})"
    if reason := shared_reason("run identity", problem):
        raise StorageError(reason)
    return str(exchange("run identity", identity)[0])


def _expand(directory: str) -> Path:
    path = os.path.expandvars(directory)
    if "$" in path:
        raise ConfigError(
            f"checkpoint.local.directory {directory} names a variable that is not set: set it on every node, or name "
            "a folder"
        )
    return Path(path).expanduser().absolute()


def host_shards(leaves: Mapping[str, Any], wanted: set[tuple[str, Index]]) -> dict[tuple[str, Index], np.ndarray]:
    """Copies of this process's shards in host memory."""
    found: dict[tuple[str, Index], np.ndarray] = {}
    for path, leaf in leaves.items():
        for shard in leaf.addressable_shards:
            key = path, normal_index(shard.index, leaf.shape)
            if key in wanted and key not in found:
                shard.data.copy_to_host_async()
                found[key] = shard.data
    # A copy: on CPU the array would be the buffer that the next step reuses.
    return {key: np.array(data, copy=True, order="C") for key, data in found.items()}


def _restore_leaf(
    path: str, leaf: Any, found: Mapping[tuple[str, Index], tuple[Path, int, dict[str, Any]]]
) -> jax.Array:
    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None, "every device of this process holds a shard"
        where = normal_index(index, leaf.shape)
        return read_shard(*found[path, where], tuple(end - begin for begin, end in where))

    array = jax.make_array_from_callback(leaf.shape, leaf.sharding, shard)
    # Arrays may share memory with what was read, and donated leaves must not.
    return jax.block_until_ready(jnp.copy(array))
