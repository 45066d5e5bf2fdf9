"""Sources -> a folder of token shards, written in parallel; an interrupted job resumes with the missing shards.

The input is cut into units of about equal size. Each unit becomes one shard, complete or absent, with a record of its
counts. At the end the records are joined into tokens.json, beside tokenizer.json.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from jaxtrain.config import ConfigError, RunConfig
from jaxtrain.data.corpus import cache_of, encode_records, list_sources, progress_bar, sidecars_of, tokenizer_of
from jaxtrain.data.ends import TOKENIZER_CONFIG, ends_file
from jaxtrain.data.files import fingerprint, unreadable
from jaxtrain.data.readers import FileSpan, Record
from jaxtrain.data.records import TokenIds
from jaxtrain.data.sources import Listing, Tally
from jaxtrain.data.tokenfiles import (
    PARTIAL,
    SIDECAR,
    TOKENIZER,
    Shard,
    Sidecar,
    TokenWriter,
    open_token_file,
    read_sidecar,
    token_dtype,
)
from jaxtrain.data.tokenizer import TextTokenizer

Format = Literal["bin", "arrayrecord"]
SHARDS_FORMAT = "shards-1"
UNIT_BYTES = 64 * 2**20


@dataclass(frozen=True)
class _Unit:
    """The input of one shard: its name and spans of one source."""

    name: str
    listing: Listing
    spans: tuple[FileSpan, ...]

    @property
    def bytes(self) -> int:
        return sum(span.bytes for span in self.spans)


@dataclass(frozen=True)
class _Job:
    """Settings that all units share."""

    out: Path
    tokenizer: TextTokenizer
    format: Format
    scored: bool
    on_bad: str
    cache: Path

    @property
    def dtype(self) -> str:
        return token_dtype(self.tokenizer.vocab_size)


def tokenize(
    config: RunConfig, out: Path, format: Format = "bin", workers: int = 1, unit_bytes: int = UNIT_BYTES
) -> dict[str, Any]:
    """Write the sources of a run as token shards into `out` and return the counts; finished shards are not rewritten.

    Raises ConfigError as `prepare` does, and when `out` holds something else.
    """
    started = time.perf_counter()
    data, cache = config.data, cache_of(config.data)
    with progress_bar(config.observe.progress) as progress:
        waiting = progress.add_task("tokenizer", total=None)
        listings = list_sources(data, cache)
        tokenizer = tokenizer_of(config, listings, cache)
        progress.remove_task(waiting)
        scored = any(_is_masked(listing) for listing in listings)
        job = _Job(out, tokenizer, format, scored, data.on_bad_record, cache)
        key = fingerprint(
            (listing.digest() for listing in listings), tokenizer.fingerprint, format, str(unit_bytes), SHARDS_FORMAT
        )
        units = [unit for number, listing in enumerate(listings) for unit in _units(number, listing, unit_bytes)]
        written = _begin(job, key)
        if not written:
            task = progress.add_task("tokenizing", total=sum(unit.bytes for unit in units))
            missing = [unit for unit in units if not _record(out, unit).exists()]
            progress.advance(task, sum(unit.bytes for unit in units) - sum(unit.bytes for unit in missing))
            for done in _run(job, missing, workers):
                progress.advance(task, done)
            _finish(job, key, units)
    sidecar = read_sidecar(str(out))
    assert sidecar is not None
    counts = {name: sidecar.total(name) for name in ("documents", "tokens", "bytes", "empty", "skipped")}
    return {
        **counts,
        "bytes_per_token": round(counts["bytes"] / counts["tokens"], 4),
        "shards": len(sidecar.shards),
        "vocabulary": tokenizer.vocab_size,
        "tokenizer": tokenizer.fingerprint,
        "ends": tokenizer.describe(),
        "out": str(out),
        "wall_s": round(time.perf_counter() - started, 3),
        "reasons": [reason for shard in sidecar.shards for reason in shard.reasons],
    }


def _is_masked(listing: Listing) -> bool:
    source = listing.source
    # Whether a registered source gives flags is not known before it is read.
    if source.registered is not None:
        return True
    return bool(source.prompt_field or source.messages_field) or any(s.scored for _, s in sidecars_of(listing))


def _units(number: int, listing: Listing, size: int) -> Iterator[_Unit]:
    """Consecutive spans joined up to `size` bytes; one unit where max_documents counts documents in order."""
    whole = listing.source.max_documents is not None or listing.source.kind == "tokens"
    spans: list[FileSpan] = []
    count = 0
    for span in listing.spans(None if whole else size):
        if spans and sum(s.bytes for s in spans) + span.bytes > size and listing.source.max_documents is None:
            yield _Unit(f"{number:02d}-{count:05d}", listing, tuple(spans))
            spans, count = [], count + 1
        spans.append(span)
    yield _Unit(f"{number:02d}-{count:05d}", listing, tuple(spans))


def _record(out: Path, unit: _Unit) -> Path:
    return out / f"{unit.name}.json"


def _begin(job: _Job, key: str) -> bool:
    """Create or check the folder; True when all shards exist already."""
    out = job.out
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in (SIDECAR, PARTIAL):
            if (out / name).exists():
                if json.loads((out / name).read_text()).get("key") != key:
                    raise ConfigError(
                        f"--out {out} holds shards of other sources, settings or another tokenizer: "
                        "choose another folder, or remove it"
                    )
                return name == SIDECAR
        if any(out.iterdir()):
            raise ConfigError(f"--out {out} holds other files: choose a new folder")
        (out / TOKENIZER).write_text(job.tokenizer.json, encoding="utf-8")
        ends = ends_file(job.tokenizer.inner, job.tokenizer.bos, job.tokenizer.eos)
        (out / TOKENIZER_CONFIG).write_text(ends, encoding="utf-8")
        _write_whole(out / PARTIAL, json.dumps({"key": key}))
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written ({unreadable(error)}): choose a writable folder") from None
    return False


def _finish(job: _Job, key: str, units: Sequence[_Unit]) -> None:
    records = [_record(job.out, unit) for unit in units]
    shards = tuple(Shard(**json.loads(record.read_text())) for record in records)
    if not any(shard.documents for shard in shards):
        raise ConfigError("data.sources hold no document: bring text")
    sidecar = Sidecar(job.format, job.dtype, job.scored, job.tokenizer.fingerprint, shards)
    _write_whole(job.out / SIDECAR, sidecar.dump(key))
    (job.out / PARTIAL).unlink()
    for record in records:
        record.unlink()
    for scratch in job.out.glob("*.partial"):
        scratch.unlink()


def _write_whole(path: Path, text: str) -> None:
    scratch = path.with_name(f"{path.name}.partial")
    scratch.write_text(text)
    scratch.rename(path)


def _run(job: _Job, units: Sequence[_Unit], workers: int) -> Iterator[int]:
    """Write the units' shards, in this process or several; yields bytes of input as units are done."""
    workers = min(workers, len(units))
    # Sources that were registered in this process do not exist in others.
    here = [unit for unit in units if workers <= 1 or unit.listing.source.registered is not None]
    elsewhere = [unit for unit in units if workers > 1 and unit.listing.source.registered is None]
    for unit in here:
        yield _shard(job, unit)
    if not elsewhere:
        return
    # A forked child of a process that has used the tokenizer's threads would wait for them forever.
    context = multiprocessing.get_context("spawn")
    with (
        _threads(max(1, (os.cpu_count() or 1) // workers)),
        ProcessPoolExecutor(workers, context, initializer=_follow_parent) as pool,
    ):
        waiting: set[Future[int]] = {pool.submit(_shard, job, unit) for unit in elsewhere}
        try:
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        except BrokenProcessPool:
            raise ConfigError(
                f"one of {workers} processes was killed, perhaps out of memory: run the same command again with fewer "
                "--workers; it resumes with the missing shards"
            ) from None
        finally:
            for future in waiting:
                future.cancel()


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Set the number of tokenizer threads of each process that is started."""
    before = os.environ.get("RAYON_NUM_THREADS")
    os.environ["RAYON_NUM_THREADS"] = before or str(count)
    try:
        yield
    finally:
        if before is None:
            del os.environ["RAYON_NUM_THREADS"]


def _follow_parent() -> None:
    """End this process when the process that started it ends, however it ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        wait_for([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _shard(job: _Job, unit: _Unit) -> int:
    """Write one unit's shard and its counts; returns the unit's bytes."""
    try:
        return _write_shard(job, unit)
    except OSError as error:
        raise ConfigError(
            f"--out {job.out} cannot be written ({unreadable(error)}): free some space and run "
            "the same command again; it resumes"
        ) from None


def _write_shard(job: _Job, unit: _Unit) -> int:
    tally, tokens, largest = Tally(), 0, 0
    records = _token_records(job, unit, tally) if unit.listing.source.kind == "tokens" else unit.listing.records(
        unit.spans, job.on_bad, tally, job.cache
    )  # fmt: skip
    with _writer(job, unit) as writer:
        for _, ids, scored in encode_records(records, job.tokenizer, unit.listing.where, job.on_bad, tally):
            writer.write(ids, scored)
            tokens, largest = tokens + len(ids), max(largest, int(ids.max()))
    if not tally.documents:
        for path in job.out.glob(f"{unit.name}.*"):
            path.unlink()
    # Files that the listing left out are counted once, with the source's first unit.
    if unit.name.endswith("-00000"):
        tally = tally.plus(unit.listing.tally)
    counts = Shard(
        unit.name, tally.documents, tokens, tally.bytes, largest, tally.skipped, tally.empty, tuple(tally.reasons)
    )
    _write_whole(_record(job.out, unit), json.dumps(asdict(counts)))
    return unit.bytes


def _token_records(job: _Job, unit: _Unit, tally: Tally) -> Iterator[Record]:
    left = unit.listing.source.max_documents
    for span in unit.spans:
        ids = (job.tokenizer.bos, job.tokenizer.eos, job.tokenizer.vocab_size)
        file = open_token_file(span.file, unit.listing.source, *ids, job.cache)
        for number, (lo, hi) in enumerate(zip(file.starts[:left].tolist(), file.stops[:left].tolist(), strict=True)):
            if lo == hi:
                tally.empty += 1
                continue
            yield Record(
                span.file, number, TokenIds(file.tokens[lo:hi], None if file.scored is None else file.scored[lo:hi])
            )
        left = None if left is None else left - len(file.starts[:left])


def _writer(job: _Job, unit: _Unit) -> TokenWriter | RecordWriter:
    writer = TokenWriter if job.format == "bin" else RecordWriter
    return writer(job.out / unit.name, job.dtype, job.scored)


class RecordWriter:
    """Writes one shard NAME.array_record, a document a record: ids, then with a mask one byte a token."""

    def __init__(self, path: Path, dtype: str, scored: bool) -> None:
        self._path, self._dtype, self._scored = path.with_suffix(".array_record"), np.dtype(dtype), scored
        self._scratch = self._path.with_suffix(".array_record.partial")

    def __enter__(self) -> RecordWriter:
        self._writer = ArrayRecordWriter(str(self._scratch), "group_size:1")
        return self

    def write(self, ids: np.ndarray, scored: np.ndarray | None) -> None:
        """Append one document; `scored` None is all."""
        flags = np.ones(len(ids), bool) if scored is None else scored
        self._writer.write(ids.astype(self._dtype).tobytes() + (flags.tobytes() if self._scored else b""))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()
        if kind is None:
            self._scratch.rename(self._path)
