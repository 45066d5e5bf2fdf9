"""Tokenized documents as flat arrays: joined without a copy, named without storing a string for each document."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from jaxtrain.data.sources import is_held_out, record_name, records_held_out

FLAGS_READ = 2**24


class Flat(Protocol):
    """Anything that is sliced like a one-dimensional array: an array, a file, or several of them joined."""

    def __len__(self) -> int: ...

    def __getitem__(self, span: slice, /) -> np.ndarray:
        """The elements start..stop."""
        ...


class Joined:
    """Arrays concatenated without a copy; a slice must stay within one of them, as every document does."""

    def __init__(self, parts: Sequence[Flat]) -> None:
        self.parts: list[Flat] = [
            array for part in parts for array in (part.parts if isinstance(part, Joined) else [part])
        ]
        self.borders = [0, *np.cumsum([len(part) for part in self.parts]).tolist()]

    def __len__(self) -> int:
        return int(self.borders[-1])

    def __getitem__(self, span: slice, /) -> np.ndarray:
        number = bisect_right(self.borders, span.start, hi=len(self.parts)) - 1
        lo = self.borders[number]
        assert span.stop <= self.borders[number + 1], (span, self.borders[number + 1])
        return self.parts[number][span.start - lo : span.stop - lo]


class DocumentNames(Sequence[str]):
    """Names of documents by file and number in it (-1: the file is the document), built on access."""

    def __init__(self, files: Sequence[str], file: np.ndarray, number: np.ndarray) -> None:
        self.files, self.file, self.number = files, file, number

    def __len__(self) -> int:
        return len(self.file)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return DocumentNames(self.files, self.file[index], self.number[index])
        number = int(self.number[index])
        return record_name(self.files[self.file[index]], None if number < 0 else number)

    def take(self, indices: np.ndarray) -> DocumentNames:
        """The names at these indices."""
        return DocumentNames(self.files, self.file[indices], self.number[indices])

    def held_out(self, share: float) -> np.ndarray:
        """Which documents belong to the held-out share (bool)."""
        out = np.zeros(len(self), bool)
        borders = np.flatnonzero(np.diff(self.file, prepend=-1, append=-1))
        for lo, hi in pairwise(borders):
            name, numbers = self.files[self.file[lo]], self.number[lo:hi]
            out[lo:hi] = is_held_out(name, share) if numbers[0] < 0 else records_held_out(name, numbers, share)
        return out


@dataclass(frozen=True)
class Documents:
    """A random-access view of tokenized documents: document i is tokens[starts[i]:stops[i]], opened and closed.

    `tokens` is flat and sliced only within one document: a corpus of several files is joined without a copy.
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

    def scored_targets(self) -> np.ndarray:
        """Scored targets of each document (int64); reads the flags once, a block at a time."""
        counts = self.lengths - 1
        if self.scored is None or not len(self):
            return counts
        borders = self.scored.borders if isinstance(self.scored, Joined) else [0]
        blocks = np.stack([np.searchsorted(borders, self.starts, side="right"), self.starts // FLAGS_READ])
        for lo, hi in pairwise([*np.flatnonzero(np.diff(blocks, axis=1, prepend=-1).any(axis=0)).tolist(), len(self)]):
            base = int(self.starts[lo])
            before = np.cumsum(np.concatenate([[0], self.scored[base : int(self.stops[hi - 1])]]), dtype=np.int64)
            # The first token of a document is no target.
            counts[lo:hi] = before[self.stops[lo:hi] - base] - before[self.starts[lo:hi] + 1 - base]
        return counts

    def select(self, indices: np.ndarray) -> Documents:
        """The documents at these indices."""
        names = self.names
        return Documents(
            self.tokens,
            self.starts[indices],
            self.stops[indices],
            names.take(indices) if isinstance(names, DocumentNames) else tuple(names[i] for i in indices.tolist()),
            self.scored,
            None if self.source is None else self.source[indices],
        )


def join_documents(parts: Sequence[Documents], names: Sequence[str] | None = None) -> Documents:
    """The documents of several sources, in order, numbered by source; only their borders are copied.

    `names` replaces the names of all parts.
    """
    if len(parts) == 1:
        return parts[0]
    sizes = [len(part.tokens) for part in parts]
    bases = np.cumsum([0, *sizes[:-1]])
    masks: list[Flat] = [
        part.scored if part.scored is not None else np.broadcast_to(np.True_, size)
        for part, size in zip(parts, sizes, strict=True)
    ]
    return Documents(
        Joined([part.tokens for part in parts]),
        np.concatenate([part.starts + base for part, base in zip(parts, bases, strict=True)]),
        np.concatenate([part.stops + base for part, base in zip(parts, bases, strict=True)]),
        join_names([part.names for part in parts if isinstance(part.names, DocumentNames)]) if names is None else names,
        Joined(masks) if any(part.scored is not None for part in parts) else None,
        np.repeat(np.arange(len(parts), dtype=np.int32), [len(part) for part in parts]),
    )


def join_names(parts: Sequence[DocumentNames]) -> DocumentNames:
    """The names of several sources, in order."""
    bases = np.cumsum([0, *(len(part.files) for part in parts[:-1])])
    return DocumentNames(
        [file for part in parts for file in part.files],
        np.concatenate([part.file + base for part, base in zip(parts, bases, strict=True)]),
        np.concatenate([part.number for part in parts]),
    )
