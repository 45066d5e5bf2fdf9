"""Cutting, packers and filling, against hand-made sequences and a count of every target."""

from collections import Counter
from dataclasses import replace
from itertools import islice, pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.data import IGNORE, Documents, fill_rate
from jaxtrain.data.mixing import Draws, Mixture
from jaxtrain.data.packing import PACKERS, PackedSequences, best_fit, fill, first_fit, next_fit, one_each
from jaxtrain.data.pieces import Pieces, cut


def documents_of(*lengths: int) -> Documents:
    """Documents of distinct tokens, so that a token identifies its place of origin."""
    stops = np.cumsum(lengths, dtype=np.int64)
    tokens = np.arange(1, stops[-1] + 1, dtype=np.uint32)
    return Documents(tokens, stops - np.array(lengths), stops, tuple(f"d{i}" for i in range(len(lengths))))


def spans(pieces: Pieces, *rows: list[int]) -> list[list[tuple[int, int, int]]]:
    return [[(int(pieces.source[p]), int(pieces.starts[p]), int(pieces.sizes[p])) for p in row] for row in rows]


def order_of(pieces: Pieces, *, seed: int = 0, shuffle: bool = True, epochs: int | None = 1) -> Mixture:
    return Mixture(pieces, [1.0], [epochs], seed=seed, shuffle=shuffle)


def test_worked_example_of_the_requirements():
    # Length 8, A gives 3 inputs and B gives 4: padded 7 of 16, packed 7 of 8.
    documents = documents_of(4, 5)
    pieces = cut(documents, 8)
    assert fill_rate(fill(documents, spans(pieces, [0], [1]), 8)) == 0.4375
    rows = first_fit(pieces.sizes, 8, bins=2)
    assert rows == [[0, 1]]
    packed = fill(documents, spans(pieces, *rows), 8)
    assert fill_rate(packed) == 0.875
    assert packed["tokens"].tolist() == [[1, 2, 3, 5, 6, 7, 8, 0]]
    assert packed["labels"].tolist() == [[2, 3, 4, 6, 7, 8, 9, IGNORE]]
    assert packed["segments"].tolist() == [[1, 1, 1, 2, 2, 2, 2, 0]]
    assert packed["positions"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0]]
    assert all(column.dtype == np.int32 for column in packed.values())


def test_an_overlong_document_keeps_the_target_at_each_cut():
    documents = documents_of(10)
    pieces = cut(documents, 4)
    assert pieces.sizes.tolist() == [4, 4, 1]
    packed = fill(documents, spans(pieces, [0], [1], [2]), 4)
    assert packed["labels"].tolist() == [[2, 3, 4, 5], [6, 7, 8, 9], [10, IGNORE, IGNORE, IGNORE]]
    assert packed["positions"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 0, 0, 0]]


def test_first_fit_packs_the_textbook_example():
    # Bins of 10, items 4 8 1 4 2 1: first-fit needs two bins, {4 1 4 1} and {8 2}.
    assert first_fit([4, 8, 1, 4, 2, 1], 10, bins=4) == [[0, 2, 3, 5], [1, 4]]


def test_first_fit_stops_at_the_first_that_fits_nowhere():
    assert first_fit([6, 6, 5, 1], 10, bins=2) == [[0], [1]]


def test_full_sequences_make_room_for_new_ones_up_to_a_bound():
    assert first_fit([3, 10, 10, 7, 4], 10, bins=1) == [[0]]
    assert first_fit([3, 10, 10, 7, 4], 10, bins=2) == [[0, 3], [1], [2], [4]]
    assert first_fit([10] * 50, 10, bins=2) == [[i] for i in range(8)]


def test_best_fit_takes_the_fullest_sequence_with_room():
    # Sequences of 10: 6 leaves 4, 7 leaves 3; 3 goes where it leaves nothing, first-fit would take the first sequence.
    assert best_fit([6, 7, 3], 10, bins=4) == [[0], [1, 2]]
    assert first_fit([6, 7, 3], 10, bins=4) == [[0, 2], [1]]


def test_concat_fills_every_sequence_and_cuts_at_its_end():
    documents = documents_of(7, 4, 5)  # pieces of 4 + 2, 3 and 4 inputs in sequences of 4
    rows = list(PackedSequences(order_of(cut(documents, 4), shuffle=False), seq_len=4, packing="concat", shuffle=False))
    packed = fill(documents, rows, 4)
    assert packed["tokens"].tolist() == [[1, 2, 3, 4], [5, 6, 8, 9], [10, 12, 13, 14], [15, 0, 0, 0]]
    assert packed["labels"].tolist() == [[2, 3, 4, 5], [6, 7, 9, 10], [11, 13, 14, 15], [16, -1, -1, -1]]
    assert packed["segments"].tolist() == [[1, 1, 1, 1], [1, 1, 2, 2], [1, 2, 2, 2], [1, 0, 0, 0]]
    assert packed["positions"].tolist() == [[0, 1, 2, 3], [0, 1, 0, 1], [0, 0, 1, 2], [0, 0, 0, 0]]
    assert next_fit([4, 2, 2, 1], 4, bins=1) == [[0], [1, 2], [3]]


def test_none_gives_each_piece_a_sequence():
    assert one_each([3, 1, 4], 4, bins=1) == [[0], [1], [2]]
    assert one_each([1] * 9, 4, bins=2) == [[i] for i in range(8)]


def test_overlong_documents_are_dropped_and_counted_by_source():
    lengths = [9, 3, 10, 30, 2]
    stops = np.cumsum(lengths)
    documents = Documents(np.arange(54), stops - lengths, stops, [""] * 5, source=np.array([0, 1, 0, 1, 0]))
    pieces = cut(documents, 8, sources=2, overlong="drop")
    assert pieces.sizes.tolist() == [8, 2, 1] and pieces.source.tolist() == [0, 1, 0]
    assert pieces.dropped_documents.tolist() == [1, 1] and pieces.dropped_targets.tolist() == [9, 29]
    assert cut(documents, 8, sources=2).dropped_documents.tolist() == [0, 0]


def test_a_masked_token_is_no_label_and_stays_an_input():
    # A prompt of two tokens after the first one and an answer of three: the first answer token is the first target.
    scored = np.array([0, 0, 0, 1, 1, 1], bool)
    documents = Documents(np.arange(1, 7), np.array([0]), np.array([6]), [""], scored)
    packed = fill(documents, [[(0, 0, 5)]], 6)
    assert packed["tokens"].tolist() == [[1, 2, 3, 4, 5, 0]]
    assert packed["labels"].tolist() == [[IGNORE, IGNORE, 4, 5, 6, IGNORE]]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30).filter(lambda ns: max(ns) > 1),
    length=st.integers(1, 16),
    bins=st.integers(1, 6),
    shards=st.integers(1, 5),
    epochs=st.integers(1, 3),
    shuffle=st.booleans(),
    packing=st.sampled_from(sorted(PACKERS)),
    masked=st.booleans(),
    seed=st.integers(0, 2**40),
)
@settings(max_examples=150, deadline=None)
def test_every_target_once_an_epoch_as_in_the_unpacked_document(
    lengths, length, bins, shards, epochs, shuffle, packing, masked, seed
):
    documents = documents_of(*lengths)
    scored = np.random.default_rng(seed).random(sum(lengths)) < 0.5 if masked else np.ones(sum(lengths), bool)
    documents = replace(documents, scored=scored if masked else None)
    mixture = order_of(cut(documents, length), seed=seed, shuffle=shuffle, epochs=epochs)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    offset = np.concatenate([np.arange(n) for n in lengths])
    seen: Counter[int] = Counter()
    for shard in range(shards):
        rows = list(PackedSequences(mixture, seq_len=length, packing=packing, bins=bins, shuffle=shuffle, shard=shard,
                         shards=shards))  # fmt: skip
        batch = fill(documents, rows, length)
        for tokens, labels, segments, positions in zip(*batch.values(), strict=True):
            live = segments > 0
            assert (labels[~live] == IGNORE).all() and not tokens[~live].any() and not positions[~live].any()
            assert np.array_equal(live, np.arange(length) < live.sum())  # no hole in a sequence
            for segment in range(1, segments.max(initial=0) + 1):
                x = tokens[segments == segment] - 1
                assert len(set(owner[[*x, x[-1] + 1]])) == 1  # one document, inputs and labels
                assert np.array_equal(x, x[0] + np.arange(len(x)))  # its tokens, in order
                assert np.array_equal(positions[segments == segment], np.arange(len(x)))
                want = np.where(scored[x + 1], x + 2, IGNORE)  # labels are the next tokens, where they are scored
                assert np.array_equal(labels[segments == segment], want)
                assert packing == "concat" or offset[x[0]] % length == 0
                seen.update(x.tolist())
    inputs = [at for at in range(sum(lengths) - 1) if owner[at] == owner[at + 1]]
    assert seen == Counter(dict.fromkeys(inputs, epochs))


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=60),
    packing=st.sampled_from(sorted(PACKERS)),
    returned=st.integers(0, 200),
)
@settings(max_examples=80, deadline=None)
def test_a_position_is_three_numbers(sizes, packing, returned):
    mixture = order_of(cut(documents_of(*(size + 1 for size in sizes)), 9), epochs=None)
    one, two = (PackedSequences(mixture, seq_len=9, packing=packing, bins=2) for _ in range(2))
    for _ in range(returned):
        next(one)
    two.seek(one.cursor, one.skip, one.taken)
    assert list(islice(one, 30)) == list(islice(two, 30))


def test_fill_on_log_normal_lengths():
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(669) - 0.5, 1.0, 6000), 2, None).astype(int)
    pieces = cut(documents_of(*lengths), 4096)
    counts = {
        packing: sum(1 for _ in PackedSequences(order_of(pieces), seq_len=4096, packing=packing)) for packing in PACKERS
    }
    fills = {packing: pieces.sizes.sum() / (rows * 4096) for packing, rows in counts.items()}
    assert fills["first_fit"] > 0.985 and fills["best_fit"] > 0.985
    assert counts["concat"] == -(-pieces.sizes.sum() // 4096) and counts["none"] == len(pieces)


def test_fill_does_not_depend_on_the_index_in_a_block():
    # Returned in packing order, the last sequences of a block would be the emptiest of every shard at the same step.
    # Independent shards spread by 1 / sqrt(32) of a sequence's spread; in step 1.4 times that, unshuffled 2 times.
    rng = np.random.default_rng(0)
    mixture = order_of(cut(documents_of(*rng.integers(2, 300, 20_000)), 256), epochs=None)
    shards = [PackedSequences(mixture, seq_len=256, bins=16, shard=v, shards=32) for v in range(32)]
    fills = np.array([[sum(size for *_, size in next(shard)) / 256 for shard in shards] for _ in range(48)])
    assert np.std(fills.mean(axis=1)) < 1.2 * np.std(fills) / np.sqrt(32)


@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=60),
    length=st.integers(4, 40),
    bins=st.integers(1, 8),
    shards=st.integers(1, 4),
    packing=st.sampled_from(sorted(PACKERS)),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=100, deadline=None)
def test_epochs_of_a_shard_share_at_most_one_row(lengths, length, bins, shards, packing, seed):
    pieces = cut(documents_of(*lengths), length)
    mixture = order_of(pieces, seed=seed, epochs=None)
    for shard in range(shards):
        draws = Draws(mixture, shard, shards)
        stream = PackedSequences(mixture, seq_len=length, packing=packing, bins=bins, shard=shard, shards=shards)
        # Inputs of an epoch of this shard: a shard of fewer pieces than shards reads one of some epochs.
        drawn, begins = draws.read(0, 4 * len(pieces) // shards + 8)
        borders = np.flatnonzero(begins)[:3].tolist()
        seen, want, rows = Counter(), Counter(), 0
        for lo, hi in pairwise([0, *borders]):
            epoch = Counter(
                at for p in drawn[lo:hi] for at in range(pieces.starts[p], pieces.starts[p] + pieces.sizes[p])
            )
            want += epoch
            while want - seen:  # up to the row that completes the epoch
                seen.update(at for _, start, size in next(stream) for at in range(start, start + size))
                rows += 1
            # What was read beyond the epoch is in that last row.
            assert (seen - want).total() < length, (shard, lo, hi)


def test_a_small_corpus_is_read_once_an_epoch():
    # 3,000 documents on 64 shards: 7.6 sequences a shard; blocks over several epochs left 31% unread after one.
    pieces = cut(documents_of(*np.random.default_rng(0).integers(30, 300, 3000)), 1024)
    mixture = order_of(pieces, epochs=None)
    shards = [PackedSequences(mixture, seq_len=1024, shard=v, shards=64) for v in range(64)]
    rows = [next(shard) for _ in range(8) for shard in shards]
    times = Counter(start for row in rows for _, start, _ in row)
    read = sum(size for row in rows for *_, size in row)
    assert 1 < read / pieces.sizes.sum() < 1.02
    assert len(times) > 0.98 * len(pieces) and max(times.values()) == 2
    assert sum(n == 2 for n in times.values()) < 0.04 * len(pieces)
    assert read / (len(rows) * 1024) > 0.96


def test_a_small_source_does_not_cut_the_blocks_of_a_large_one():
    lengths = [*np.random.default_rng(0).integers(30, 300, 4000), *[60] * 8]
    documents = replace(documents_of(*lengths), source=np.array([0] * 4000 + [1] * 8))
    mixture = Mixture(cut(documents, 1024, sources=2), [0.95, 0.05], [None, None], seed=0, shuffle=True)
    fills = []
    for epoch_borders in (False, True):
        shards = [
            PackedSequences(mixture, seq_len=1024, shard=v, shards=8, epoch_borders=epoch_borders) for v in range(8)
        ]
        fills.append(np.mean([sum(size for *_, size in next(shard)) / 1024 for _ in range(200) for shard in shards]))
    assert fills[1] > fills[0] - 0.01, fills
