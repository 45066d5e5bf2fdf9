"""Sources and tokenizer -> a corpus: flat tokens, cut into documents, split into train and held out."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress

from jaxtrain.config import ConfigError, DataConfig, RunConfig
from jaxtrain.config.data import EXAMPLE_SOURCES, source_syntax
from jaxtrain.data.cache import build_once
from jaxtrain.data.documents import DocumentNames, Documents, Flat, join_documents
from jaxtrain.data.files import fingerprint
from jaxtrain.data.readers import BadRecord, Record
from jaxtrain.data.records import SCORED_ROLES, TokenIds
from jaxtrain.data.sources import (
    Listing,
    Tally,
    is_record_held_out,
    list_source,
    refuse_or_count,
    texts_of,
    training_texts,
)
from jaxtrain.data.stored import Stored
from jaxtrain.data.tokenfiles import TOKENIZER, Shard, Sidecar, TokenFile, open_token_file, read_sidecar
from jaxtrain.data.tokenizer import TextTokenizer, prepare_tokenizer

__all__ = ["Corpus", "Documents", "Flat", "encode_records", "prepare", "tokenizer_of"]

CORPUS_FORMAT = "tokens-2"
ENCODE_BYTES = 4 * 2**20
# A tokenizer's merges hardly change beyond this much text.
SAMPLE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Corpus:
    """Tokenizer, train and held-out documents of a run, and the fingerprint of files and tokenizer together.

    `bytes` of text became `text_tokens` (0 where only token ids were read). `skipped` counts unreadable records;
    `reasons` says why for the first of them. `unscored`: documents to train on without a scored target, by source.
    """

    tokenizer: TextTokenizer
    train: Documents
    held_out: Documents
    fingerprint: str
    bytes: int
    text_tokens: int
    empty: int
    skipped: int = 0
    reasons: tuple[str, ...] = ()
    unscored: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of both splits."""
        return self.train.count + self.held_out.count

    @property
    def tokenizer_fingerprint(self) -> str:
        """Digest of the tokenizer alone."""
        return self.tokenizer.fingerprint

    def describe(self) -> dict[str, int | float | str]:
        """Rows of a summary table: documents, tokens, bytes a token, vocabulary, fingerprint."""
        ratio = {"bytes a token": round(self.bytes / self.text_tokens, 3)} if self.text_tokens else {}
        return {
            "documents": len(self.train) + len(self.held_out),
            "held-out documents": len(self.held_out),
            "empty documents left out": self.empty,
            "unreadable records skipped": self.skipped,
            "documents without a scored token": sum(self.unscored),
            "train tokens": self.train.count,
            "held-out tokens": self.held_out.count,
            **ratio,
            "vocabulary": self.tokenizer.vocab_size,
            "fingerprint": self.fingerprint,
        }


@dataclass(frozen=True)
class _SourceCorpus:
    """One source, tokenized or mapped."""

    documents: Documents
    fingerprint: str
    tally: Tally
    text_tokens: int


def prepare(config: RunConfig, tokenizer: TextTokenizer | None = None, held_out_only: bool = False) -> Corpus:
    """Map token files; tokenize the other sources of a run, or find them tokenized in data.cache.

    `tokenizer`: used in place of the one that the configuration names or trains. `held_out_only`: only held-out
    documents are tokenized where nothing is cached, and the training split may lack any. Raises ConfigError: a source
    is missing, empty or unreadable; the tokenizer is unreadable, too large for the model or another than the one that
    wrote token shards; the cache cannot be written; data.held_out leaves no document to train on. The held-out split
    may be empty.
    """
    data, cache = config.data, cache_of(config.data)
    listings = list_sources(data, cache)
    with progress_bar(config.observe.progress) as progress:
        waiting = progress.add_task("tokenizer", total=None)
        tokenizer = tokenizer_of(config, listings, cache, tokenizer)
        progress.remove_task(waiting)
        parts = [
            _mapped(listing, tokenizer, cache)
            if listing.source.kind == "tokens"
            else _tokenized(data, listing, tokenizer, cache, progress, held_out_only)
            for listing in listings
        ]
    documents = join_documents([part.documents for part in parts])
    assert isinstance(documents.names, DocumentNames)
    held_out = documents.names.held_out(data.held_out)
    if held_out.all() and not held_out_only:
        raise ConfigError(
            f"data.held_out is {data.held_out}: it takes all {len(documents)} documents of data.sources and leaves "
            "none to train on: lower it, or bring more documents"
        )
    train = documents.select(np.flatnonzero(~held_out))
    return Corpus(
        tokenizer=tokenizer,
        train=train,
        held_out=documents.select(np.flatnonzero(held_out)),
        fingerprint=parts[0].fingerprint if len(parts) == 1 else fingerprint(part.fingerprint for part in parts),
        bytes=sum(part.tally.bytes for part in parts),
        text_tokens=sum(part.text_tokens for part in parts),
        empty=sum(part.tally.empty for part in parts),
        skipped=sum(part.tally.skipped for part in parts),
        reasons=tuple(chain.from_iterable(part.tally.reasons for part in parts)),
        unscored=() if held_out_only else _count_unscored(train, listings),
    )


def _count_unscored(documents: Documents, listings: Sequence[Listing]) -> tuple[int, ...]:
    """Documents of each source without a scored target; raises ConfigError for a source that has no other ones."""
    if documents.scored is None:
        # Documents of a single token are counted where the pieces are cut.
        return (0,) * len(listings)
    source = np.zeros(len(documents), np.int32) if documents.source is None else documents.source
    unscored = np.bincount(source[documents.scored_targets() == 0], minlength=len(listings)).tolist()
    for listing, count, lost in zip(listings, np.bincount(source, minlength=len(listings)), unscored, strict=True):
        if 0 < count == lost:
            template = listing.source.template
            roles = f"the roles {', '.join(SCORED_ROLES)} are, its template has {', '.join(template)}"
            raise ConfigError(
                f"{listing.where} ({listing.source.kind}: {listing.source.path}): none of its {count} documents has a "
                f"scored token, so that it would train nothing ({roles if template else 'all are masked'}): remove it, "
                "or bring documents with an answer"
            )
    return tuple(unscored)


def cache_of(data: DataConfig) -> Path:
    """The folder data.cache."""
    return Path(data.cache).expanduser()


def list_sources(data: DataConfig, cache: Path) -> list[Listing]:
    """The files of every source; raises ConfigError as `list_source` does, and where data.sources is not set."""
    if not data.sources:
        raise ConfigError(f"data.sources is not set, there is nothing to read. {source_syntax(EXAMPLE_SOURCES)}")
    return [
        list_source(source, f"data.sources[{index}]", cache, data.on_bad_record)
        for index, source in enumerate(data.sources)
    ]


def tokenizer_of(
    config: RunConfig, listings: Sequence[Listing], cache: Path, given: TextTokenizer | None = None
) -> TextTokenizer:
    """data.tokenizer.path, the tokenizer beside token shards, or one trained on the sources' texts; or the `given` one.

    Raises ConfigError when token shards were written with another one.
    """
    data = config.data
    sidecars = {folder: sidecar for listing in listings for folder, sidecar in sidecars_of(listing)}
    beside = next(iter(sidecars), None)
    readable = [listing for listing in listings if listing.source.kind != "tokens" and not sidecars_of(listing)]
    if given is None and data.tokenizer.path is None and beside is None and not readable:
        raise ConfigError(
            f"data.sources are token ids ({data.sources[0].path}) and no tokens.json beside them names their "
            "tokenizer: set data.tokenizer.path"
        )
    if given is None:
        key, texts = training_texts(readable, data.held_out, data.on_bad_record, cache, SAMPLE_BYTES)
        tokenizer = prepare_tokenizer(config, beside / TOKENIZER if beside else None, key, texts, cache)
    else:
        tokenizer = given
    for folder, sidecar in sidecars.items():
        if sidecar.tokenizer != tokenizer.fingerprint:
            written = f"the token shards in {folder} were written with tokenizer {sidecar.tokenizer[:12]}"
            if given is not None:
                raise ConfigError(
                    f"{written}, the run's own tokenizer is {given.fingerprint[:12]}: restore the shards that it was "
                    "trained on, or tokenize their sources with the run's tokenizer.json"
                )
            raise ConfigError(
                f"{written}, data.tokenizer.path {data.tokenizer.path} is {tokenizer.fingerprint[:12]}: "
                f"set data.tokenizer.path: {folder / TOKENIZER}, or tokenize again"
            )
    return tokenizer


def sidecars_of(listing: Listing) -> list[tuple[Path, Sidecar]]:
    """Folders of token shards that a source reads, each with its sidecar."""
    if listing.source.kind not in ("tokens", "arrayrecord"):
        return []
    folders = dict.fromkeys(Path(file.url).parent for file in listing.files if not file.remote)
    return [(folder, sidecar) for folder in folders if (sidecar := read_sidecar(str(folder)))]


def _mapped(listing: Listing, tokenizer: TextTokenizer, cache: Path) -> _SourceCorpus:
    """Token files, read in place."""
    source = listing.source
    ids = (tokenizer.bos, tokenizer.eos, tokenizer.vocab_size)
    opened = [open_token_file(file, source, *ids, cache) for file in listing.files]
    names = DocumentNames(
        [file.name for file in listing.files],
        np.repeat(np.arange(len(opened), dtype=np.int32), [len(file.starts) for file in opened]),
        np.concatenate([np.arange(len(file.starts)) for file in opened]),
    )
    whole = _joined_token_files(opened, names)
    if source.max_documents is not None:
        whole = whole.select(np.arange(min(source.max_documents, len(whole))))
    key = fingerprint((file.fingerprint for file in opened), tokenizer.fingerprint, str(source.max_documents))
    shards = _shards_of(listing) if source.max_documents is None else []
    tally = Tally(len(whole), sum(shard.bytes for shard in shards))
    return _SourceCorpus(whole, key, tally, sum(shard.tokens for shard in shards if shard.bytes))


def _shards_of(listing: Listing) -> list[Shard]:
    """The sidecars' entries for the files of a source."""
    sidecars = dict(sidecars_of(listing))
    found = [(sidecars.get(Path(file.url).parent), Path(file.url).stem) for file in listing.files]
    return [shard for sidecar, name in found if sidecar and (shard := sidecar.shard(name))]


def _joined_token_files(opened: Sequence[TokenFile], names: DocumentNames) -> Documents:
    whole = join_documents(
        [Documents(file.tokens, file.starts, file.stops, names, file.scored) for file in opened], names
    )
    return Documents(whole.tokens, whole.starts, whole.stops, names, whole.scored)


def _tokenized(
    data: DataConfig,
    listing: Listing,
    tokenizer: TextTokenizer,
    cache: Path,
    progress: Progress,
    held_out_only: bool = False,
) -> _SourceCorpus:
    """A source of any other kind, tokenized once and cached; perhaps only its held-out documents."""
    key = listing.digest(tokenizer.fingerprint, CORPUS_FORMAT, data.on_bad_record)
    folder = cache / "corpora" / key
    share = data.held_out if held_out_only and not folder.exists() else None
    if share is not None:
        folder = folder.with_name(f"{key}-held-out-{share}")
    build_once(folder, lambda path: _tokenize(path, data, listing, tokenizer, cache, progress, share))
    return _open(folder, listing, tokenizer, key)


def _tokenize(
    folder: Path,
    data: DataConfig,
    listing: Listing,
    tokenizer: TextTokenizer,
    cache: Path,
    progress: Progress,
    share: float | None = None,
) -> None:
    """Write the documents of a source, or only the held-out `share` of them.

    tokens.bin (flat, little-endian), offsets.npy (int64, one more than there are documents), places.npy (int64
    [documents, 2]: file and number in it), tally.json and, where something is masked, scored.bin (a byte a token).
    """
    folder.mkdir()
    dtype = _cached_dtype(tokenizer)
    tally = Tally()
    offsets, locations = array("q", [0]), array("q")
    numbers = {file.name: number for number, file in enumerate(listing.files)}
    masked = False
    task = progress.add_task(f"tokenizing {listing.where}", total=listing.bytes or None)
    records = listing.records(listing.spans(), data.on_bad_record, tally, cache)
    if share is not None:
        records = (record for record in records if is_record_held_out(record.file.name, record.index, share))
    with (folder / "tokens.bin").open("wb") as file, (folder / "scored.bin").open("wb") as mask:
        for record, ids, scored in encode_records(records, tokenizer, listing.where, data.on_bad_record, tally):
            ids.astype(dtype).tofile(file)
            (np.ones(len(ids), bool) if scored is None else scored).tofile(mask)
            masked |= scored is not None
            offsets.append(offsets[-1] + len(ids))
            locations.extend((numbers[record.file.name], -1 if record.index is None else record.index))
            progress.update(task, completed=tally.bytes)
    if not tally.documents and share is None:
        raise ConfigError(
            f"{listing.where}.{listing.source.kind} is {listing.source.path!r}: its {len(listing.files)} files hold no "
            f"document ({tally.plus(listing.tally).outcome()}): bring text"
        )
    if not masked:
        (folder / "scored.bin").unlink()
    np.save(folder / "offsets.npy", np.frombuffer(offsets, np.int64))
    np.save(folder / "places.npy", np.frombuffer(locations, np.int64).reshape(-1, 2))
    (folder / "tally.json").write_text(json.dumps(asdict(tally)))


def encode_records(
    records: Iterable[Record], tokenizer: TextTokenizer, where: str, on_bad: str, tally: Tally
) -> Iterator[tuple[Record, np.ndarray, np.ndarray | None]]:
    """Each record with its token ids and the flags of scored tokens (None: all); encodes a few MB of text at once.

    Counts documents and bytes in `tally`; an id beyond the vocabulary is a bad record.
    """
    for chunk in _chunks(records):
        encoded = tokenizer.encode_contents([record.content for record in chunk])
        for record, (ids, scored) in zip(chunk, encoded, strict=True):
            if isinstance(record.content, TokenIds) and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
                at = int(np.flatnonzero((ids < 0) | (ids >= tokenizer.vocab_size))[0])
                message = (
                    f"{record.file.url}, document {record.index}: token id {ids[at]} at token {at} is beyond the "
                    f"tokenizer's vocabulary of {tokenizer.vocab_size} (data.tokenizer.path)"
                )
                refuse_or_count(BadRecord(record.file, message), where, on_bad, tally)
                continue
            tally.documents += 1
            tally.bytes += sum(len(text.encode()) for text in texts_of(record.content))
            yield record, ids, scored


def _open(folder: Path, listing: Listing, tokenizer: TextTokenizer, key: str) -> _SourceCorpus:
    dtype = _cached_dtype(tokenizer)
    try:
        offsets, locations = np.load(folder / "offsets.npy"), np.load(folder / "places.npy")
        tally = Tally(**json.loads((folder / "tally.json").read_text())).plus(listing.tally)
        tokens = Stored(folder / "tokens.bin", dtype)
        mask = folder / "scored.bin"
        scored = Stored(mask, np.bool_) if mask.exists() else None
    except (OSError, ValueError, EOFError, TypeError) as error:
        raise ConfigError(f"data.cache: {folder} is damaged ({error}): remove it, then it is built again") from None
    if (
        len({offsets[-1], len(tokens), len(tokens if scored is None else scored)}) > 1
        or len(offsets) != len(locations) + 1
    ):
        raise ConfigError(
            f"data.cache: {folder} is damaged ({len(tokens)} tokens where {offsets[-1]} were written): "
            "remove it, then it is built again"
        )
    names = DocumentNames([file.name for file in listing.files], locations[:, 0].astype(np.int32), locations[:, 1])
    documents = Documents(tokens, offsets[:-1], offsets[1:], names, scored)
    return _SourceCorpus(documents, key, tally, len(tokens) if tally.bytes else 0)


def _cached_dtype(tokenizer: TextTokenizer) -> np.dtype:
    return np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")


def _chunks(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Runs of records of a few MB: enough to keep the encoder's threads busy, few enough for memory."""
    chunk: list[Record] = []
    size = 0
    for record in records:
        chunk.append(record)
        size += sum(map(len, texts_of(record.content))) or len(record.content)
        if size >= ENCODE_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def progress_bar(wanted: bool) -> Progress:
    """A progress bar on stderr that disappears at the end; none where stderr is no terminal."""
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not (wanted and console.is_terminal))
