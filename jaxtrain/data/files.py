"""Paths, folders, globs and URLs -> files in a fixed order, opened the same way locally and on object storage.

Local paths go through pathlib; a path with '://' goes through fsspec, whose drivers for object storage are separate
packages (gcsfs, s3fs, adlfs).
"""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO, cast

import fsspec
from fsspec.core import url_to_fs

from jaxtrain.config import ConfigError, SourceConfig
from jaxtrain.data.cache import build_once

# Parts of the standard library that are left out: installed packages, test fixtures, character tables.
STDLIB_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
)
READ_BLOCK = 2**20
SAMPLED_BLOCKS = 64
# Keys under which object stores report a file's version; the first one found is used.
STAMPS = ("ETag", "etag", "md5Hash", "content_md5", "mtime", "LastModified", "last_modified", "created")


@dataclass(frozen=True)
class File:
    """One file: its name within the source (posix), path or URL, bytes, version, and digest of its content."""

    name: str
    url: str
    size: int
    stamp: str
    digest: str = ""

    @property
    def remote(self) -> bool:
        """Whether the file is on object storage."""
        return "://" in self.url

    def open(self) -> BinaryIO:
        """The file for reading bytes."""
        if self.remote:
            return cast(BinaryIO, fsspec.open(self.url, "rb").open())
        return open(self.url, "rb")

    def read(self) -> bytes:
        """All bytes."""
        with self.open() as stream:
            return stream.read()

    def local(self, cache: Path) -> Path:
        """A path on this machine: the file itself, or a copy of a remote one in the cache."""
        if not self.remote:
            return Path(self.url)

        def fetch(path: Path) -> None:
            with self.open() as stream, path.open("wb") as out:
                shutil.copyfileobj(stream, out, 16 * READ_BLOCK)

        key = fingerprint([self.url, str(self.size), self.stamp])
        return build_once(cache / "files" / key, fetch)

    def sibling(self, suffix: str) -> File | None:
        """The file beside this one with another suffix, if there is one."""
        return stat(self.url.removesuffix(Path(self.url).suffix) + suffix, str(Path(self.name).with_suffix(suffix)))


def stat(url: str, name: str) -> File | None:
    """One file by path or URL; None where there is none."""
    try:
        if "://" in url:
            filesystem, path = url_to_fs(url)
            return _remote(filesystem, filesystem.info(path), name)
        status = os.stat(url)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return File(name, url, status.st_size, str(status.st_mtime_ns))


def list_files(source: SourceConfig, where: str, suffixes: Sequence[str]) -> list[File]:
    """Files of a source, by name; from a folder or glob only those with one of `suffixes`, unless include is set.

    Raises ConfigError: nothing is there, a folder cannot be read, no driver for this storage.
    """
    where = f"{where}.{source.kind}"
    pairs = _list_remote(source, where) if "://" in source.path else _list_local(source, where)
    wanted = [
        file
        for file, named in pairs
        if named
        or (
            matches(file.name, source.include)
            and not matches(file.name, source.exclude)
            and (source.include != ["*"] or not suffixes or file.name.endswith(tuple(suffixes)))
        )
    ]
    if not wanted:
        kinds = f" and ends in {' or '.join(suffixes)}" if suffixes and source.include == ["*"] else ""
        raise ConfigError(
            f"{where} is {source.path!r}: no file matches include {source.include} and exclude {source.exclude}"
            f"{kinds}: widen include, or name another path"
        )
    return sorted(wanted, key=lambda file: file.name)


def matches(name: str, globs: Sequence[str]) -> bool:
    """Whether a glob fits the file's name or its path within the source."""
    return any(fnmatch(name, pattern) or fnmatch(name.rpartition("/")[2], pattern) for pattern in globs)


def digest_of(file: File) -> str:
    """Digest (32 hex digits) of a file's whole content, read in blocks."""
    digest = hashlib.blake2b(digest_size=16)
    with file.open() as stream:
        while block := stream.read(4 * READ_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def sampled_digest(path: Path) -> str:
    """Digest of a file's size, its first and last megabyte and 64 evenly spaced blocks of 4 KiB between.

    A copy on another host has the same digest. A change of a few bytes between the blocks is missed; a file that was
    written again is noticed.
    """
    size = path.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as stream:
        for at, count in (
            (0, READ_BLOCK),
            *((size * i // SAMPLED_BLOCKS, 4096) for i in range(SAMPLED_BLOCKS)),
            (max(size - READ_BLOCK, 0), READ_BLOCK),
        ):
            stream.seek(at)
            digest.update(stream.read(count))
    return digest.hexdigest()


def fingerprint(parts: Iterable[str], *more: str) -> str:
    """Hex digest (32 digits) of a sequence of strings."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (*parts, *more):
        digest.update(f"{len(part)}:{part}".encode(errors="surrogateescape"))
    return digest.hexdigest()


def unreadable(error: BaseException) -> str:
    """The message of an operating system's or a library's error, on one line."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return " ".join(text.split())[:300]


def _list_local(source: SourceConfig, where: str) -> Iterator[tuple[File, bool]]:
    stdlib = source.kind == "text" and source.path == "stdlib"
    root = Path(sysconfig.get_paths()["stdlib"] if stdlib else source.path).expanduser()
    if root.is_file():
        yield _stat_or_dangling(root, root.name), True
    elif root.is_dir():
        for name in _walk(root, STDLIB_SKIPPED if stdlib else frozenset()):
            if not stdlib or name.endswith(".py"):
                yield _stat_or_dangling(root / name, name), False
    elif glob.has_magic(str(root)):
        base = _fixed(root)
        for path in glob.glob(str(root), recursive=True):
            if Path(path).is_file():
                yield _stat_or_dangling(Path(path), Path(path).relative_to(base).as_posix()), False
    else:
        prefix = f": Megatron's prefix is not enough, name {root}.bin" if Path(f"{root}.bin").is_file() else ""
        raise ConfigError(f"{where} is {source.path!r}: there is no file or folder {root.absolute()}{prefix}")


def _fixed(pattern: Path) -> Path:
    """The part of a glob's path before its first wild card."""
    fixed = []
    for part in pattern.parts:
        if glob.has_magic(part):
            break
        fixed.append(part)
    return Path(*fixed)


def _stat_or_dangling(path: Path, name: str) -> File:
    # A dangling link is reported by its reader, with the setting that leaves it out.
    return stat(str(path), name) or File(name, str(path), 0, "")


def _list_remote(source: SourceConfig, where: str) -> Iterator[tuple[File, bool]]:
    try:
        filesystem, root = url_to_fs(source.path)
        if glob.has_magic(root):
            base = root[: min(root.index(c) for c in "*?[" if c in root)].rpartition("/")[0]
            found = filesystem.glob(root, detail=True).values()
        else:
            base, found = root, filesystem.find(root, detail=True).values()
        for info in found:
            if info["type"] == "file":
                name = info["name"].removeprefix(base).lstrip("/")
                yield _remote(filesystem, info, name or root.rpartition("/")[2]), not name
    except (ImportError, ValueError) as error:
        raise ConfigError(f"{where} is {source.path!r}: no driver reads it ({unreadable(error)})") from None
    except OSError as error:
        raise ConfigError(f"{where} is {source.path!r}: it cannot be listed ({unreadable(error)})") from None


def _remote(filesystem: Any, info: dict[str, Any], name: str) -> File:
    stamp = next((info[key] for key in STAMPS if info.get(key)), "")
    # Listings and single look-ups of one driver may differ in the type of a time.
    stamp = str(stamp.timestamp() if isinstance(stamp, datetime) else stamp)
    return File(name, filesystem.unstrip_protocol(info["name"]), int(info["size"]), stamp)


def _walk(root: Path, skipped: frozenset[str]) -> Iterator[str]:
    def refuse(error: OSError) -> None:
        raise ConfigError(f"the folder {error.filename} cannot be read ({error.strerror}): make it readable")

    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = [f for f in folders if f not in skipped and not f.startswith(".")]
        relative = Path(folder).relative_to(root)
        yield from ((relative / f).as_posix() for f in files if not f.startswith("."))
