"""Hostile data: what a trainer goes wrong on, laid by hand, by the real packers, and by a loop that is plainly right.

B rows, L length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxtrain.data import FIELDS, IGNORE, Documents
from jaxtrain.data.mixing import Mixture
from jaxtrain.data.packing import HostBatch, Rows, Span, fill
from jaxtrain.data.pieces import cut

MOST = 3
"""Documents of a row that is laid at random."""


@dataclass(frozen=True, eq=False)
class StepBatch:
    """One update's documents and the runs of their tokens that each row holds."""

    documents: Documents
    rows: tuple[tuple[Span, ...], ...]

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Every run, in the order of the documents."""
        return tuple(sorted(span for row in self.rows for span in row))

    def packed(self, rows: int, length: int) -> HostBatch:
        """The batch [rows, L] that the loader makes, filled up with rows of padding; ValueError where they are few."""
        if len(self.rows) > rows:
            raise ValueError(f"{len(self.rows)} rows of data in a batch of {rows}")
        return fill(self.documents, [*self.rows, *[()] * (rows - len(self.rows))], length)

    def alone(self, rows: int, length: int) -> HostBatch:
        """The same tokens with one run a row, token by token: nothing to mask, nothing to reset, nothing to cross."""
        assert len(self.spans) <= rows, (len(self.spans), rows)
        batch = {field: np.zeros((rows, length), np.int32) for field in FIELDS}
        batch["labels"][:] = IGNORE
        for row, (_, start, size) in enumerate(self.spans):
            for i in range(size):
                token, target = self.documents.tokens[start + i : start + i + 2]
                counts = self.documents.scored is None or self.documents.scored[start + i + 1 : start + i + 2][0]
                batch["tokens"][row, i], batch["segments"][row, i], batch["positions"][row, i] = token, 1, i
                batch["labels"][row, i] = target if counts else IGNORE
        return batch


def hostile_steps(rows: int, length: int, vocab: int, seed: int = 0) -> list[StepBatch]:
    """Three updates of `rows` (at least 8) packed rows.

    The first has rows of padding alone, an unscored row, a document of full length, documents of one input and uneven
    masks; in the second every odd row is unscored, so that with an even number of microbatches whole microbatches are;
    in the third one half of the rows is unscored, one row has a single scored token and the last is scored throughout.
    """
    rng = np.random.default_rng(seed)
    some, every = (lambda: float(rng.random())), 1.0
    padding = rows // 4
    first: list[list[int]] = [[]] * padding + [_split(rng, length), [length], [1, 1, 1, length - 3], [length - 1, 1]]
    first += [_split(rng, length) for _ in range(rows - len(first))]
    mixed = _update(rng, vocab, first, [0.0 if row == padding else some() for row in range(rows)])
    odd = _update(
        rng, vocab, [_split(rng, length) for _ in range(rows)], [0.0 if row % 2 else some() for row in range(rows)]
    )
    sizes = [_split(rng, length) for _ in range(rows - 1)] + [[length]]
    rates = [0.0 if row < rows // 2 else some() for row in range(rows - 1)] + [every]
    return [mixed, odd, _with_one_scored(_update(rng, vocab, sizes, rates), rows // 2)]


def repacked(update: StepBatch, packing: str, length: int) -> StepBatch:
    """The same documents laid by one of the loader's packers; raises AssertionError where a target is lost or read
    twice."""
    mixture = Mixture(cut(update.documents, length), [1.0], [1], seed=0, shuffle=False)
    laid = StepBatch(
        update.documents,
        tuple(map(tuple, Rows(mixture, length=length, packing=packing, bins=4, shuffle=False))),
    )
    targets = np.concatenate([np.arange(start, start + size) for _, start, size in laid.spans])
    wanted = np.concatenate([np.arange(start, start + size) for _, start, size in update.spans])
    assert np.array_equal(np.sort(targets), np.sort(wanted)), f"data.packing {packing} lost or repeated targets"
    return laid


def scrambled(batch: HostBatch, vocab: int, length: int, tails: bool, seed: int = 1) -> HostBatch:
    """The batch with everything random that must not matter: ids and positions of padding, and with `tails` the ids of
    each document behind the last token that a scored one can see."""
    rng = np.random.default_rng(seed)
    out = {name: field.copy() for name, field in batch.items()}
    padding = batch["segments"] == 0
    out["positions"][padding] = rng.integers(0, length, padding.sum())
    free = padding.copy()
    for row, segments in enumerate(batch["segments"]):
        for segment in range(1, segments.max() + 1 if tails else 1):
            here = np.flatnonzero(segments == segment)
            scored = here[batch["labels"][row, here] != IGNORE]
            free[row, here[here > (scored.max() if len(scored) else -1)]] = True
    out["tokens"][free] = rng.integers(0, vocab, free.sum())
    return out


def _split(rng: np.random.Generator, length: int) -> list[int]:
    """Sizes of 1 to MOST documents of a row, with some padding left behind them."""
    cuts = np.sort(rng.choice(np.arange(1, length), rng.integers(1, MOST + 1), replace=False))
    return np.diff(cuts, prepend=0).tolist()


def _update(rng: np.random.Generator, vocab: int, sizes: Sequence[Sequence[int]], rates: Sequence[float]) -> StepBatch:
    """Documents of `sizes` inputs, of whose targets a share of `rates[row]` is scored."""
    lengths = np.array([size + 1 for row in sizes for size in row])
    stops = np.cumsum(lengths)
    starts = iter((stops - lengths).tolist())
    rows = tuple(tuple((0, next(starts), size) for size in row) for row in sizes)
    shares = np.repeat([rate for row, rate in zip(sizes, rates, strict=True) for _ in row], lengths)
    documents = Documents(
        rng.integers(0, vocab, stops[-1], np.int32), stops - lengths, stops, [""] * len(stops),
        rng.random(stops[-1]) < shares,
    )  # fmt: skip
    return StepBatch(documents, rows)


def _with_one_scored(update: StepBatch, row: int) -> StepBatch:
    scored = np.array(update.documents.scored)
    for _, start, size in update.rows[row]:
        scored[start : start + size + 1] = False
    scored[update.rows[row][0][1] + 1] = True
    documents = update.documents
    return StepBatch(
        Documents(documents.tokens, documents.starts, documents.stops, documents.names, scored), update.rows
    )
