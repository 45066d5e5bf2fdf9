"""Adversarial test batches: packed by hand, by the loader's packers, and unpacked token by token as the reference.

B sequences, L tokens a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxtrain.data import FIELDS, IGNORE, Documents
from jaxtrain.data.mixing import Mixture
from jaxtrain.data.packing import HostBatch, PackedSequences, PieceSpan, fill
from jaxtrain.data.pieces import cut

MAX_DOCUMENTS = 3
"""Largest number of documents in a randomly packed sequence."""


@dataclass(frozen=True, eq=False)
class StepBatch:
    """The documents of one step, and the spans of tokens that each sequence holds."""

    documents: Documents
    sequences: tuple[tuple[PieceSpan, ...], ...]

    @cached_property
    def spans(self) -> tuple[PieceSpan, ...]:
        """All spans, in document order."""
        return tuple(sorted(span for sequence in self.sequences for span in sequence))

    def packed(self, batch_size: int, seq_len: int) -> HostBatch:
        """The batch [batch_size, L] as the loader builds it, padded with empty sequences.

        Raises ValueError if `batch_size` is too small.
        """
        if len(self.sequences) > batch_size:
            raise ValueError(f"{len(self.sequences)} sequences of data in a batch of {batch_size}")
        padding = [()] * (batch_size - len(self.sequences))
        return fill(self.documents, [*self.sequences, *padding], seq_len)

    def unpacked(self, batch_size: int, seq_len: int) -> HostBatch:
        """The same tokens with one span a sequence, written token by token; no mask between documents."""
        assert len(self.spans) <= batch_size, (len(self.spans), batch_size)
        batch = {field: np.zeros((batch_size, seq_len), np.int32) for field in FIELDS}
        batch["labels"][:] = IGNORE
        for b, (_, start, size) in enumerate(self.spans):
            for i in range(size):
                token, target = self.documents.tokens[start + i : start + i + 2]
                scored = self.documents.scored is None or self.documents.scored[start + i + 1 : start + i + 2][0]
                batch["tokens"][b, i], batch["segments"][b, i], batch["positions"][b, i] = token, 1, i
                batch["labels"][b, i] = target if scored else IGNORE
        return batch


def adversarial_batches(batch_size: int, seq_len: int, vocab: int, seed: int = 0) -> list[StepBatch]:
    """Three steps of `batch_size` (at least 8) packed sequences.

    Step 1 has empty sequences, a sequence without scored tokens, a document of full length, documents of one input
    token, and uneven loss masks. In step 2 every odd sequence is unscored, so that whole microbatches are unscored
    when the number of microbatches is even. In step 3 the first half of the batch is unscored, one sequence has a
    single scored token, and the last is scored throughout.
    """
    rng = np.random.default_rng(seed)
    some, every = (lambda: float(rng.random())), 1.0
    padding = batch_size // 4
    first: list[list[int]] = [[]] * padding
    first += [_random_sizes(rng, seq_len), [seq_len], [1, 1, 1, seq_len - 3], [seq_len - 1, 1]]
    first += [_random_sizes(rng, seq_len) for _ in range(batch_size - len(first))]
    mixed = _step_batch(rng, vocab, first, [0.0 if b == padding else some() for b in range(batch_size)])
    odd = _step_batch(
        rng, vocab, [_random_sizes(rng, seq_len) for _ in range(batch_size)],
        [0.0 if b % 2 else some() for b in range(batch_size)],
    )  # fmt: skip
    sizes = [_random_sizes(rng, seq_len) for _ in range(batch_size - 1)] + [[seq_len]]
    rates = [0.0 if b < batch_size // 2 else some() for b in range(batch_size - 1)] + [every]
    return [mixed, odd, _with_one_scored(_step_batch(rng, vocab, sizes, rates), batch_size // 2)]


def zipf_batch(batch_size: int, seq_len: int, vocab: int, seed: int = 0) -> StepBatch:
    """Full packed sequences whose ids follow Zipf's law: id n has the probability of 1 / (n + 1), up to a factor."""
    rng = np.random.default_rng(seed)
    sizes = []
    for _ in range(batch_size):
        first = int(rng.integers(1, seq_len))
        sizes.append([first, seq_len - first])
    made = _step_batch(rng, vocab, sizes, [0.9] * batch_size)
    shares = 1 / np.arange(1, vocab + 1)
    tokens = rng.choice(vocab, len(made.documents.tokens), p=shares / shares.sum()).astype(np.int32)
    documents = made.documents
    return StepBatch(
        Documents(tokens, documents.starts, documents.stops, documents.names, documents.scored), made.sequences
    )


def repack(step_batch: StepBatch, packing: str, seq_len: int) -> StepBatch:
    """The same documents packed by one of the loader's packers.

    Raises AssertionError if a target is lost or repeated.
    """
    mixture = Mixture(cut(step_batch.documents, seq_len), [1.0], [1], seed=0, shuffle=False)
    repacked = StepBatch(
        step_batch.documents,
        tuple(map(tuple, PackedSequences(mixture, seq_len=seq_len, packing=packing, bins=4, shuffle=False))),
    )
    targets = np.concatenate([np.arange(start, start + size) for _, start, size in repacked.spans])
    expected = np.concatenate([np.arange(start, start + size) for _, start, size in step_batch.spans])
    assert np.array_equal(np.sort(targets), np.sort(expected)), f"data.packing {packing} lost or repeated targets"
    return repacked


def randomize_masked(batch: HostBatch, vocab: int, seq_len: int, tails: bool, seed: int = 1) -> HostBatch:
    """The batch with random values wherever they must not matter.

    These are ids and positions of padding and, with `tails`, the ids after the last scored token of each document.
    """
    rng = np.random.default_rng(seed)
    out = {name: field.copy() for name, field in batch.items()}
    padding = batch["segments"] == 0
    out["positions"][padding] = rng.integers(0, seq_len, padding.sum())
    masked = padding.copy()
    for b, segments in enumerate(batch["segments"]):
        for segment in range(1, segments.max() + 1 if tails else 1):
            indices = np.flatnonzero(segments == segment)
            scored = indices[batch["labels"][b, indices] != IGNORE]
            masked[b, indices[indices > (scored.max() if len(scored) else -1)]] = True
    out["tokens"][masked] = rng.integers(0, vocab, masked.sum())
    return out


def _random_sizes(rng: np.random.Generator, seq_len: int) -> list[int]:
    """Sizes of 1 to MAX_DOCUMENTS documents of a sequence that leave some padding."""
    cuts = np.sort(rng.choice(np.arange(1, seq_len), rng.integers(1, MAX_DOCUMENTS + 1), replace=False))
    return np.diff(cuts, prepend=0).tolist()


def _step_batch(
    rng: np.random.Generator, vocab: int, sizes: Sequence[Sequence[int]], rates: Sequence[float]
) -> StepBatch:
    """Documents of `sizes[b]` inputs; the share `rates[b]` of the targets of sequence b is scored."""
    lengths = np.array([size + 1 for sequence in sizes for size in sequence])
    stops = np.cumsum(lengths)
    starts = iter((stops - lengths).tolist())
    sequences = tuple(tuple((0, next(starts), size) for size in sequence) for sequence in sizes)
    shares = np.repeat([rate for sequence, rate in zip(sizes, rates, strict=True) for _ in sequence], lengths)
    documents = Documents(
        rng.integers(0, vocab, stops[-1], np.int32), stops - lengths, stops, [""] * len(stops),
        rng.random(stops[-1]) < shares,
    )  # fmt: skip
    return StepBatch(documents, sequences)


def _with_one_scored(step_batch: StepBatch, sequence: int) -> StepBatch:
    """The batch in which the first target alone of one sequence is scored."""
    scored = np.array(step_batch.documents.scored)
    for _, start, size in step_batch.sequences[sequence]:
        scored[start : start + size + 1] = False
    scored[step_batch.sequences[sequence][0][1] + 1] = True
    documents = step_batch.documents
    return StepBatch(
        Documents(documents.tokens, documents.starts, documents.stops, documents.names, scored), step_batch.sequences
    )
