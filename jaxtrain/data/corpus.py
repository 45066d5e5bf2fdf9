"""Sources and tokenizer -> a corpus: one flat file of tokens, cut into documents, split into train and held out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from rich.console import Console
from rich.progress import Progress

from jaxtrain.config import ConfigError, RunConfig
from jaxtrain.data.cache import build_once
from jaxtrain.data.sources import Document, Listing, is_held_out, list_documents
from jaxtrain.data.tokenizer import TextTokenizer, prepare_tokenizer

FORMAT = "tokens-1"
ENCODE_BYTES = 4 * 2**20


class Flat(Protocol):
    """What is sliced like a one-dimensional array: an array, a memory map, or several of them joined."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: slice, /) -> np.ndarray:
        """The elements start..stop."""
        ...


@dataclass(frozen=True)
class Documents:
    """A random-access view of tokenized documents: document i is tokens[starts[i]:stops[i]], opened and closed.

    `tokens` is flat and sliced only within one document (a corpus of several files is joined without a copy).
    `scored`, flat beside it, is true for each token that counts in the loss when it is the target; None is all.
    `source` is the number of each document's source in data.sources (int32); None is one source.
    """

    tokens: Flat
    starts: np.ndarray
    stops: np.ndarray
    names: Sequence[str]
    scored: Flat | None = None
    source: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> np.ndarray:
        """Token ids (int32) of one document."""
        return self.tokens[self.starts[index] : self.stops[index]].astype(np.int32)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document (int64)."""
        return self.stops - self.starts

    @property
    def count(self) -> int:
        """Tokens of all documents."""
        return int(self.lengths.sum())

    def select(self, indices: np.ndarray) -> Documents:
        """The documents at these indices."""
        return Documents(
            self.tokens,
            self.starts[indices],
            self.stops[indices],
            tuple(self.names[i] for i in indices.tolist()),
            self.scored,
            None if self.source is None else self.source[indices],
        )


@dataclass(frozen=True)
class Corpus:
    """What a run reads: tokenizer, the two splits, and the fingerprint of files and tokenizer together."""

    tokenizer: TextTokenizer
    train: Documents
    held_out: Documents
    fingerprint: str
    bytes: int
    empty: int

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
        return {
            "documents": len(self.train) + len(self.held_out),
            "held-out documents": len(self.held_out),
            "empty files left out": self.empty,
            "train tokens": self.train.count,
            "held-out tokens": self.held_out.count,
            "bytes a token": round(self.bytes / self.tokens, 3),
            "vocabulary": self.tokenizer.vocab_size,
            "fingerprint": self.fingerprint,
        }


def prepare(config: RunConfig) -> Corpus:
    """Tokenize the sources of a run, or find them tokenized in data.cache.

    Raises ConfigError: a source is missing, empty or binary; the tokenizer is unreadable or too large for the model;
    the cache cannot be written; data.held_out leaves no document to train on. An empty held-out split is the caller's
    to judge.
    """
    cache = Path(config.data.cache).expanduser()
    listing = list_documents(config.data.sources)
    _check_split(listing, config.data.held_out)
    with _progress(config.observe.progress) as progress:
        waiting = progress.add_task("tokenizer", total=None)
        tokenizer = prepare_tokenizer(config, listing.documents, cache)
        progress.remove_task(waiting)
        key = listing.digest(tokenizer.fingerprint, FORMAT)
        folder = build_once(
            cache / "corpora" / key, lambda path: _tokenize(path, listing.documents, tokenizer, progress)
        )
    documents = _open(folder, listing, tokenizer)
    held_out = np.array([is_held_out(d.name, config.data.held_out) for d in listing.documents])
    return Corpus(
        tokenizer=tokenizer,
        train=documents.select(np.flatnonzero(~held_out)),
        held_out=documents.select(np.flatnonzero(held_out)),
        fingerprint=key,
        bytes=listing.bytes,
        empty=listing.empty,
    )


def _check_split(listing: Listing, share: float) -> None:
    if all(is_held_out(d.name, share) for d in listing.documents):
        raise ConfigError(
            f"data.held_out is {share}: it takes all {len(listing.documents)} documents of data.sources and leaves "
            "none to train on: lower it, or bring more files"
        )


def _tokenize(folder: Path, documents: Sequence[Document], tokenizer: TextTokenizer, progress: Progress) -> None:
    """Write tokens.bin (flat, little-endian) and offsets.npy (int64, one more than there are documents)."""
    folder.mkdir()
    dtype = _token_dtype(tokenizer)
    offsets = [0]
    task = progress.add_task("tokenizing", total=sum(d.size for d in documents))
    with (folder / "tokens.bin").open("wb") as file:
        for chunk in _chunks(documents):
            for ids in tokenizer.encode_documents([d.read() for d in chunk]):
                np.asarray(ids, dtype).tofile(file)
                offsets.append(offsets[-1] + len(ids))
            progress.advance(task, sum(d.size for d in chunk))
    np.save(folder / "offsets.npy", np.asarray(offsets, "<i8"))


def _open(folder: Path, listing: Listing, tokenizer: TextTokenizer) -> Documents:
    dtype = _token_dtype(tokenizer)
    try:
        offsets = np.load(folder / "offsets.npy")
        # np.asarray: the memmap subclass costs microseconds a slice, its base maps the same pages.
        tokens = np.asarray(np.memmap(folder / "tokens.bin", dtype, mode="r"))
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"data.cache: {folder} is damaged ({error}): remove it, it is built again") from None
    if len(offsets) != len(listing.documents) + 1 or offsets[-1] != len(tokens):
        raise ConfigError(
            f"data.cache: {folder} is damaged ({len(tokens)} tokens where {offsets[-1]} were written): "
            "remove it, it is built again"
        )
    return Documents(tokens, offsets[:-1], offsets[1:], tuple(d.name for d in listing.documents))


def _token_dtype(tokenizer: TextTokenizer) -> np.dtype:
    return np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")


def _chunks(documents: Sequence[Document]) -> Iterator[list[Document]]:
    """Runs of documents of a few MB: enough to keep the encoder's threads busy, little enough for memory."""
    chunk: list[Document] = []
    size = 0
    for document in documents:
        chunk.append(document)
        size += document.size
        if size >= ENCODE_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _progress(wanted: bool) -> Progress:
    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not (wanted and console.is_terminal))
