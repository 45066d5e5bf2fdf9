"""Pieces of several sources -> the order of each virtual shard: shuffled, repeated, mixed by weights.

Each source is an endless sequence of epochs, and each epoch is a new permutation of its pieces. Piece n of that
sequence has the time (n + 1/2) x stride, where a source's stride is the mean size of its pieces / its weight. Virtual
shard v of V reads the pieces n = v, v + V, v + 2V, ... of every source in order of time. Weights are therefore shares
of tokens in every shard at every moment, all shards together read every piece of an epoch once, and the other sources
fill the time of a source whose epochs are used up. The k-th draw is a function of k, found by a bisection over time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

import numpy as np

from jaxtrain.config import ConfigError
from jaxtrain.data.pieces import Pieces

RESOLUTION = 2**20  # the smallest stride: ratios of weights are exact to a millionth


class Mixture:
    """All sources of a run with their strides; weights are shares of tokens, epochs a limit (None: no limit).

    Raises ConfigError when a source has no target at all.
    """

    def __init__(
        self, pieces: Pieces, weights: Sequence[float], epochs: Sequence[float | None], *, seed: int, shuffle: bool
    ) -> None:
        self.pieces = pieces
        self._members = [np.flatnonzero(pieces.source == source) for source in range(len(weights))]
        _check_targets(pieces, [len(members) for members in self._members])
        gaps = [
            int(targets) / len(members) / weight
            for targets, members, weight in zip(pieces.targets, self._members, weights, strict=True)
        ]
        self.strides = [max(1, round(RESOLUTION * gap / min(gaps))) for gap in gaps]
        self.caps = [
            None if cap is None else max(1, round(cap * len(members)))
            for cap, members in zip(epochs, self._members, strict=True)
        ]
        # Shards read on both sides of an epoch's border: two permutations of each source are cached.
        self._orders = [
            lru_cache(maxsize=2)(partial(_order, len(members), shuffle, (seed, source)))
            for source, members in enumerate(self._members)
        ]

    def piece(self, source: int, position_N: np.ndarray) -> np.ndarray:
        """Piece numbers [N] at these positions of a source's sequence of epochs."""
        members, order = self._members[source], self._orders[source]
        epoch_N, within_N = np.divmod(position_N, len(members))
        for epoch in np.unique(epoch_N).tolist():
            here = epoch_N == epoch
            within_N[here] = order(epoch)[within_N[here]]
        return members[within_N]

    def begins_epoch(self, source: int, position_N: np.ndarray, shards: int) -> np.ndarray:
        """Whether each position [N] is the first of an epoch, but the first epoch, that its shard reads (bool [N])."""
        count = len(self._members[source])
        return (position_N >= shards) & (position_N // count != (position_N - shards) // count)


class Draws:
    """The pieces of one virtual shard by draw number; endless unless every source has a limit of epochs."""

    def __init__(self, mixture: Mixture, shard: int = 0, shards: int = 1) -> None:
        self._mixture, self._shard, self._shards = mixture, shard, shards
        self._caps = [None if cap is None else self._local(cap) for cap in mixture.caps]
        self._at, self._counts = 0, [0] * len(mixture.strides)

    def read(self, lo: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Piece numbers of draws lo..lo + count, and whether each begins an epoch of its source in this shard.

        They are fewer where all sources end; consecutive reads need no seek.
        """
        if lo != self._at:
            self._at, self._counts = lo, self._seek(lo)
        position, source = self._next(count)
        pieces, begins = np.empty(len(position), np.int64), np.zeros(len(position), bool)
        for each in range(len(self._counts)):
            here = source == each
            if here.any():
                pieces[here] = self._mixture.piece(each, position[here])
                begins[here] = self._mixture.begins_epoch(each, position[here], self._shards)
                self._counts[each] += int(here.sum())
        self._at += len(pieces)
        return pieces, begins

    def _next(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Position within its source, and source, of each of the next draws."""
        runs = []
        for done, cap, stride in zip(self._counts, self._caps, self._mixture.strides, strict=True):
            stop = done + count if cap is None else min(done + count, cap)
            position = np.arange(done, stop) * self._shards + self._shard
            runs.append((position, (2 * position + 1) * stride))
        source = np.repeat(np.arange(len(runs)), [len(position) for position, _ in runs])
        first = np.argsort(np.concatenate([time for _, time in runs]), kind="stable")[:count]
        return np.concatenate([position for position, _ in runs])[first], source[first]

    def _seek(self, lo: int) -> list[int]:
        """Draws of each source among the first `lo`."""
        if None not in self._caps and lo >= sum(cap for cap in self._caps if cap is not None):
            return [cap for cap in self._caps if cap is not None]
        low, high = 0, 1
        while sum(self._before(high)) <= lo:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if sum(self._before(middle)) <= lo else (low, middle)
        counts = self._before(low)
        for source, after in enumerate(self._before(high)):
            # At equal times sources draw in the order of their numbers.
            counts[source] += after > counts[source] and sum(counts) < lo
        return counts

    def _before(self, time: int) -> list[int]:
        """Draws of each source before a time (in half strides)."""
        counts = (self._local(((time - 1) // stride + 1) // 2) for stride in self._mixture.strides)
        return [count if cap is None else min(count, cap) for count, cap in zip(counts, self._caps, strict=True)]

    def _local(self, count: int) -> int:
        """How many of a source's first `count` pieces belong to this shard."""
        return max(0, -(-(count - self._shard) // self._shards))


def _order(count: int, shuffle: bool, key: tuple[int, ...], epoch: int) -> np.ndarray:
    order = np.arange(count, dtype=np.int32)
    return np.random.default_rng([*key, epoch]).permutation(order) if shuffle else order


def _check_targets(pieces: Pieces, counts: Sequence[int]) -> None:
    for source, count in enumerate(counts):
        if not count:
            which = f"data.sources[{source}]" if len(counts) > 1 else "data.sources"
            documents = pieces.documents
            have = len(documents) if documents.source is None else int(np.sum(documents.source == source))
            dropped = int(pieces.dropped_documents[source])
            raise ConfigError(
                f"{which}: {have} documents to train on and none has a token to predict"
                + (f" ({dropped} are longer than data.seq_len and data.overlong is drop)" if dropped else "")
                + ": bring more text, or lower data.held_out"
            )
