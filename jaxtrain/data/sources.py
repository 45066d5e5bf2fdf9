"""Sources -> a listing of documents in a fixed order, checked to be text, each with a digest of its content.

Every kind of source ends in the same `Document`; a further kind is one more function beside `_text_files`.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from jaxtrain.config import ConfigError, SourceConfig

# Parts of the standard library that are no prose of programs: other people's packages, fixtures, character tables.
STDLIB_SKIPPED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
)


@dataclass(frozen=True)
class Document:
    """One text before it is tokenized: its name within the source (posix path), file, bytes, digest of the content."""

    name: str
    path: Path
    size: int
    digest: str

    def read(self) -> str:
        """The text; raises ConfigError when the file changed since it was listed."""
        data = self.path.read_bytes() if self.path.is_file() else b""
        if _digest(data) != self.digest:
            raise ConfigError(f"{self.path} changed while the corpus was being built: start again when it is at rest")
        return data.decode("utf-8")


@dataclass(frozen=True)
class Listing:
    """The documents of all sources, and how many files held no text and were left out."""

    documents: tuple[Document, ...]
    empty: int

    @property
    def bytes(self) -> int:
        """Bytes of text in all documents."""
        return sum(d.size for d in self.documents)

    def digest(self, *more: str) -> str:
        """Fingerprint of the names, sizes and contents, and of anything else that matters."""
        return fingerprint((f"{d.name}\0{d.size}\0{d.digest}" for d in self.documents), *more)


def list_documents(sources: Sequence[SourceConfig]) -> Listing:
    """List and check every document, source by source, by relative path; reads each file once.

    Raises ConfigError naming setting, file and mend: path missing, nothing to read, binary or undecodable file.
    """
    documents: list[Document] = []
    empty = 0
    for index, source in enumerate(sources):
        where = f"data.sources[{index}]"
        count = 0
        for name, path in _text_files(source, where):
            if count == source.max_documents:
                break
            data = _read_checked(path, name, where)
            if data.strip():
                documents.append(Document(name, path, len(data), _digest(data)))
                count += 1
            else:
                empty += 1
        if not count:
            raise ConfigError(
                f"{where}.text is {source.text!r}: no file with text matches include {source.include} "
                f"and exclude {source.exclude} ({empty} empty): widen include, or name another folder"
            )
    return Listing(tuple(documents), empty)


def is_held_out(name: str, share: float) -> bool:
    """Whether a document belongs to the held-out `share`, by a hash of its name alone: added files move no other."""
    return (
        int.from_bytes(hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=8).digest(), "big")
        < share * 2**64
    )


def fingerprint(parts: Iterable[str], *more: str) -> str:
    """Hex digest (32 digits) of a sequence of strings."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (*parts, *more):
        digest.update(f"{len(part)}:{part}".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _text_files(source: SourceConfig, where: str) -> Iterator[tuple[str, Path]]:
    """(name, path) of a text source's files; hidden files and folders are not read."""
    stdlib = source.path == "stdlib"
    root = Path(sysconfig.get_paths()["stdlib"]) if stdlib else Path(source.path).expanduser()
    if root.is_file():
        yield root.name, root
        return
    if not root.is_dir():
        raise ConfigError(f"{where}.text is {source.text!r}: there is no file or folder {root.absolute()}")
    for name in sorted(_walk(root, STDLIB_SKIPPED if stdlib else frozenset())):
        if _matches(name, source.include) and not _matches(name, source.exclude):
            if stdlib and not name.endswith(".py"):
                continue
            yield name, root / name


def _walk(root: Path, skipped: frozenset[str]) -> Iterator[str]:
    def refuse(error: OSError) -> None:
        raise ConfigError(f"the folder {error.filename} cannot be read ({error.strerror}): make it readable")

    for folder, folders, files in os.walk(root, onerror=refuse):
        folders[:] = [f for f in folders if f not in skipped and not f.startswith(".")]
        relative = Path(folder).relative_to(root)
        yield from ((relative / f).as_posix() for f in files if not f.startswith("."))


def _matches(name: str, globs: Sequence[str]) -> bool:
    """A glob is held against the file's name and against its path within the source."""
    return any(fnmatch(name, glob) or fnmatch(name.rpartition("/")[2], glob) for glob in globs)


def _read_checked(path: Path, name: str, where: str) -> bytes:
    leave = f"leave it out with {where}.exclude: [{name!r}]"
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{where}: {path} is no regular file: {leave}")
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{where}: {path} cannot be read ({error.strerror}): mend that, or {leave}") from None
    if (at := data.find(0)) >= 0:
        raise ConfigError(f"{where}: {path} is binary, not text (a zero byte at offset {at}): {leave}")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where}: {path} is not UTF-8 (byte 0x{data[error.start]:02x} at offset {error.start}): "
            f"convert it, or {leave}"
        ) from None
    return data


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
