"""Sources -> listings of files, each with a digest of its content, and their records in a fixed order."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np

from jaxtrain.config import ConfigError, SourceConfig
from jaxtrain.config.data import SOURCE_SUFFIXES
from jaxtrain.data.cache import build_once
from jaxtrain.data.files import File, digest_of, fingerprint, list_files, stat, unreadable
from jaxtrain.data.foreign import foreign_file, is_blank
from jaxtrain.data.readers import FILE_KINDS, BadRecord, FileSpan, Item, Record, read_text, whole
from jaxtrain.data.records import FIX, Content
from jaxtrain.data.registered import REGISTERED, REGISTERED_URL, registered_file

READERS = {**FILE_KINDS, "registered": REGISTERED}
LISTING_FORMAT = "listing-2"
# A file written this recently may be written again without a change of its time.
UNSETTLED_S = 2.0
REASONS = 20


@dataclass
class Tally:
    """Counts while records are read: documents, bytes of their text, empty and skipped ones, the first reasons."""

    documents: int = 0
    bytes: int = 0
    empty: int = 0
    skipped: int = 0
    reasons: list[str] = field(default_factory=list)

    def skip(self, reason: str) -> None:
        """Count a record that could not be read."""
        self.skipped += 1
        if len(self.reasons) < REASONS:
            self.reasons.append(reason)

    def outcome(self) -> str:
        """How many were empty or unreadable, and why the first was."""
        first = f", the first: {self.reasons[0]}" if self.reasons else ""
        return f"{self.empty} empty, {self.skipped} unreadable{first}"

    def plus(self, other: Tally) -> Tally:
        """The counts of both."""
        return Tally(
            self.documents + other.documents,
            self.bytes + other.bytes,
            self.empty + other.empty,
            self.skipped + other.skipped,
            [*other.reasons, *self.reasons][:REASONS],
        )


@dataclass(frozen=True)
class Listing:
    """The files of one source, in order; empty and unreadable text files are counted and left out."""

    where: str
    source: SourceConfig
    files: tuple[File, ...]
    tally: Tally

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def digest(self, *more: str) -> str:
        """Fingerprint of the files, of every setting that changes what is read from them, and of `more`."""
        return fingerprint((f"{f.name}\0{f.size}\0{f.digest}" for f in self.files), _settings(self.source), *more)

    def spans(self, size: int | None = None) -> Iterator[FileSpan]:
        """The files, whole (None) or cut into spans of about `size` bytes."""
        split = READERS[self.source.kind].split if self.source.kind in READERS else whole
        for file in self.files:
            yield from split(file, size or max(file.size, 1))

    def records(self, spans: Iterable[FileSpan], on_bad: str, tally: Tally, cache: Path) -> Iterator[Record]:
        """Records of spans that are not empty, at most max_documents.

        Raises ConfigError for a bad record when `on_bad` is "fail", and when a file changed since it was listed.
        """
        return islice(self._records(spans, on_bad, tally, cache), self.source.max_documents)

    def _records(self, spans: Iterable[FileSpan], on_bad: str, tally: Tally, cache: Path) -> Iterator[Record]:
        for span in spans:
            for item in READERS[self.source.kind].read(span, self.source, cache):
                if isinstance(item, BadRecord):
                    refuse_or_count(item, self.where, on_bad, tally)
                elif not _size(item.content):
                    tally.empty += 1
                else:
                    yield item
            if self.source.registered is not None:
                continue
            now = stat(span.file.url, span.file.name)
            if now is None or (now.size, now.stamp) != (span.file.size, span.file.stamp):
                raise ConfigError(
                    f"{span.file.url} changed while the corpus was being built: start again when nothing writes to it"
                )


def refuse_or_count(bad: BadRecord, where: str, on_bad: str, tally: Tally) -> None:
    """Raise ConfigError for a record that cannot be read, or count it."""
    if on_bad == "fail":
        registered = bad.file.url.startswith(REGISTERED_URL)
        exclude = "" if registered else f"leave the file out with {where}.exclude: [{bad.file.name!r}], "
        raise ConfigError(
            f"{where}: {bad.message}: {bad.fix}, {exclude}or leave such records out with data.on_bad_record: skip"
        )
    tally.skip(bad.message if bad.fix == FIX else f"{bad.message}: {bad.fix}")


def list_source(source: SourceConfig, where: str, cache: Path, on_bad: str = "fail") -> Listing:
    """List the files of a source by relative path with digests of their content; text is checked to be text.

    Files whose sizes and times are those of an earlier listing are not read again.
    Raises ConfigError naming setting, file and fix: path missing, nothing to read, binary or undecodable file.
    """
    if source.registered is not None:
        return Listing(where, source, (registered_file(source, where),), Tally())
    files = list_files(source, where, SOURCE_SUFFIXES[source.kind])
    if source.kind == "hf":
        files = _dataset_files(source, where, files)
    if source.kind == "tokens":
        return Listing(where, source, tuple(files), Tally())
    versions = (f"{f.name}\0{f.url}\0{f.size}\0{f.stamp}" for f in files)
    key = fingerprint(versions, _settings(source), on_bad, LISTING_FORMAT)
    record = cache / "listings" / f"{key}.json"
    if (found := _remembered(record)) is not None:
        return replace(found, where=where, source=source)
    listing = _digested(source, where, files, on_bad)
    settled = all(f.remote or not f.stamp or time.time() - int(f.stamp) / 1e9 > UNSETTLED_S for f in files)
    if settled:
        tree = {"files": [asdict(file) for file in listing.files], "tally": asdict(listing.tally)}

        def write(path: Path) -> None:
            path.write_text(json.dumps(tree))

        build_once(record, write)
    return listing


def record_name(file: str, index: int | None) -> str:
    """A document's name: its file's path within the source and, where a file holds many, its number there."""
    return file if index is None else f"{file}:{index}"


def is_held_out(name: str, share: float) -> bool:
    """Whether a document that is a file belongs to the held-out `share`, by a hash of its name alone."""
    return _hash(name) < share * 2**64


def records_held_out(file: str, indices: np.ndarray, share: float) -> np.ndarray:
    """The same for numbered documents of a file (bool). Adding files or documents does not move the others."""
    # splitmix64 (Steele, Lea and Flood 2014) of the number, begun at the name's hash.
    z = (indices.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(_hash(file))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))).astype(np.float64) < share * 2.0**64


def is_record_held_out(file: str, index: int | None, share: float) -> bool:
    """Whether one document belongs to the held-out share."""
    if index is None:
        return is_held_out(file, share)
    return bool(records_held_out(file, np.array([index]), share)[0])


def training_texts(
    listings: Sequence[Listing], share: float, on_bad: str, cache: Path, limit: int
) -> tuple[str, Callable[[], Iterator[str]]]:
    """A key and the texts that a tokenizer is trained on: about `limit` bytes that are not held out.

    Text files come in order of a hash of their content; a file of records gives its first records, up to its share.
    """
    total = sum(listing.bytes for listing in listings)
    scale = limit / max(total, 1)
    # The size of a registered source is not known before it is read.
    unsized = limit / max(len(listings), 1)
    parts = [(listing, _sample(listing, share, listing.bytes * scale)) for listing in listings]
    key = fingerprint([
        *(file.digest for _, files in parts for file in files),
        *(listing.digest(str(scale)) for listing in listings if listing.source.kind != "text"),
    ])  # fmt: skip

    def texts() -> Iterator[str]:
        for listing, files in parts:
            for file in files:
                budget = unsized if listing.source.registered is not None else file.size * scale
                yield from _texts(listing, file, share, on_bad, cache, budget)

    return key, texts


def _settings(source: SourceConfig) -> str:
    """Every setting of a source that changes what is read from its files."""
    elsewhere = {"weight", "epochs", "include", "exclude", "registered", source.kind}
    if not source.options:
        elsewhere.add("options")
    return source.kind + json.dumps(source.model_dump(mode="json", exclude=elsewhere), sort_keys=True)


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=8).digest(), "big")


def _sample(listing: Listing, share: float, budget: float) -> list[File]:
    if listing.source.kind != "text":
        return list(listing.files)
    chosen = []
    for file in sorted(listing.files, key=lambda file: file.digest):
        if is_held_out(file.name, share):
            continue
        if budget <= 0:
            break
        budget -= file.size
        chosen.append(file)
    return chosen


def _texts(listing: Listing, file: File, share: float, on_bad: str, cache: Path, budget: float) -> Iterator[str]:
    spans = READERS[listing.source.kind].split(file, max(file.size, 1))
    for record in listing.records(spans, on_bad, Tally(), cache):
        if is_record_held_out(file.name, record.index, share):
            continue
        texts = texts_of(record.content)
        yield from texts
        budget -= sum(map(len, texts))
        if budget <= 0 and record.index is not None:
            return


def texts_of(content: Content) -> list[str]:
    """The texts of a document: none of token ids."""
    if isinstance(content, str):
        return [content]
    return [turn.text for turn in content] if isinstance(content, tuple) else []


def _size(content: Content) -> int:
    if isinstance(content, str):
        return len(content) if content.strip() else 0
    return len(content)


def _digested(source: SourceConfig, where: str, files: Sequence[File], on_bad: str) -> Listing:
    tally, found = Tally(), list[File]()
    for file in files:
        if source.kind == "text" and len(found) == source.max_documents:
            break
        if source.kind == "text":
            data = _checked_text(file, where, on_bad, tally)
            digest = hashlib.blake2b(data, digest_size=16).hexdigest() if data else ""
        else:
            digest = _checked_digest(source, file, where, on_bad, tally)
        if digest:
            found.append(replace(file, digest=digest))
    if not found:
        raise ConfigError(
            f"{where}.{source.kind} is {source.path!r}: no file with text matches include {source.include} "
            f"and exclude {source.exclude} ({tally.outcome()}): "
            "widen include, or name another path"
        )
    return Listing(where, source, tuple(found), tally)


def _checked_text(file: File, where: str, on_bad: str, tally: Tally) -> bytes:
    """The bytes of a text file; none when it is empty or unreadable, which is counted."""
    item: Item | None = next(read_text(FileSpan(file, 0, file.size, 0, file.size)), None)
    if isinstance(item, Record):
        assert isinstance(item.content, str)
        return item.content.encode()
    if item is None:
        tally.empty += 1
    else:
        refuse_or_count(item, where, on_bad, tally)
    return b""


def _checked_digest(source: SourceConfig, file: File, where: str, on_bad: str, tally: Tally) -> str:
    """Digest of a file of records; none when it has no bytes or is no file of its kind, which is counted.

    One without records is counted too.
    """
    if not file.size:
        tally.empty += 1
        return ""
    try:
        found = foreign_file(file, source.kind)
        if found is None:
            # Reading a file's table of contents detects a truncated file before anything is built.
            spans = list(FILE_KINDS[source.kind].split(file, file.size))
            tally.empty += not spans or (source.kind == "jsonl" and is_blank(file))
            # Object storage reports versions, and reading whole objects is slow.
            return fingerprint([file.stamp]) if file.remote and file.stamp else digest_of(file)
        bad = BadRecord(file, f"{file.url} is {found.what}", found.fix)
    except OSError as error:
        bad = BadRecord(file, f"{file.url} cannot be read ({unreadable(error)})")
    except ConfigError as error:
        bad = BadRecord(file, str(error))
    refuse_or_count(bad, where, on_bad, tally)
    return ""


def _remembered(record: Path) -> Listing | None:
    """A listing of the same files, if there is one; a damaged one is removed."""
    try:
        tree = json.loads(record.read_text())
        files = tuple(File(**entry) for entry in tree["files"])
        return Listing("", SourceConfig(text=""), files, Tally(**tree["tally"]))
    except OSError:
        return None
    except (ValueError, KeyError, TypeError):
        record.unlink(missing_ok=True)
        return None


def _dataset_files(source: SourceConfig, where: str, files: list[File]) -> list[File]:
    """The Arrow files, in order, that state.json of a folder saved by the datasets library lists; all without one."""
    root = source.path if "://" in source.path else str(Path(source.path).expanduser())
    root = root.rstrip("/")
    try:
        if (splits := stat(f"{root}/dataset_dict.json", "")) is not None:
            names = json.loads(splits.read())["splits"]
            raise ConfigError(
                f"{where}.hf is {source.path!r}, which holds the splits {', '.join(names)}: "
                f"name one of them, such as {root}/{names[0]}"
            )
        if (state := stat(f"{root}/state.json", "")) is None:
            return files
        tree = json.loads(state.read())
        listed = [entry["filename"] for entry in tree["_data_files"]]
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{where}.hf: {root} is damaged ({unreadable(error)}): save it again") from None
    found = {file.name: file for file in files}
    if missing := [name for name in listed if name not in found]:
        raise ConfigError(f"{where}.hf: {root} lacks {', '.join(missing)}, which state.json lists: fetch it again")
    if tree.get("_indices_data_files"):
        raise ConfigError(f"{where}.hf: {root} is stored with a table of indices: flatten_indices() it and save again")
    return [found[name] for name in listed]
