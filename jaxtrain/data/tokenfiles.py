"""Token files: Megatron's .bin/.idx and flat .bin; the sidecar that records which tokenizer wrote them.

An index (Megatron-LM, megatron/core/datasets/indexed_dataset.py) is, little-endian: 9 bytes of magic, version 1 (u64),
code of the dtype (u8), number of sequences (u64), number of document borders (u64); then the sequences' lengths in
tokens (i32), their offsets in bytes (i64), and the documents' borders in sequences (i64, the first is 0).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from jaxtrain.config import ConfigError, SourceConfig
from jaxtrain.data.cache import build_once
from jaxtrain.data.files import READ_BLOCK, File, fingerprint, sampled_digest, unreadable
from jaxtrain.data.foreign import HEAD, foreign_head
from jaxtrain.data.stored import Stored
from jaxtrain.data.tokenheader import HEADER_BYTES, check_dtype, read_header

INDEX_MAGIC = b"MMIDIDX\x00\x00"
OLD_INDEX_MAGIC = b"TNTIDX\x00\x00"
# Endings that preprocess_data.py gives its files.
INDEXED_STEMS = ("_document", "_sentence")
INDEX_HEADER = struct.Struct("<9sQBQQ")
INDEX_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
INDEX_CODES = {name: code for code, name in INDEX_DTYPES.items()}
SIDECAR, PARTIAL, TOKENIZER = "tokens.json", "tokens.partial.json", "tokenizer.json"
SCORED_SUFFIX = ".scored"


@dataclass(frozen=True)
class Shard:
    """Counts of one written shard: `largest` is its largest token id, `bytes` the size of its text before tokenizing.

    A unit of input without a document has counts but no file. `reasons` says why the first records were skipped.
    """

    name: str
    documents: int
    tokens: int
    bytes: int
    largest: int
    skipped: int
    empty: int
    reasons: Sequence[str] = ()


@dataclass(frozen=True)
class Sidecar:
    """Content of tokens.json beside token shards: format, dtype, whether tokens are masked, tokenizer, shards."""

    format: str
    dtype: str
    scored: bool
    tokenizer: str
    shards: tuple[Shard, ...]

    def total(self, count: str) -> int:
        """A count of Shard over all shards."""
        return sum(getattr(shard, count) for shard in self.shards)

    def shard(self, name: str) -> Shard | None:
        """The shard of this file name (without suffix), if it was written with the others."""
        return self._by_name.get(name)

    @cached_property
    def _by_name(self) -> dict[str, Shard]:
        return {shard.name: shard for shard in self.shards}

    def dump(self, key: str) -> str:
        """JSON, with the totals and the `key` of what was tokenized."""
        totals = {key: self.total(key) for key in ("documents", "tokens", "bytes", "skipped", "empty")}
        ratio = {"bytes_per_token": round(totals["bytes"] / max(totals["tokens"], 1), 4)}
        return json.dumps({**asdict(self), **totals, **ratio, "key": key}, indent=1) + "\n"


@dataclass(frozen=True)
class TokenFile:
    """One open file: flat tokens, borders of its documents, flags beside the tokens, digest of all of it."""

    tokens: Stored
    starts: np.ndarray
    stops: np.ndarray
    scored: Stored | None
    fingerprint: str


def read_sidecar(folder: str) -> Sidecar | None:
    """The sidecar of a folder of token shards; None where there is none.

    Raises ConfigError when it is damaged, or the shards are not all written yet.
    """
    path = Path(folder) / SIDECAR
    if not path.exists():
        if (path.with_name(PARTIAL)).exists():
            raise ConfigError(
                f"{folder} holds token shards that are not all written: run jaxtrain tokenize with --out {folder} again"
            )
        return None
    return _sidecar(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=16)  # called for each of thousands of shards
def _sidecar(path: Path, version: int) -> Sidecar:
    try:
        tree = json.loads(path.read_text())
        shards = tuple(Shard(**entry) for entry in tree["shards"])
        return Sidecar(tree["format"], tree["dtype"], tree["scored"], tree["tokenizer"], shards)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({unreadable(error)}): write the shards again") from None


def open_token_file(
    file: File, source: SourceConfig, bos: int | None, eos: int, vocab_size: int, cache: Path
) -> TokenFile:
    """Open a token file. The ids of a file without sidecar are scanned once for each version; nothing else is read.

    Raises ConfigError naming the file and the token: truncated, wrong index, an id beyond the vocabulary.
    """
    path, index = file.local(cache), file.sibling(".idx")
    sidecar = None if file.remote else read_sidecar(str(path.parent))
    if sidecar and sidecar.format == "bin" and index is None:
        raise ConfigError(f"{file.url} has lost its index {path.with_suffix('.idx').name}: write the shards again")
    header = None if sidecar else _check_head(file, path, source, index is None)
    digests = [sampled_digest(path)]
    starts, stops, offset = None, None, 0
    if index:
        digests.append(sampled_digest(index.local(cache)))
        dtype, starts, stops = read_index(index.local(cache), file.size)
        if not sidecar:
            check_dtype(file, dtype, source, "its index says")
    elif header is not None:
        dtype, offset = header, HEADER_BYTES
        digests.append(f"header {offset}")
    else:
        dtype = np.dtype(source.dtype or "uint16").newbyteorder("<")
    if not file.size or file.size % dtype.itemsize:
        raise ConfigError(
            f"{file.url} is truncated or not of {dtype.name}: {file.size} bytes are no whole number of "
            f"{dtype.itemsize}-byte token ids; fetch it again, or set dtype of the source"
        )
    tokens = Stored(path, dtype, offset)
    shard = sidecar.shard(path.stem) if sidecar else None
    largest = shard.largest if shard and shard.tokens == len(tokens) else None
    if starts is None or largest is None:
        cut = None if starts is not None else Cut.before(bos) if offset and bos is not None else Cut.after(eos)
        largest, smallest, ends = _scanned(path, file, dtype, offset, cut, cache)
        if smallest < 0:
            _refuse_id(file, tokens, vocab_size)
        if starts is None:
            starts, stops = _documents(ends, bool(offset))
    assert largest is not None and stops is not None
    if largest >= vocab_size:
        _refuse_id(file, tokens, vocab_size)
    scored = _map_scored(file, path, len(tokens)) if sidecar and sidecar.scored else None
    return TokenFile(tokens, starts, stops, scored, fingerprint(digests, dtype.name))


def _check_head(file: File, path: Path, source: SourceConfig, flat: bool) -> np.dtype | None:
    """The dtype that the header of a flat file names, if it has one; raises ConfigError for what is no token file."""
    with path.open("rb") as stream:
        head = stream.read(HEAD)
    if (found := foreign_head(file, head, "tokens")) is not None:
        raise ConfigError(f"{file.url} is {found.what}: {found.fix}")
    if flat and path.stem.endswith(INDEXED_STEMS):
        raise ConfigError(
            f"{file.url} has the name of Megatron's preprocess_data.py and no index {path.with_suffix('.idx').name} "
            "beside it: fetch the index too, or rename the file if it is flat"
        )
    return read_header(file, head, source) if flat else None


def _documents(ends: np.ndarray, headed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Starts and stops of the documents of a flat file, which end there."""
    starts = np.concatenate([[0], ends[:-1]])
    # With a header, the end token precedes each document: the first one ends nothing.
    first = int(headed and len(ends) > 1 and ends[0] == 1)
    return starts[first:], ends[first:]


def read_index(path: Path, size: int) -> tuple[np.dtype, np.ndarray, np.ndarray]:
    """dtype, starts and stops (in tokens, int64) of the documents of an index whose .bin has `size` bytes.

    Raises ConfigError: not an index, truncated, or it describes another file.
    """
    raw = np.memmap(path, np.uint8, mode="r") if path.stat().st_size else np.zeros(0, np.uint8)
    header = raw[: INDEX_HEADER.size].tobytes()
    whole = len(header) == INDEX_HEADER.size
    magic, version, code, sequences, borders = INDEX_HEADER.unpack(header) if whole else (b"",) * 5
    if header.startswith(OLD_INDEX_MAGIC):
        raise ConfigError(
            f"{path} is an index of Megatron's older formats (lazy, cached): write the files again with "
            "preprocess_data.py --dataset-impl mmap"
        )
    if magic != INDEX_MAGIC or version != 1 or code not in INDEX_DTYPES:
        raise ConfigError(
            f"{path} is no Megatron index (magic {magic!r}, version {version}, dtype {code}): remove it if the .bin is "
            f"flat; known are version 1 and dtypes {', '.join(INDEX_DTYPES.values())}"
        )
    dtype = np.dtype(INDEX_DTYPES[code]).newbyteorder("<")
    need = INDEX_HEADER.size + 12 * sequences + 8 * borders
    if len(raw) < need or not sequences:
        raise ConfigError(
            f"{path} is cut short: {len(raw)} bytes where {sequences} sequences need {need}; fetch it again"
        )
    sizes = np.frombuffer(raw, "<i4", sequences, INDEX_HEADER.size)
    offsets = np.frombuffer(raw, "<i8", sequences, INDEX_HEADER.size + 4 * sequences)
    documents = np.frombuffer(raw, "<i8", borders, INDEX_HEADER.size + 12 * sequences)
    ends = np.cumsum(sizes, dtype=np.int64)
    fits = (
        (offsets == (ends - sizes) * dtype.itemsize).all()
        and (sizes >= 0).all()
        and borders > 1
        and documents[0] == 0
        and documents[-1] == sequences
        and (np.diff(documents) >= 0).all()
    )
    if not fits:
        raise ConfigError(
            f"{path} is damaged: its offsets, lengths and documents contradict each other; write it again"
        )
    if ends[-1] * dtype.itemsize != size:
        raise ConfigError(
            f"{path.with_suffix('.bin')} has {size} bytes where its index describes {ends[-1]} tokens of {dtype.name}, "
            f"{ends[-1] * dtype.itemsize} bytes: it is truncated or the index belongs to another file; fetch both again"
        )
    edges = np.concatenate([[0], ends])[documents]
    return dtype, edges[:-1], edges[1:]


class TokenWriter:
    """Writes one shard NAME.bin with NAME.idx (and NAME.scored, a byte a token), renamed to NAME when complete."""

    def __init__(self, path: Path, dtype: str, scored: bool) -> None:
        self._path, self._dtype, self._scored = path, np.dtype(dtype), scored
        self._suffixes = (".bin", *([SCORED_SUFFIX] if scored else []), ".idx")
        self._files: list[BinaryIO] = []
        self._sizes: list[int] = []

    def __enter__(self) -> TokenWriter:
        self._files = [self._scratch(suffix).open("wb") for suffix in self._suffixes[:-1]]
        return self

    def write(self, ids: np.ndarray, scored: np.ndarray | None) -> None:
        """Append one document; `scored` None is all."""
        ids.astype(self._dtype).tofile(self._files[0])
        if self._scored:
            (np.ones(len(ids), bool) if scored is None else scored).tofile(self._files[1])
        self._sizes.append(len(ids))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            file.close()
        if kind is None:
            write_index(self._scratch(".idx"), self._dtype.name, np.asarray(self._sizes, np.int64))
            for suffix in self._suffixes:
                self._scratch(suffix).rename(self._path.with_suffix(suffix))

    def _scratch(self, suffix: str) -> Path:
        return self._path.with_suffix(f"{suffix}.partial")


def write_index(path: Path, dtype: str, sizes: np.ndarray) -> None:
    """Write the index of consecutive documents of these sizes in tokens, each one sequence."""
    with path.open("wb") as file:
        file.write(INDEX_HEADER.pack(INDEX_MAGIC, 1, INDEX_CODES[dtype], len(sizes), len(sizes) + 1))
        sizes.astype("<i4").tofile(file)
        ((np.cumsum(sizes) - sizes) * np.dtype(dtype).itemsize).astype("<i8").tofile(file)
        np.arange(len(sizes) + 1, dtype="<i8").tofile(file)


def token_dtype(vocab_size: int) -> str:
    """The narrowest dtype that Megatron's format has for ids below `vocab_size`."""
    return "uint16" if vocab_size <= 2**16 else "int32"


def _map_scored(file: File, path: Path, count: int) -> Stored:
    beside = path.with_suffix(SCORED_SUFFIX)
    if not beside.exists() or beside.stat().st_size != count:
        raise ConfigError(f"{beside}, the loss mask of {file.url}, is missing or cut short: write the shards again")
    return Stored(beside, np.bool_)


@dataclass(frozen=True)
class Cut:
    """Where a flat file is cut into documents: `shift` tokens after each `token`."""

    token: int
    shift: int

    @classmethod
    def before(cls, token: int) -> Cut:
        """A document begins with the token."""
        return cls(token, 0)

    @classmethod
    def after(cls, token: int) -> Cut:
        """A document ends with the token."""
        return cls(token, 1)


def _scanned(
    path: Path, file: File, dtype: np.dtype, offset: int, cut: Cut | None, cache: Path
) -> tuple[int, int, np.ndarray]:
    """Largest and smallest id, and the ends of documents by `cut`; scanned once for a file's version."""

    def scan(target: Path) -> None:
        largest, smallest, found, at = 0, 0, [np.zeros(0, np.int64)], 0
        for block in _blocks(path, dtype, offset):
            largest, smallest = max(largest, int(block.max())), min(smallest, int(block.min()))
            if cut is not None:
                found.append(np.flatnonzero(block == cut.token) + (at + cut.shift))
            at += len(block)
        ends = np.concatenate(found)
        ends = ends[ends > 0]
        if cut is not None and (not len(ends) or ends[-1] != at):
            ends = np.append(ends, at)
        np.savez(target, range=np.array([largest, smallest]), ends=ends)

    parts = [sampled_digest(path), file.stamp, dtype.name, str(cut and cut.token)]
    key = fingerprint(parts, *([f"{offset} {cut}"] if offset else []))
    found: Any = np.load(build_once(cache / "token-files" / f"{key}.npz", scan))
    return int(found["range"][0]), int(found["range"][1]), found["ends"]


def _blocks(path: Path, dtype: np.dtype, offset: int) -> Iterator[np.ndarray]:
    with path.open("rb") as file:
        file.seek(offset)
        while len(block := np.fromfile(file, dtype, 8 * READ_BLOCK)):
            yield block


def _refuse_id(file: File, tokens: Stored, vocab_size: int) -> None:
    for at in range(0, len(tokens), 8 * READ_BLOCK):
        block = tokens[at : at + 8 * READ_BLOCK]
        if len(bad := np.flatnonzero((block >= vocab_size) | (block < 0))):
            raise ConfigError(
                f"{file.url} has token id {block[bad[0]]} at token {at + bad[0]}, beyond the tokenizer's vocabulary of "
                f"{vocab_size} (ids 0..{vocab_size - 1}): name the tokenizer that wrote it in data.tokenizer.path, or "
                "set dtype of the source"
            )
    raise ConfigError(f"{file.url} differs from {SIDECAR} beside it: write the shards again")
