"""The lease of a run directory: RUN/lease.json says which process trains there, so that a second one is refused.

It needs no file locks and no common clock, so it works on NFS. The file appears by link(), which is atomic, and its
owner writes heartbeats into the same inode: whoever takes the lease over replaces the file, and late heartbeats of the
old owner go into the old inode. Only one process can replace a lease: that which made lease.json.after-TOKEN, TOKEN
being that of the lease, and renames it to lease.json. A lease is stale when its process is dead on this host, or when
no heartbeat arrived for a minute by the clock of one machine: the time since boot that both share, else that of the
observer, who watches.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint.files import removed_while_trained
from jaxtrain.config import ConfigError, RunError, StorageError
from jaxtrain.launch.coordination import exchange

LEASE = "lease.json"
HEARTBEAT_S = 10.0
"""Seconds between heartbeats."""
STALE_S = 60.0
"""Seconds without a heartbeat after which a lease is taken over."""
POLL_S = 0.25
SIZE = 1024
"""Bytes of lease.json: a heartbeat overwrites it in place, and one write within a page is seen whole."""

Claim = dict[str, Any]
"""token, host, user, pid, start (of the process), boot, namespace, since (wall clock), beat, boottime (s), clock."""


class Lease:
    """A run directory held by this process until `close`; a thread writes a heartbeat every `every` seconds."""

    def __init__(self, directory: Path, claim: Claim, file: int, made: list[Path], every: float) -> None:
        self._directory, self._claim, self._file, self._made = directory, claim, file, made
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, args=(every,), name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise RunError where another process took this lease over, which it does after a minute without heartbeats.

        Raises StorageError where the lease, or the whole run directory, was removed. Call it before every save: a
        process that was suspended must not write into a directory that another one trains.
        """
        found = _read(self._directory / LEASE)
        if found is not None and found.get("token") == self._claim["token"]:
            return
        if found is None:
            raise StorageError(removed(self._directory, LEASE))
        raise RunError(
            f"{self._directory} is no longer held by this process (now {describe(found)} trains there): it was "
            "suspended or cut off from its storage for more than a minute; nothing more is written, look at the other "
            "process"
        )

    def close(self) -> None:
        """Stop the heartbeats and remove lease.json, and the folders made for it where they are still empty."""
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            os.close(self._file)
        with contextlib.suppress(OSError):
            _give_up(self._directory / LEASE, self._claim)
            for folder in self._made:
                folder.rmdir()

    def _beat(self, every: float) -> None:
        while not self._stop.wait(every):
            self._claim |= {"beat": self._claim["beat"] + 1, **_now()}
            # A storage that is away fails the next save, which says so.
            with contextlib.suppress(OSError):
                os.pwrite(self._file, _encode(self._claim), 0)
                os.fsync(self._file)


@contextlib.contextmanager
def hold(directory: Path, log: Callable[[str], None] = print) -> Iterator[Callable[[], None]]:
    """Hold the lease of a run directory; yields a function that raises RunError once it is lost. A collective.

    Process 0 takes the lease, all processes hear the verdict. Raises ConfigError where another process holds it, and
    StorageError where the directory cannot be written.
    """
    lease: Lease | None = None
    verdict: dict[str, Any] | None = None
    if jax.process_index() == 0:
        try:
            lease = take(directory, log)
        except (ConfigError, StorageError) as error:
            verdict = {"status": error.status, "message": str(error)}
    try:
        verdict = exchange("lease of the run directory", verdict)[0]
        if verdict is not None:
            kind = ConfigError if verdict["status"] == ConfigError.status else StorageError
            raise kind(verdict["message"])
        yield lease.check if lease is not None else lambda: None
    finally:
        if lease is not None:
            lease.close()


def take(
    directory: Path, log: Callable[[str], None] = print, every: float = HEARTBEAT_S, stale: float = STALE_S
) -> Lease:
    """The lease of `directory`, which is made where it is missing; a stale one is taken over, and `log` is told.

    A lease of another host is watched for up to `stale` seconds. Raises ConfigError naming the holder where it is
    alive, and StorageError where the directory cannot be written.
    """
    claim = {**_identity(), "token": uuid.uuid4().hex, "since": time.time(), "beat": 0, **_now()}
    path, file, made = directory / LEASE, None, list[Path]()
    try:
        made = _make(directory)
        while file is None:
            holders = _holders(path)
            if not holders:
                file = _create(path, claim)
                continue
            where, found = holders[-1]
            if why := _judge(where, found, stale, log):
                file = _succeed(path, holders, claim)
                if file is not None:
                    log(f"the lease of {directory} was left by {describe(found)}, {why}: taken over")
    except OSError as error:
        raise StorageError(
            f"run directory {directory} cannot be written ({error.strerror or error}): permit writing, free space, or "
            "name another --run directory"
        ) from None
    return Lease(directory, claim, file, made, every)


def removed(directory: Path, file: str) -> str:
    """The message for files of a run that were removed while a process trained it."""
    gone = not directory.is_dir()
    return removed_while_trained(
        f"the run directory {directory}" if gone else f"{file} of the run directory {directory}"
    )


@contextlib.contextmanager
def storage_errors(directory: Path) -> Iterator[None]:
    """Errors of files of a run directory as StorageError, which says what happened."""
    try:
        yield
    except OSError as error:
        path = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else None
        if path is None or not path.absolute().is_relative_to(directory.absolute()):
            raise
        if isinstance(error, FileNotFoundError):
            raise StorageError(removed(directory, str(path.absolute().relative_to(directory.absolute())))) from None
        raise StorageError(
            f"{path} cannot be read or written ({error.strerror}): free space, or permit it, and run the same command "
            "again"
        ) from None


def describe(claim: Claim) -> str:
    """'pid 77 of user ada on node1 (since 2026-01-02 03:04:05)'."""
    if not claim.get("token"):
        return "an unknown process (lease.json is unreadable)"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(claim.get("since", 0)))
    return f"pid {claim.get('pid')} of user {claim.get('user')} on {claim.get('host')} (since {since})"


def _judge(path: Path, found: Claim, stale: float, log: Callable[[str], None]) -> str:
    """Why the lease is stale, '' where it changed hands meanwhile; raises ConfigError where its holder is alive."""
    here = _identity()
    same_boot = found.get("boot") is not None and found["boot"] == here["boot"]
    if same_boot and found.get("namespace") == here["namespace"]:
        if _started(int(found["pid"])) != found.get("start"):
            return "which does not run any more"
        silent = _now()["boottime"] - found["boottime"]
        if silent > stale:
            return f"which gave no heartbeat for {silent:.0f} s"
        raise _held(path, found, silent)
    log(
        f"{path.parent} is held by {describe(found)}: watching for up to {stale:.0f} s for a heartbeat, to see whether "
        "it is alive"
    )
    begin = time.monotonic()
    while time.monotonic() - begin < stale:
        time.sleep(POLL_S)
        now = _read(path)
        if now is None or now.get("token") != found.get("token"):
            return ""
        if now.get("beat") != found.get("beat"):
            raise _held(path, now, 0.0)
    return f"which gave no heartbeat for {stale:.0f} s"


def _held(path: Path, found: Claim, silent: float) -> ConfigError:
    return ConfigError(
        f"--run {path.parent} is being trained by {describe(found)}, last heartbeat {max(silent, 0):.0f} s ago: wait "
        "for it to end, stop it, or name another --run directory"
    )


def _create(path: Path, claim: Claim) -> int | None:
    """Create the lease; returns its open file, None where there is one already. Raises OSError."""
    draft = path.with_name(f"{path.name}.{claim['token']}")
    file = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.write(file, _encode(claim))
        os.fsync(file)
        try:
            os.link(draft, path)
        except FileExistsError:
            # NFS may answer so for a link that it has made, when an answer was lost.
            if os.stat(draft).st_nlink < 2:
                os.close(file)
                return None
        except OSError:
            # A file system without hard links: creation is exclusive, the content follows.
            os.close(file)
            return _create_exclusive(path, claim)
        return file
    finally:
        draft.unlink(missing_ok=True)


def _create_exclusive(path: Path, claim: Claim) -> int | None:
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return None
    os.write(file, _encode(claim))
    os.fsync(file)
    return file


def _holders(path: Path) -> list[tuple[Path, Claim]]:
    """The lease's file and claim, then those of who takes it over, of who takes it over from that one, and so on."""
    found: list[tuple[Path, Claim]] = []
    where = path
    while (claim := _read(where)) is not None and where not in [known for known, _ in found]:
        found.append((where, claim))
        where = path.with_name(f"{path.name}.after-{claim.get('token')}")
    return found


def _succeed(path: Path, holders: list[tuple[Path, Claim]], claim: Claim) -> int | None:
    """Replace a stale lease; returns the open file of the new one, None where another process was first."""
    mine = path.with_name(f"{path.name}.after-{holders[-1][1].get('token')}")
    file = _create(mine, claim)
    if file is None:
        return None
    # Whoever replaced the lease meanwhile renamed this name away before it was made here.
    if [found.get("token") for _, found in _holders(path)] != [
        *(found.get("token") for _, found in holders), claim["token"],
    ]:  # fmt: skip
        mine.unlink()
        os.close(file)
        return None
    os.rename(mine, path)
    for left, _ in holders[1:]:
        left.unlink(missing_ok=True)
    return file


def _give_up(path: Path, claim: Claim) -> None:
    """Remove the lease of this claim, unless another process has taken it over or does so now. Raises OSError."""
    if (found := _read(path)) is None or found.get("token") != claim["token"]:
        return
    mine = path.with_name(f"{path.name}.after-{claim['token']}")
    file = _create(mine, {**claim, "token": uuid.uuid4().hex})
    if file is None:
        return
    os.close(file)
    if (found := _read(path)) is not None and found.get("token") == claim["token"]:
        path.unlink()
    mine.unlink()


def _read(path: Path) -> Claim | None:
    """The claim in a file, None where there is none; an unreadable one is a claim without a token."""
    try:
        claim = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return claim if isinstance(claim, dict) else {}


def _make(directory: Path) -> list[Path]:
    """Make a folder and its parents; returns those that were missing, innermost first."""
    missing = []
    for folder in (directory, *directory.parents):
        if folder.exists():
            break
        missing.append(folder)
    directory.mkdir(parents=True, exist_ok=True)
    return missing


def _encode(claim: Claim) -> bytes:
    return json.dumps(claim).encode().ljust(SIZE - 1)[: SIZE - 1] + b"\n"


def _identity() -> Claim:
    """What tells this process from any other: of the same host, of a later boot, of another container."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    boot = _text(Path("/proc/sys/kernel/random/boot_id"))
    namespace = None
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    pid = os.getpid()
    return {
        "host": socket.gethostname(), "user": user, "pid": pid, "start": _started(pid), "boot": boot,
        "namespace": namespace,
    }  # fmt: skip


def _now() -> Claim:
    """Clocks of a heartbeat: seconds since boot, which no clock change moves, and the wall clock for readers."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return {"boottime": time.clock_gettime(clock), "clock": time.time()}


def _started(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None where no such process runs (a zombie does not)."""
    text = _text(Path(f"/proc/{pid}/stat"))
    if text is None:
        return None
    # The command's name may contain spaces and brackets.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
