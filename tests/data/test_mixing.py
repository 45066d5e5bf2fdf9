"""Order, epochs and shares of several sources, against counts of every draw."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.config import ConfigError
from jaxtrain.data import Documents
from jaxtrain.data.mixing import Draws, Mixture
from jaxtrain.data.pieces import cut


def mixture_of(
    sizes: list[list[int]], weights: list[float], epochs: list[float | None], seed: int = 0, shuffle: bool = True
) -> Mixture:
    """Sources of documents with so many targets each."""
    lengths = np.array([size + 1 for source in sizes for size in source])
    stops = np.cumsum(lengths)
    source = np.repeat(np.arange(len(sizes), dtype=np.int32), [len(each) for each in sizes])
    documents = Documents(np.zeros(stops[-1], np.uint16), stops - lengths, stops, [""] * len(lengths), None, source)
    pieces = cut(documents, max(lengths), sources=len(sizes))
    return Mixture(pieces, weights, epochs, seed=seed, shuffle=shuffle)


SOURCES = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=12), min_size=1, max_size=4)


@given(data=st.data(), sizes=SOURCES, shards=st.integers(1, 8), seed=st.integers(0, 2**40), shuffle=st.booleans())
@settings(max_examples=80, deadline=None)
def test_shards_together_read_each_source_epoch_by_epoch(data, sizes, shards, seed, shuffle):
    count = len(sizes)
    weights = data.draw(st.lists(st.floats(0.01, 100), min_size=count, max_size=count))
    epochs = data.draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))
    mixture = mixture_of(sizes, weights, list(epochs), seed, shuffle)
    read = [Draws(mixture, shard, shards).read(0, 10_000)[0] for shard in range(shards)]
    source = mixture.pieces.source
    seen = Counter(np.concatenate(read).tolist())
    assert seen == Counter({piece: epochs[source[piece]] for piece in range(len(source))})
    for each, members in enumerate(sizes):
        runs = [pieces[source[pieces] == each] for pieces in read]
        merged = [int(runs[k % shards][k // shards]) for k in range(sum(map(len, runs)))]  # the source's own run
        for lo in range(0, len(merged), len(members)):
            assert len(set(merged[lo : lo + len(members)])) == len(members)


@given(data=st.data(), sizes=SOURCES, shards=st.integers(1, 5))
@settings(max_examples=80, deadline=None)
def test_going_to_a_draw_is_reading_up_to_it(data, sizes, shards):
    count = len(sizes)
    weights = data.draw(st.lists(st.sampled_from([0.5, 1.0, 1.0, 3.0, 1e4]), min_size=count, max_size=count))
    epochs = data.draw(st.lists(st.sampled_from([None, 0.5, 2]), min_size=count, max_size=count))
    mixture = mixture_of(sizes, weights, epochs)
    shard = data.draw(st.integers(0, shards - 1))
    whole = Draws(mixture, shard, shards).read(0, 300)[0]
    for lo in data.draw(st.lists(st.integers(0, 320), min_size=1, max_size=6)):
        assert Draws(mixture, shard, shards).read(lo, 20)[0].tolist() == whole[lo : lo + 20].tolist() or lo + 20 > 300
    steps = Draws(mixture, shard, shards)
    pieces = np.concatenate([steps.read(lo, 7)[0] for lo in range(0, 294, 7)])
    assert pieces.tolist() == whole[:294].tolist()


def test_weights_are_shares_of_tokens_in_every_shard_at_every_moment():
    rng = np.random.default_rng(0)
    sizes = [rng.integers(1, 40, 900).tolist(), rng.integers(400, 500, 300).tolist(), [50] * 20]
    weights = [0.5, 0.3, 0.2]
    mixture = mixture_of(sizes, weights, [None] * 3)
    table = mixture.pieces
    for shard in (0, 5, 7):
        pieces = Draws(mixture, shard, 8).read(0, 6000)[0]
        for lo in range(0, 6000, 2000):
            part = pieces[lo : lo + 2000]
            shares = np.bincount(table.source[part], table.sizes[part]) / table.sizes[part].sum()
            np.testing.assert_allclose(shares, weights, atol=0.02)


def test_a_source_that_ends_leaves_its_time_to_the_others():
    mixture = mixture_of([[10] * 8, [10] * 50, [10] * 50], [2.0, 1.0, 1.0], [2, None, None], shuffle=False)
    pieces = Draws(mixture).read(0, 200)[0]
    source = mixture.pieces.source[pieces]
    assert (source == 0).sum() == 16 and set(np.flatnonzero(source == 0).tolist()) <= set(range(33))
    assert abs((source[40:] == 1).sum() - (source[40:] == 2).sum()) <= 1


def test_a_part_of_an_epoch_is_a_part_of_the_documents():
    mixture = mixture_of([[5] * 40, [5] * 10], [1.0, 1.0], [0.25, 1.5])
    pieces = Draws(mixture).read(0, 1000)[0]
    assert Counter(mixture.pieces.source[pieces].tolist()) == {0: 10, 1: 15}


def test_each_epoch_source_and_seed_has_its_own_order():
    def orders(seed: int) -> set[tuple[int, ...]]:
        mixture = mixture_of([[1] * 40, [1] * 40], [1.0, 1.0], [None, None], seed)
        return {
            tuple((mixture.piece(source, np.arange(epoch * 40, epoch * 40 + 40)) % 40).tolist())
            for source in (0, 1)
            for epoch in range(3)
        }

    every = [orders(seed) for seed in (0, 1, 2)]
    assert all(len(each) == 6 for each in every)
    assert not any(a & b for a, b in pairwise([*every, every[0]]))


def test_a_source_without_targets_is_named():
    documents = Documents(
        np.zeros(9), np.array([0, 5, 6]), np.array([5, 6, 9]), [""] * 3, None, np.array([0, 1, 0], np.int32)
    )
    with pytest.raises(ConfigError, match=r"data.sources\[1\]: 1 documents to train on and none has a token to pre"):
        Mixture(cut(documents, 8, sources=2), [1.0, 1.0], [None, None], seed=0, shuffle=True)
    with pytest.raises(
        ConfigError, match=r"sources\[0\]: 2 documents .* .2 are longer than data.seq_len .* data.overlong is drop"
    ):
        Mixture(cut(documents, 1, sources=2, overlong="drop"), [1.0, 1.0], [None, None], seed=0, shuffle=True)
