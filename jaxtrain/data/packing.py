"""Pieces -> packed rows: one table of packers, rows planned from sizes alone and filled when they are given out.

A span that does not open its document starts at position 0 like any other and sees nothing of what came before it.
A place in the stream is three numbers, and going there costs one plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxtrain.data.corpus import Documents
from jaxtrain.data.mixing import Draws, Mixture

IGNORE = -1
"""Label of a position that is not scored."""

HostBatch = dict[str, np.ndarray]
"""int32 [rows, L] for each of FIELDS: inputs (0 where padded), the next token of the same document (IGNORE where
padded or not scored), 1, 2, ... for the spans of a row (0 where padded), 0, 1, ... within the span (0 where padded)."""
Span = tuple[int, int, int]
"""A run of inputs: its source, its first place in the flat tokens, its size."""
Place = dict[str, Any]
FIELDS = ("tokens", "labels", "segments", "positions")
PLAN_BINS = 4  # bounds a plan of many full rows; they leave room for others to fill up, so more is less padding
BLOCK = 256

Layer = Callable[[Iterable[int], int, int], list[list[int]]]


def first_fit(sizes: Iterable[int], length: int, bins: int) -> list[list[int]]:
    """Lay sizes, in order, each into the first open row with room; a full row makes place for a new one.

    Stops where a size fits into none of `bins` open rows, or PLAN_BINS * bins rows are laid. Returns the rows, each as
    the ordinals of its sizes: together 0, 1, ... up to where it stopped, as for every packer.
    """
    return _fit(sizes, length, bins, lambda room, size: int(np.argmax(room >= size)))


def best_fit(sizes: Iterable[int], length: int, bins: int) -> list[list[int]]:
    """Like `first_fit`, each size into the open row in which it leaves the least room."""
    return _fit(sizes, length, bins, lambda room, size: int(np.argmin(np.where(room >= size, room, length + 1))))


def next_fit(sizes: Iterable[int], length: int, bins: int) -> list[list[int]]:
    """Lay sizes, in order, into the last row; where they are cut at row ends every row but the last is full."""
    rows: list[list[int]] = []
    room = 0
    for ordinal, size in enumerate(sizes):
        if room < size:
            if len(rows) == PLAN_BINS * bins:
                break
            rows.append([])
            room = length
        rows[-1].append(ordinal)
        room -= size
    return rows


def one_each(sizes: Iterable[int], length: int, bins: int) -> list[list[int]]:
    """A row for each size."""
    return [[ordinal] for ordinal, _ in zip(range(PLAN_BINS * bins), sizes, strict=False)]


def _fit(sizes: Iterable[int], length: int, bins: int, choose: Callable[[np.ndarray, int], int]) -> list[list[int]]:
    rows: list[list[int]] = []
    room = np.zeros(PLAN_BINS * bins, np.int64)
    still_open = 0
    for ordinal, size in enumerate(sizes):
        row = choose(room, size)
        if room[row] < size:
            if still_open == bins or len(rows) == len(room):
                break
            row = len(rows)
            room[row] = length
            rows.append([])
            still_open += 1
        room[row] -= size
        still_open -= room[row] == 0
        rows[row].append(ordinal)
    return rows


@dataclass(frozen=True)
class Packer:
    """How rows are laid, and whether pieces are cut where a row ends (else only where they are longer than one)."""

    lay: Layer
    cuts_at_row_ends: bool = False


PACKERS = {
    "first_fit": Packer(first_fit),
    "best_fit": Packer(best_fit),
    "concat": Packer(next_fit, cuts_at_row_ends=True),
    "none": Packer(one_each),
}


class Rows(Iterator[list[Span]]):
    """Rows of one virtual shard at one length, each a list of spans; they end where the mixture does.

    A plan lays some rows at a time; they are given out in shuffled order, or without `shuffle` as laid. Before the
    mixture's draws, from number `base` on, come the `carried` spans of a phase of another length. The place is
    (cursor, skip, row): items in finished plans, inputs of the next item that they hold, rows given of this plan.
    """

    def __init__(
        self,
        mixture: Mixture,
        *,
        length: int,
        packing: str = "first_fit",
        bins: int = 32,
        shuffle: bool = True,
        shard: int = 0,
        shards: int = 1,
        carried: Sequence[Span] = (),
        base: int = 0,
    ) -> None:
        self._pieces, self._draws = mixture.pieces, Draws(mixture, shard, shards)
        self._length, self._packer, self._bins = length, PACKERS[packing], bins
        self._shard, self._shuffle = shard, shuffle
        self._carried, self._base = list(carried), base if carried else 0
        self.cursor, self.skip, self.row = 0 if carried else base, 0, 0
        self._plan: list[list[Span]] | None = None
        self._after = (0, 0)

    @property
    def carries(self) -> bool:
        """Whether the place counts from carried spans, so that it means nothing without the phase before."""
        return bool(self._carried)

    def __next__(self) -> list[Span]:
        plan = self._planned() if self._plan is None else self._plan
        if self.row >= len(plan):
            (self.cursor, self.skip), self.row = self._after, 0
            plan = self._planned()
        self._plan = plan
        if not plan:
            raise StopIteration
        self.row += 1
        return plan[self.row - 1]

    def go(self, cursor: int, skip: int, row: int) -> None:
        """Go to a place."""
        self.cursor, self.skip, self.row, self._plan = cursor, skip, row, None

    def rest(self) -> tuple[list[Span], int]:
        """What this phase leaves to the next: spans not given out, and the number of the draw that follows them."""
        plan = self._planned() if self._plan is None else self._plan
        left = [span for row in plan[self.row :] for span in row]
        cursor, skip = self._after
        if skip:
            left += _cut(self._items(cursor)[:1], skip, self._length, at_row_ends=False)
            cursor += 1
        carried = self._carried[cursor:]
        return left + carried, self._base + max(cursor - len(self._carried), 0)

    def _planned(self) -> list[list[Span]]:
        if self._carried and self.cursor >= len(self._carried):
            self.cursor, self._base, self._carried = self._base + self.cursor - len(self._carried), 0, []
        items: list[Span] = []
        spans: list[Span] = []

        def sizes() -> Iterator[int]:
            for span in _cut(self._from(self.cursor, items), self.skip, self._length, self._packer.cuts_at_row_ends):
                spans.append(span)
                yield span[2]

        laid = self._packer.lay(sizes(), self._length, self._bins)
        self._after = self._behind(items, sum(map(len, laid)), spans)
        rows = [[spans[ordinal] for ordinal in row] for row in laid]
        if not self._shuffle:
            return rows
        # Early rows of a plan are fuller than late ones, and all shards begin their plans together: given out as
        # laid, whole updates would be fuller than others.
        order = np.random.default_rng([self._shard, self.cursor, self.skip]).permutation(len(rows))
        return [rows[row] for row in order]

    def _behind(self, items: Sequence[Span], laid: int, spans: Sequence[Span]) -> tuple[int, int]:
        """Cursor and skip after the first `laid` spans."""
        cursor, inputs = self.cursor, self.skip + sum(size for _, _, size in spans[:laid])
        for _, _, size in items:
            if inputs < size:
                break
            cursor, inputs = cursor + 1, inputs - size
        return cursor, inputs

    def _from(self, cursor: int, seen: list[Span]) -> Iterator[Span]:
        while items := self._items(cursor):
            for item in items:
                seen.append(item)
                yield item
            cursor += len(items)

    def _items(self, cursor: int) -> list[Span]:
        if cursor < len(self._carried):
            return self._carried[cursor:]
        pieces, table = self._draws.read(self._base + cursor - len(self._carried), BLOCK), self._pieces
        columns = (table.source[pieces], table.starts[pieces], table.sizes[pieces])
        return list(zip(*(column.tolist() for column in columns), strict=True))


def _cut(items: Iterable[Span], skip: int, length: int, at_row_ends: bool) -> Iterator[Span]:
    """Cut items to what a row takes, without the first `skip` inputs."""
    room = length
    for source, start, size in items:
        start, size, skip = start + skip, size - skip, 0
        # A place kept over a change of the corpus may skip more than the item now has.
        while size > 0:
            step = min(size, room)
            yield source, start, step
            start, size = start + step, size - step
            if at_row_ends:
                room = room - step or length


def fill(documents: Documents, rows: Sequence[Sequence[Span]], length: int) -> HostBatch:
    """Write the spans of each row into a batch [len(rows), length]."""
    batch = {field: np.zeros((len(rows), length), np.int32) for field in FIELDS}
    batch["labels"][:] = IGNORE
    tokens, labels, segments, positions = (batch[field] for field in FIELDS)
    places = np.arange(length, dtype=np.int32)
    for row, spans in enumerate(rows):
        lo = 0
        for segment, (_, start, size) in enumerate(spans, 1):
            hi = lo + size
            run = documents.tokens[start : start + size + 1]
            tokens[row, lo:hi] = run[:-1]
            labels[row, lo:hi] = run[1:]
            segments[row, lo:hi] = segment
            positions[row, lo:hi] = places[:size]
            if documents.scored is not None:
                labels[row, lo:hi][~documents.scored[start + 1 : start + size + 1]] = IGNORE
            lo = hi
    return batch


def fill_rate(batch: HostBatch) -> float:
    """Positions that hold an input / all positions of a batch."""
    return float(np.mean(batch["segments"] > 0))
