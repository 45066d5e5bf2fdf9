"""Pieces -> packed sequences: packers work on sizes alone, tokens are copied when a batch is filled.

A segment that is not the beginning of its document starts at position 0 like any other and does not see the earlier
part. A position in the stream is three numbers; seeking to it packs one block of sequences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxtrain.data.corpus import Documents
from jaxtrain.data.mixing import Draws, Mixture
from jaxtrain.numerics.labels import IGNORE

HostBatch = dict[str, np.ndarray]
"""int32 [B, L] for each of FIELDS: inputs (0 where padded), the next token of the same document (IGNORE where padded
or not scored), segment numbers 1, 2, ... of a sequence (0 where padded), 0, 1, ... in a segment (0 where padded)."""
PieceSpan = tuple[int, int, int]
"""A run of inputs: its source, the index of its first input in the flat tokens, its number of inputs."""
Item = tuple[PieceSpan, bool]
"""A piece to be packed, and whether it begins an epoch of its source."""
StreamPosition = dict[str, Any]
"""The position of one virtual shard, as JSON."""
FIELDS = ("tokens", "labels", "segments", "positions")
# A larger block means less padding: full sequences make room for others to fill up.
BLOCK_BINS = 4
DRAWS_READ = 256

PackFunction = Callable[[Iterable[int], int, int], list[list[int]]]


def first_fit(sizes: Iterable[int], seq_len: int, bins: int) -> list[list[int]]:
    """Put each size, in order, into the first open sequence with room; a new sequence opens when one is full.

    Stops where a size fits into none of `bins` open sequences, or at BLOCK_BINS * bins sequences. Returns the
    sequences, each as the ordinals of its sizes: together 0, 1, ... up to where it stopped, as for every packer.
    """
    return _fit(sizes, seq_len, bins, lambda room, size: int(np.argmax(room >= size)))


def best_fit(sizes: Iterable[int], seq_len: int, bins: int) -> list[list[int]]:
    """Like `first_fit`, each size into the open sequence in which it leaves the least room."""
    return _fit(sizes, seq_len, bins, lambda room, size: int(np.argmin(np.where(room >= size, room, seq_len + 1))))


def next_fit(sizes: Iterable[int], seq_len: int, bins: int) -> list[list[int]]:
    """Put each size, in order, into the last sequence; with sizes cut at sequence ends all but the last are full."""
    sequences: list[list[int]] = []
    room = 0
    for ordinal, size in enumerate(sizes):
        if room < size:
            if len(sequences) == BLOCK_BINS * bins:
                break
            sequences.append([])
            room = seq_len
        sequences[-1].append(ordinal)
        room -= size
    return sequences


def one_each(sizes: Iterable[int], seq_len: int, bins: int) -> list[list[int]]:
    """One sequence for each size."""
    return [[ordinal] for ordinal, _ in zip(range(BLOCK_BINS * bins), sizes, strict=False)]


def _fit(sizes: Iterable[int], seq_len: int, bins: int, choose: Callable[[np.ndarray, int], int]) -> list[list[int]]:
    sequences: list[list[int]] = []
    room = np.zeros(BLOCK_BINS * bins, np.int64)
    still_open = 0
    for ordinal, size in enumerate(sizes):
        index = choose(room, size)
        if room[index] < size:
            if still_open == bins or len(sequences) == len(room):
                break
            index = len(sequences)
            room[index] = seq_len
            sequences.append([])
            still_open += 1
        room[index] -= size
        still_open -= room[index] == 0
        sequences[index].append(ordinal)
    return sequences


@dataclass(frozen=True)
class Packer:
    """A packing function, whether it cuts pieces where a sequence ends (else only where they exceed seq_len), and
    whether a sequence holds several."""

    pack: PackFunction
    cuts_at_ends: bool = False
    joins: bool = True


PACKERS = {
    "first_fit": Packer(first_fit),
    "best_fit": Packer(best_fit),
    "concat": Packer(next_fit, cuts_at_ends=True),
    "none": Packer(one_each, joins=False),
}


class PackedSequences(Iterator[list[PieceSpan]]):
    """Packed sequences of one virtual shard at one seq_len, each a list of spans; they end where the mixture ends.

    Sequences are packed a block at a time and returned in shuffled order, or in packing order without `shuffle`. With
    `epoch_borders` a block ends where an epoch of a source ends in this shard (see _BlockPlan); its emptiest sequence
    is filled from the next epoch and comes last. The `carried` spans of a phase with another seq_len come before the
    mixture's draws, which start at number `base`. The position is (cursor, skip, taken): items used by finished blocks,
    inputs of the next item that they used, sequences taken from the current block.
    """

    def __init__(
        self,
        mixture: Mixture,
        *,
        seq_len: int,
        packing: str = "first_fit",
        bins: int = 32,
        shuffle: bool = True,
        shard: int = 0,
        shards: int = 1,
        carried: Sequence[PieceSpan] = (),
        base: int = 0,
        epoch_borders: bool = True,
    ) -> None:
        self._pieces, self._draws = mixture.pieces, Draws(mixture, shard, shards)
        self._seq_len, self._packer, self._bins = seq_len, PACKERS[packing], bins
        self._shard, self._shuffle = shard, shuffle
        self._carried, self._base = list(carried), base if carried else 0
        self.epoch_borders = epoch_borders
        self.cursor, self.skip, self.taken = 0 if carried else base, 0, 0
        self._block: list[list[PieceSpan]] | None = None
        self._block_end = (0, 0)

    @property
    def has_carried(self) -> bool:
        """Whether the position counts from carried spans, so that restoring it needs the end of the phase before."""
        return bool(self._carried)

    def __next__(self) -> list[PieceSpan]:
        block = self._pack_block() if self._block is None else self._block
        if self.taken >= len(block):
            (self.cursor, self.skip), self.taken = self._block_end, 0
            block = self._pack_block()
        self._block = block
        if not block:
            raise StopIteration
        self.taken += 1
        return block[self.taken - 1]

    def seek(self, cursor: int, skip: int, taken: int) -> None:
        """Go to a position."""
        self.cursor, self.skip, self.taken, self._block = cursor, skip, taken, None

    def remaining(self) -> tuple[list[PieceSpan], int]:
        """What this phase leaves to the next: spans not returned yet, and the number of the draw that follows them."""
        block = self._pack_block() if self._block is None else self._block
        left = [span for sequence in block[self.taken :] for span in sequence]
        cursor, skip = self._block_end
        if skip:
            left += (span for span, _ in _cut(self._items(cursor)[:1], skip, self._seq_len, at_ends=False))
            cursor += 1
        carried = self._carried[cursor:]
        return left + carried, self._base + max(cursor - len(self._carried), 0)

    def _pack_block(self) -> list[list[PieceSpan]]:
        if self._carried and self.cursor >= len(self._carried):
            self.cursor, self._base, self._carried = self._base + self.cursor - len(self._carried), 0, []
        items: list[PieceSpan] = []
        cut = _cut(self._from(self.cursor, items), self.skip, self._seq_len, self._packer.cuts_at_ends)
        enough = self._bins * self._seq_len if self.epoch_borders else None
        plan = _BlockPlan(cut, len(self._pieces.targets), enough)
        packed = self._packer.pack(plan.sizes(), self._seq_len, self._bins)
        used, across = sum(map(len, packed)), False
        if plan.at_border and used == len(plan.spans) - 1 and self._packer.joins:
            room = [self._seq_len - sum(plan.spans[ordinal][2] for ordinal in sequence) for sequence in packed]
            more = plan.ordinals_across(max(room))
            if more:
                packed.append([*packed.pop(int(np.argmax(room))), *more])
                used, across = used + len(more), True
        self._block_end = self._position_after(items, plan.spans[:used])
        sequences = [[plan.spans[ordinal] for ordinal in sequence] for sequence in packed]
        if not self._shuffle:
            return sequences
        # The first sequences of a block are fuller than the last, and all shards begin their blocks together: in
        # packing order whole steps would be fuller than others.
        order = np.random.default_rng([self._shard, self.cursor, self.skip]).permutation(len(sequences) - across)
        return [sequences[index] for index in order] + sequences[len(order) :]

    def _position_after(self, items: Sequence[PieceSpan], spans: Sequence[PieceSpan]) -> tuple[int, int]:
        """Cursor and skip after `spans`, which were cut from `items`."""
        cursor, inputs = self.cursor, self.skip + sum(size for _, _, size in spans)
        for _, _, size in items:
            if inputs < size:
                break
            cursor, inputs = cursor + 1, inputs - size
        return cursor, inputs

    def _from(self, cursor: int, seen: list[PieceSpan]) -> Iterator[Item]:
        while items := self._items(cursor):
            for item in items:
                seen.append(item[0])
                yield item
            cursor += len(items)

    def _items(self, cursor: int) -> list[Item]:
        if cursor < len(self._carried):
            return [(span, False) for span in self._carried[cursor:]]
        pieces, begins = self._draws.read(self._base + cursor - len(self._carried), DRAWS_READ)
        columns = (column[pieces].tolist() for column in (self._pieces.source, self._pieces.starts, self._pieces.sizes))
        return list(zip(zip(*columns, strict=True), begins.tolist(), strict=True))


class _BlockPlan:
    """The spans that one block may hold, up to where an epoch ends.

    The border of a source that gave less than 1 / (sources + 1) of the block counts from `enough` inputs on: a block
    as short as each epoch of a small source would leave sequences unfilled. Without `enough` no border counts.
    """

    def __init__(self, cut: Iterator[Item], sources: int, enough: int | None) -> None:
        self._cut, self._sources, self._enough = cut, sources, enough
        self._given: Counter[int] = Counter()
        self.spans: list[PieceSpan] = []
        self.at_border = False

    def sizes(self) -> Iterator[int]:
        """Sizes of the spans in front of the border; `spans` also holds the one behind it."""
        for span, begins_epoch in self._cut:
            source, _, size = span
            self.spans.append(span)
            self.at_border = begins_epoch and self._counts(source)
            if self.at_border:
                return
            self._given[source] += size
            yield size

    def _counts(self, source: int) -> bool:
        total = self._given.total()
        if self._enough is None or not total:
            return False
        return (self._sources + 1) * self._given[source] >= total or total >= self._enough

    def ordinals_across(self, room: int) -> list[int]:
        """Ordinals of the next spans, from the one behind the border on, that fit one after the other."""
        ordinals = []
        while self.spans[-1][2] <= room:
            ordinals.append(len(self.spans) - 1)
            room -= self.spans[-1][2]
            following = next(self._cut, None) if room else None
            if following is None:
                break
            self.spans.append(following[0])
        return ordinals


def _cut(items: Iterable[Item], skip: int, seq_len: int, at_ends: bool) -> Iterator[Item]:
    """Cut items to what a sequence holds, without the first `skip` inputs."""
    room = seq_len
    for (source, start, size), begins_epoch in items:
        begins_epoch = begins_epoch and not skip
        start, size, skip = start + skip, size - skip, 0
        # A position that is used after a change of the corpus may skip more than the item now has.
        while size > 0:
            step = min(size, room)
            yield (source, start, step), begins_epoch
            start, size, begins_epoch = start + step, size - step, False
            if at_ends:
                room = room - step or seq_len


def fill(documents: Documents, sequences: Sequence[Sequence[PieceSpan]], seq_len: int) -> HostBatch:
    """Copy the spans of each sequence into a batch [len(sequences), seq_len]."""
    batch = {field: np.zeros((len(sequences), seq_len), np.int32) for field in FIELDS}
    batch["labels"][:] = IGNORE
    tokens, labels, segments, positions = (batch[field] for field in FIELDS)
    positions_L = np.arange(seq_len, dtype=np.int32)
    for index, spans in enumerate(sequences):
        lo = 0
        for segment, (_, start, size) in enumerate(spans, 1):
            hi = lo + size
            run = documents.tokens[start : start + size + 1]
            tokens[index, lo:hi] = run[:-1]
            labels[index, lo:hi] = run[1:]
            segments[index, lo:hi] = segment
            positions[index, lo:hi] = positions_L[:size]
            if documents.scored is not None:
                labels[index, lo:hi][~documents.scored[start + 1 : start + size + 1]] = IGNORE
            lo = hi
    return batch


def fill_rate(batch: HostBatch) -> float:
    """Positions that hold an input / all positions of a batch."""
    return float(np.mean(batch["segments"] > 0))
