"""Files -> records: each kind of source is one entry of FILE_KINDS.

A kind cuts a file into spans that can be read independently, and reads a span as records.
What cannot be read is a `BadRecord`; the caller decides between an error and a count.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from array_record.python.array_record_module import ArrayRecordReader

from jaxtrain.config import ConfigError, SourceConfig, nearest
from jaxtrain.data.compression import CODEC_HEAD, WINDOW_FAULT, codec_of, uncompressed
from jaxtrain.data.files import READ_BLOCK, File, unreadable
from jaxtrain.data.foreign import HEAD, foreign_head, recompress
from jaxtrain.data.records import FIX, MESSAGE_KEYS, Content, UnfitError, chat_fix, content_of, decode, ids_of
from jaxtrain.data.tf_example import read_example
from jaxtrain.data.tokenfiles import read_sidecar

RECORDS_PER_READ = 1024


@dataclass(frozen=True)
class FileSpan:
    """Part lo..hi of a file, in the units of its kind; its first record has number `first`."""

    file: File
    lo: int
    hi: int
    first: int
    bytes: int


@dataclass(frozen=True)
class Record:
    """One document before it is tokenized: its number in its file (None: the file is the document) and content."""

    file: File
    index: int | None
    content: Content


@dataclass(frozen=True)
class BadRecord:
    """A record that cannot be read: its file, a message with the line, row or record and what is wrong, and a fix."""

    file: File
    message: str
    fix: str = FIX


Item = Record | BadRecord


@dataclass(frozen=True)
class Kind:
    """How one kind of source is read."""

    split: Callable[[File, int], Iterator[FileSpan]]
    read: Callable[[FileSpan, SourceConfig, Path], Iterator[Item]]


def whole(file: File, size: int) -> Iterator[FileSpan]:
    """A file that is read from its beginning."""
    yield FileSpan(file, 0, file.size, 0, file.size)


def read_text(span: FileSpan, source: SourceConfig | None = None, cache: Path | None = None) -> Iterator[Item]:
    """A file of UTF-8 text is one document; a file of white space is none."""
    found = None
    try:
        if not span.file.remote and Path(span.file.url).exists() and not Path(span.file.url).is_file():
            yield BadRecord(span.file, f"{span.file.url} is no regular file")
            return
        data = span.file.read()
        found = foreign_head(span.file, data[:HEAD], "text")
        if found and found.is_text:
            raise UnfitError(found.what, found.fix)
        text = decode(data)
    except OSError as error:
        yield BadRecord(span.file, f"{span.file.url} cannot be read ({unreadable(error)})")
    except UnfitError as error:
        # What is text may begin like a file of another kind.
        what, fix = (found.what, found.fix) if found else (str(error), error.fix)
        yield BadRecord(span.file, f"{span.file.url} is {what}", fix)
    else:
        if text.strip():
            yield Record(span.file, None, text)


def split_lines(file: File, size: int) -> Iterator[FileSpan]:
    """Uncompressed JSON lines are cut at line ends about `size` bytes apart; a compressed file is one span."""
    if file.size <= size:
        yield from whole(file, size)
        return
    lo, line = 0, 0
    with file.open() as stream:
        if codec_of(stream.read(CODEC_HEAD)):
            yield from whole(file, size)
            return
        stream.seek(0)
        while lo < file.size:
            hi, lines = lo, 0
            while hi - lo < size and (block := stream.read(min(16 * READ_BLOCK, size))):
                hi, lines = hi + len(block), lines + block.count(b"\n")
            rest = stream.readline() if hi < file.size else b""
            hi, lines = hi + len(rest), lines + rest.count(b"\n")
            if hi == lo:
                return
            yield FileSpan(file, lo, hi, line, hi - lo)
            lo, line = hi, line + lines


def read_jsonl(span: FileSpan, source: SourceConfig, cache: Path) -> Iterator[Item]:
    """Each line that is not blank is a document, numbered by its line from 1."""
    number = span.first
    try:
        with span.file.open() as raw:
            stream, codec = uncompressed(raw)
            if not codec:
                raw.seek(span.lo)
            at = span.lo
            while (codec or at < span.hi) and (line := stream.readline()):
                number, at = number + 1, at + len(line)
                if line.strip().removeprefix(codecs.BOM_UTF8):
                    yield _json_record(span.file, number, line, source, f"line {number}")
    except (OSError, EOFError) as error:
        message = f"{span.file.url} cannot be read past line {number} ({unreadable(error)})"
        yield BadRecord(span.file, message, *([recompress(span.file)] if WINDOW_FAULT in str(error) else []))


def _json_record(file: File, number: int, line: bytes, source: SourceConfig, where: str) -> Item:
    try:
        text = decode(line)
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise UnfitError(f"not JSON ({error.msg} at column {error.colno})") from None
        except (RecursionError, ValueError) as error:
            raise UnfitError(f"not JSON ({unreadable(error)})") from None
        return Record(file, number, content_of(value, source))
    except UnfitError as error:
        return BadRecord(file, f"{file.url}, {where}: {error}", error.fix)


def split_row_groups(file: File, size: int) -> Iterator[FileSpan]:
    """Row groups of a Parquet file, about `size` bytes together."""
    with _readable(file) as stream:
        meta = pq.ParquetFile(stream).metadata
        rows = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
    yield from _runs(file, rows, size)


def read_parquet(span: FileSpan, source: SourceConfig, cache: Path) -> Iterator[Item]:
    """Each row is a document, numbered from 0."""
    number = span.first
    try:
        with span.file.open() as stream:
            table = pq.ParquetFile(stream)
            columns = _columns(table.schema_arrow, source, span.file)
            for batch in table.iter_batches(RECORDS_PER_READ, list(range(span.lo, span.hi)), columns):
                yield from _rows(span.file, number, batch, source)
                number += batch.num_rows
    except (OSError, pa.ArrowException) as error:
        yield BadRecord(span.file, f"{span.file.url} cannot be read past row {number} ({unreadable(error)})")


def split_batches(file: File, size: int) -> Iterator[FileSpan]:
    """Record batches of an Arrow file, about `size` bytes together."""
    with _readable(file) as stream:
        rows = [batch.num_rows for batch in _arrow(stream)]
    yield from _runs(file, rows, size)


def read_arrow(span: FileSpan, source: SourceConfig, cache: Path) -> Iterator[Item]:
    """Each row of an Arrow stream or file, as the datasets library saves them, is a document, numbered from 0."""
    number = span.first
    try:
        with span.file.open() as stream:
            for index, batch in enumerate(_arrow(stream)):
                if not span.lo <= index < span.hi:
                    continue
                columns = _columns(batch.schema, source, span.file)
                yield from _rows(span.file, number, batch.select(columns), source)
                number += batch.num_rows
    except (OSError, pa.ArrowException) as error:
        yield BadRecord(span.file, f"{span.file.url} cannot be read past row {number} ({unreadable(error)})")


def _arrow(stream: Any) -> Iterator[pa.RecordBatch]:
    """Batches of the streaming format, or of the file format (which opens with ARROW1)."""
    file_format = stream.read(6) == b"ARROW1"
    stream.seek(0)
    if not file_format:
        yield from pa.ipc.open_stream(stream)
        return
    reader = pa.ipc.open_file(stream)
    for index in range(reader.num_record_batches):
        yield reader.get_batch(index)


def _columns(schema: pa.Schema, source: SourceConfig, file: File) -> list[str]:
    """The columns that are read; raises ConfigError when one is missing."""
    names, settings = schema.names, ("messages_field", "prompt_field", "response_field")
    wanted = {s: str(getattr(source, s)) for s in settings if getattr(source, s)} or {"field": source.field or "text"}
    for setting, name in wanted.items():
        if name not in names:
            chat = next((column.name for column in schema if _is_chat_column(column.type)), None)
            fix = f"set {setting} of the source" if chat is None or source.messages_field else chat_fix(chat)
            raise ConfigError(
                f"{file.url} has no column {name!r}{nearest(name, names)}; it has {', '.join(names)}: {fix}"
            )
    return list(wanted.values())


def _is_chat_column(kind: pa.DataType) -> bool:
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    fields = [field.name for field in kind.value_type] if lists and pa.types.is_struct(kind.value_type) else []
    return any(set(keys) <= set(fields) for keys in MESSAGE_KEYS)


def _rows(file: File, first: int, batch: pa.RecordBatch, source: SourceConfig) -> Iterator[Item]:
    column: Any = batch.column(0)
    lists = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    if lists and pa.types.is_integer(column.type.value_type) and not column.values.null_count:
        # A list column is one flat array with borders: this makes no Python object for each token.
        flat, borders, valid = (
            column.values.to_numpy(zero_copy_only=False),
            column.offsets.to_numpy(),
            column.is_valid(),
        )
        values: Any = (flat[lo:hi] if ok.as_py() else None for (lo, hi), ok in zip(pairwise(borders), valid))  # noqa: B905
        rows: Any = ({batch.schema.names[0]: value} for value in values)
    else:
        rows = _python_rows(batch)
    for number, row in enumerate(rows, first):
        try:
            if isinstance(row, UnicodeDecodeError):
                raise UnfitError(f"not UTF-8 (byte 0x{row.object[row.start]:02x} at offset {row.start})")
            yield Record(file, number, content_of(row, source))
        except UnfitError as error:
            yield BadRecord(file, f"{file.url}, row {number}: {error}", error.fix)


def _python_rows(batch: pa.RecordBatch) -> list[Any]:
    """Rows as mappings; the error in place of a row whose text is not UTF-8."""
    try:
        return list(batch.to_pylist())
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            return [error]
        return [row for index in range(batch.num_rows) for row in _python_rows(batch.slice(index, 1))]


def _runs(file: File, rows: Sequence[int], size: int) -> Iterator[FileSpan]:
    """Neighbouring groups of rows joined into spans of about `size` bytes; none where there is no row."""
    if not any(rows):
        return
    share = max(1, round(len(rows) * size / max(file.size, 1)))
    borders = [*range(0, len(rows), share), len(rows)]
    firsts = np.concatenate([[0], np.cumsum(rows)])
    for lo, hi in pairwise(borders):
        yield FileSpan(file, lo, hi, int(firsts[lo]), file.size * (hi - lo) // len(rows))


@contextmanager
def _readable(file: File) -> Iterator[Any]:
    """The opened file; an error of Arrow while reading it becomes a ConfigError that names it."""
    try:
        with file.open() as stream:
            yield stream
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{file.url} cannot be read ({unreadable(error)})") from None


def split_records(file: File, size: int) -> Iterator[FileSpan]:
    """Runs of records of an ArrayRecord file, about `size` bytes together; a remote file is one span."""
    if file.remote:
        yield FileSpan(file, 0, -1, 0, file.size)
        return
    count = _array_record(Path(file.url)).num_records()
    share = max(1, round(count * size / max(file.size, 1)))
    for lo in range(0, count, share):
        hi = min(lo + share, count)
        yield FileSpan(file, lo, hi, lo, file.size * (hi - lo) // count)


def read_arrayrecord(span: FileSpan, source: SourceConfig, cache: Path) -> Iterator[Item]:
    """Each record is a document, numbered from 0: ids when dtype is set, JSON when a field is named, else text.

    Serialized tf.train.Example messages are read by their features, of which `field` (default text) is the document.
    """
    reader = _array_record(span.file.local(cache))
    sidecar = None if span.file.remote else read_sidecar(str(Path(span.file.url).parent))
    dtype, masked = (sidecar.dtype, sidecar.scored) if sidecar else (source.dtype, False)
    fields = source.field or source.prompt_field or source.messages_field
    hi = reader.num_records() if span.hi < 0 else span.hi
    for lo in range(span.lo, hi, RECORDS_PER_READ):
        try:
            records = reader.read(lo, min(lo + RECORDS_PER_READ, hi))
        except (RuntimeError, IndexError) as error:
            yield BadRecord(span.file, f"{span.file.url} cannot be read past record {lo} ({unreadable(error)})")
            continue
        for number, data in enumerate(records, lo):
            example = read_example(data) if dtype is None else None
            if fields and dtype is None and example is None:
                yield _json_record(span.file, number, data, source, f"record {number}")
                continue
            try:
                if example is not None:
                    yield Record(span.file, number, content_of(_texts_of(example), source))
                    continue
                yield Record(span.file, number, ids_of(data, dtype, masked) if dtype else decode(data))
            except UnfitError as error:
                yield BadRecord(span.file, f"{span.file.url}, record {number}: {error}", error.fix)


def _texts_of(example: Mapping[str, Any]) -> dict[str, Any]:
    """Features of an Example, as a record of the other kinds has them: text instead of bytes."""
    return {name: decode(value) if isinstance(value, bytes) else value for name, value in example.items()}


def _array_record(path: Path) -> ArrayRecordReader:
    try:
        reader = ArrayRecordReader(str(path))
        sound = reader.ok()
    except RuntimeError:
        sound = False
    if not sound:
        raise ConfigError(f"{path} is no complete ArrayRecord file (its index at the end is damaged)")
    return reader


FILE_KINDS: dict[str, Kind] = {
    "text": Kind(whole, read_text),
    "jsonl": Kind(split_lines, read_jsonl),
    "parquet": Kind(split_row_groups, read_parquet),
    "arrayrecord": Kind(split_records, read_arrayrecord),
    "hf": Kind(split_batches, read_arrow),
}
