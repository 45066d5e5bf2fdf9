"""Cutting, first-fit and filling, against hand-laid rows and a count of every target."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.data import IGNORE, Documents, fill_rate
from jaxtrain.data.packing import Rows, cut, fill, first_fit, order_of


def documents_of(*lengths: int) -> Documents:
    """Documents in which every token is another number, so that a token says where it came from."""
    stops = np.cumsum(lengths, dtype=np.int64)
    tokens = np.arange(1, stops[-1] + 1, dtype=np.uint32)
    return Documents(tokens, stops - np.array(lengths), stops, tuple(f"d{i}" for i in range(len(lengths))))


def test_worked_example_of_the_requirements():
    # Length 8, A gives 3 inputs and B gives 4: padded 7 of 16, packed 7 of 8.
    pieces = cut(documents_of(4, 5), 8)
    assert fill_rate(fill(pieces, [[0], [1]], 8)) == 0.4375
    rows = first_fit(pieces.sizes, 8, bins=2)
    assert rows == [[0, 1]]
    packed = fill(pieces, rows, 8)
    assert fill_rate(packed) == 0.875
    assert packed["tokens"].tolist() == [[1, 2, 3, 5, 6, 7, 8, 0]]
    assert packed["labels"].tolist() == [[2, 3, 4, 6, 7, 8, 9, IGNORE]]
    assert packed["segments"].tolist() == [[1, 1, 1, 2, 2, 2, 2, 0]]
    assert packed["positions"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0]]
    assert all(column.dtype == np.int32 for column in packed.values())


def test_a_long_document_keeps_the_target_at_each_cut():
    pieces = cut(documents_of(10), 4)
    assert pieces.sizes.tolist() == [4, 4, 1]
    packed = fill(pieces, [[0], [1], [2]], 4)
    assert packed["labels"].tolist() == [[2, 3, 4, 5], [6, 7, 8, 9], [10, IGNORE, IGNORE, IGNORE]]
    assert packed["positions"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 0, 0, 0]]


def test_first_fit_lays_the_textbook_example():
    # Bins of 10, items 4 8 1 4 2 1: first-fit needs two bins, {4 1 4 1} and {8 2}.
    assert first_fit([4, 8, 1, 4, 2, 1], 10, bins=4) == [[0, 2, 3, 5], [1, 4]]


def test_first_fit_stops_at_the_first_that_fits_nowhere():
    assert first_fit([6, 6, 5, 1], 10, bins=2) == [[0], [1]]


def test_full_rows_make_place_for_new_ones_up_to_a_bound():
    assert first_fit([3, 10, 10, 7, 4], 10, bins=1) == [[0]]
    assert first_fit([3, 10, 10, 7, 4], 10, bins=2) == [[0, 3], [1], [2], [4]]
    assert first_fit([10] * 50, 10, bins=2) == [[i] for i in range(8)]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30).filter(lambda ns: max(ns) > 1),
    length=st.integers(1, 16),
    bins=st.integers(1, 6),
    shards=st.integers(1, 5),
    epochs=st.integers(1, 3),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**40),
)
@settings(max_examples=60, deadline=None)
def test_every_target_once_an_epoch_as_in_the_unpacked_document(lengths, length, bins, shards, epochs, shuffle, seed):
    documents = documents_of(*lengths)
    pieces = cut(documents, length)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    offset = np.concatenate([np.arange(n) for n in lengths])
    seen: Counter[tuple[int, int]] = Counter()
    for shard in range(shards):
        rows = list(
            Rows(
                pieces, length=length, bins=bins, seed=seed, shuffle=shuffle, shard=shard, shards=shards, epochs=epochs
            )
        )
        batch = fill(pieces, rows, length)
        for tokens, labels, segments, positions in zip(*batch.values(), strict=True):
            live = segments > 0
            assert (labels[~live] == IGNORE).all() and not tokens[~live].any() and not positions[~live].any()
            assert np.array_equal(live, np.arange(length) < live.sum())  # no hole in a row
            for segment in range(1, segments.max(initial=0) + 1):
                inside = segments == segment
                x, y = tokens[inside] - 1, labels[inside] - 1
                assert len(set(owner[[*x, *y]])) == 1  # one document, inputs and labels
                assert np.array_equal(offset[x] - offset[x[0]], np.arange(len(x)))  # its tokens, in order
                assert np.array_equal(offset[y], offset[x] + 1)  # labels are the next tokens
                assert offset[x[0]] % length == 0 and np.array_equal(positions[inside], offset[x] % length)
                seen.update(zip(x.tolist(), y.tolist(), strict=True))
    targets = [(int(at), int(at) + 1) for at in range(sum(lengths) - 1) if owner[at] == owner[at + 1]]
    assert seen == Counter(dict.fromkeys(targets, epochs))


@given(pieces=st.integers(1, 50), shards=st.integers(1, 8), seed=st.integers(0, 2**40))
@settings(max_examples=50, deadline=None)
def test_shards_interleave_to_one_new_permutation_each_epoch(pieces, shards, seed):
    orders = [order_of(pieces, seed=seed, shuffle=True, shard=v, shards=shards, epochs=None) for v in range(shards)]
    run = [int(orders[at % shards][at // shards]) for at in range(4 * pieces)]
    epochs = [run[lo : lo + pieces] for lo in range(0, len(run), pieces)]
    assert all(sorted(epoch) == list(range(pieces)) for epoch in epochs)
    if pieces >= 20:
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


def test_neighbouring_seeds_share_no_epoch():
    def epochs(seed: int) -> set[tuple[int, ...]]:
        order = order_of(40, seed=seed, shuffle=True, shard=0, shards=1, epochs=None)
        return {tuple(int(order[e * 40 + i]) for i in range(40)) for e in range(4)}

    assert not epochs(0) & epochs(1)


def test_fill_on_log_normal_lengths():
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(669) - 0.5, 1.0, 6000), 2, None).astype(int)
    pieces = cut(documents_of(*lengths), 4096)
    rows = list(Rows(pieces, length=4096, bins=32, seed=0, shuffle=True, epochs=1))
    assert pieces.sizes.sum() / (len(rows) * 4096) > 0.985


def test_fullness_does_not_follow_the_place_in_a_plan():
    # Given out in order, the last rows of a plan would be the emptiest of every shard at the same update.
    # Independent shards spread by 1 / sqrt(32) of a row's spread; in step 1.4 times that, unshuffled 2 times.
    rng = np.random.default_rng(0)
    pieces = cut(documents_of(*rng.integers(2, 300, 20_000)), 256)
    shards = [Rows(pieces, length=256, bins=16, seed=0, shuffle=True, shard=v, shards=32) for v in range(32)]
    fills = np.array([[pieces.sizes[next(shard)].sum() / 256 for shard in shards] for _ in range(48)])
    assert np.std(fills.mean(axis=1)) < 1.2 * np.std(fills) / np.sqrt(32)
