"""Global batches: the same for any number of processes, exactly resumed on any other, whatever is prefetched."""

import hashlib
import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.config import ConfigError, DataConfig, validate
from jaxtrain.data import (
    FIELDS,
    IGNORE,
    Batches,
    Documents,
    Phase,
    Stream,
    held_out_batches,
    resolve_virtual_shards,
    shards_of_rows,
    tokens_read,
)
from jaxtrain.data.packing import PACKERS

SHARDS, BATCH, LENGTH = 8, 16, 12


def documents_of(lengths: list[int]) -> Documents:
    stops = np.cumsum(lengths, dtype=np.int64)
    tokens = np.arange(1, stops[-1] + 1, dtype=np.uint32)
    return Documents(tokens, stops - np.array(lengths), stops, tuple(f"d{i}" for i in range(len(lengths))))


def streams(documents: Documents, processes: int, **more) -> list[Stream]:
    each = SHARDS // processes
    options = {"phases": [Phase(0, LENGTH, BATCH)], "virtual_shards": SHARDS, "packing_bins": 4} | more
    return [Stream(documents, shards=range(p * each, (p + 1) * each), **options) for p in range(processes)]


def global_batch(parts: list[Stream]) -> dict[str, np.ndarray]:
    batches = [next(part) for part in parts]
    return {field: np.concatenate([batch[field] for batch in batches]) for field in FIELDS}


def saved(parts: list[Stream]) -> dict:
    return json.loads(json.dumps({name: position for part in parts for name, position in part.get_state().items()}))


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return all(a[field].dtype == b[field].dtype and np.array_equal(a[field], b[field]) for field in FIELDS)


def mixed(lengths: list[int], seed: int = 0) -> Documents:
    """Documents of three sources, some tokens not scored."""
    rng = np.random.default_rng(seed)
    documents = documents_of(lengths)
    scored = rng.random(len(documents.tokens)) < 0.7
    return replace(documents, scored=scored, source=np.arange(len(lengths), dtype=np.int32) % 3)


MIXED = {"weights": [0.6, 0.3, 0.1], "epochs": [None, 2, None]}
PHASES = [Phase(0, LENGTH, BATCH), Phase(3, 2 * LENGTH, SHARDS), Phase(5, 7, 3 * SHARDS)]


@given(
    lengths=st.lists(st.integers(2, 60), min_size=3, max_size=40),
    legs=st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(0, 4)), min_size=1, max_size=5),
    seed=st.integers(0, 2**33),
    shuffle=st.booleans(),
    prefetch=st.integers(0, 3),
    packing=st.sampled_from(sorted(PACKERS)),
    phases=st.sampled_from([PHASES[:1], PHASES[:2], PHASES]),
)
@settings(max_examples=50, deadline=None)
def test_batches_do_not_depend_on_processes_or_restarts(lengths, legs, seed, shuffle, prefetch, packing, phases):
    documents = mixed(lengths, seed)
    options = {"seed": seed, "shuffle": shuffle, "packing": packing, "phases": phases, **MIXED}
    (unbroken,) = streams(documents, 1, **options)
    state = None
    for processes, steps in legs:  # each leg is a restart on another number of processes
        parts = streams(documents, processes, prefetch=prefetch, **options)
        for part in parts:
            if state is not None:
                part.set_state(state)
        for _ in range(steps):
            assert same(global_batch(parts), next(unbroken))
        state = saved(parts)
        assert state == saved([unbroken])
        for part in parts:
            part.close()
    unbroken.close()


def digests(parts: list[Stream], steps: int) -> list[str]:
    batches = (global_batch(parts) for _ in range(steps))
    return [hashlib.blake2b(b"".join(batch[field].tobytes() for field in FIELDS)).hexdigest() for batch in batches]


@pytest.mark.parametrize("packing", sorted(PACKERS))
def test_two_hundred_steps_of_three_sources_on_1_2_4_8_processes_and_over_five_changes(packing):
    rng = np.random.default_rng(0)
    documents = mixed(np.clip(rng.lognormal(3, 1, 600), 2, 400).astype(int).tolist())
    options = {"seed": 5, "packing": packing, **MIXED}
    one, two, four, eight = (digests(streams(documents, processes, **options), 200) for processes in (1, 2, 4, 8))
    assert len(set(one)) == 200 and one == two == four == eight
    changing: list[str] = []
    state = None
    for processes, steps in zip((1, 8, 2, 4, 1, 8), (33, 1, 50, 27, 40, 49), strict=True):
        parts = streams(documents, processes, **options)
        for part in parts:
            if state is not None:
                part.set_state(state)
        changing += digests(parts, steps)
        state = saved(parts)
    assert changing == one


@given(
    lengths=st.lists(st.integers(2, 60), min_size=1, max_size=40),
    packing=st.sampled_from(sorted(PACKERS)),
    borders=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 30), st.integers(1, 3)), min_size=1, max_size=4),
    shards=st.integers(1, 4),
    resume=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_every_target_once_an_epoch_over_changes_of_length_and_batch(lengths, packing, borders, shards, resume):
    documents = documents_of(lengths)
    starts = np.cumsum([0] + [steps for steps, _, _ in borders[:-1]]).tolist()
    phases = [Phase(start, length, rows * shards) for start, (_, length, rows) in zip(starts, borders, strict=True)]
    options = {"phases": phases, "virtual_shards": shards, "packing_bins": 2, "packing": packing, "epochs": [2]}
    stream = Stream(documents, **options)
    seen: Counter[int] = Counter()
    returned, state = 0, stream.get_state()
    try:
        while True:
            batch = next(stream)
            live = batch["segments"] > 0
            assert np.array_equal(batch["labels"][live], batch["tokens"][live] + 1)
            assert batch["tokens"].shape == (phases[-1].global_batch, phases[-1].seq_len) or returned < starts[-1]
            seen.update(batch["tokens"][live].tolist())
            returned += 1
            assert tokens_read(stream.get_state()) == [seen.total()]
            state = json.loads(json.dumps(stream.get_state()))
            if resume:
                stream.close()
                stream = Stream(documents, **options)
                stream.set_state(state)
    except ConfigError as error:
        assert f"used up after {returned} steps" in str(error)
    # A batch that cannot be filled is not returned: what the shards still hold completes the two epochs.
    stream.set_state(state)
    for shard in stream._shards.values():
        for spans in shard.sequences:
            seen.update(token for _, start, size in spans for token in range(start + 1, start + size + 1))
    stream.close()
    last = set((documents.stops - 1).tolist())
    assert seen == {token: 2 for token in range(1, sum(lengths) + 1) if token - 1 not in last}


@given(
    old=st.lists(st.integers(2, 60), min_size=3, max_size=40),
    new=st.lists(st.integers(2, 60), min_size=2, max_size=40),
    packing=st.sampled_from(sorted(PACKERS)),
    steps=st.integers(0, 9),
)
@settings(max_examples=30, deadline=None)
def test_a_position_survives_a_change_of_the_corpus(old, new, packing, steps):
    options = {"packing": packing, "phases": PHASES}
    (stream,) = streams(mixed(old), 1, **options, **MIXED)
    for _ in range(steps):
        next(stream)
    state = saved([stream])
    stream.close()
    changed = replace(documents_of(new), source=np.arange(len(new), dtype=np.int32) % 2)
    (stream,) = streams(changed, 1, **options, weights=[1.0, 2.0], epochs=[None, None])
    stream.set_state(state)
    for _ in range(5):
        batch = next(stream)
        live = batch["segments"] > 0
        assert np.array_equal(batch["labels"][live], batch["tokens"][live] + 1)
    stream.close()


def test_a_stream_goes_back_in_mid_pack():
    (stream,) = streams(documents_of([5, 30, 7, 9, 22] * 20), 1)
    for _ in range(3):
        next(stream)
    state = stream.get_state()
    assert any(position["row"] for position in state.values())
    ahead = [next(stream) for _ in range(9)]
    stream.set_state(state)
    assert all(same(next(stream), batch) for batch in ahead)
    stream.close()


def test_a_position_of_an_older_version_goes_on_with_its_blocks():
    # Version 0.1 let epochs of a small corpus overlap, and wrote no epoch_borders: its blocks are packed as they were.
    documents, options = documents_of([7] * 30), {"phases": PHASES[:2]}
    (stream,) = streams(documents, 1, **options)
    assert not stream.epochs_overlap
    start = stream.get_state()
    new = [next(stream) for _ in range(9)]
    stream.set_state({shard: {k: v for k, v in at.items() if k != "epoch_borders"} for shard, at in start.items()})
    old = [next(stream) for _ in range(4)]
    assert stream.epochs_overlap and not all(map(same, new, old))
    middle = stream.get_state()
    old += [next(stream) for _ in range(5)]
    (again,) = streams(documents, 1, **options)
    again.set_state(middle)
    assert again.epochs_overlap and all(same(next(again), batch) for batch in old[4:])


def test_batch_shape_and_small_state():
    parts = streams(documents_of([50] * 100), 2)
    batch = next(parts[1])
    assert all(batch[field].shape == (BATCH // 2, LENGTH) and batch[field].dtype == np.int32 for field in FIELDS)
    for _ in range(200):
        next(parts[1])
    assert len(json.dumps(parts[1].get_state())) < 112 * len(parts[1].shards)


def test_processes_read_different_samples():
    first, second = streams(documents_of([LENGTH + 1] * 400), 2)
    seen = [{int(t) for _ in range(20) for t in next(part)["tokens"][:, 0]} for part in (first, second)]
    assert len(seen[0]) == len(seen[1]) == 20 * BATCH // 2 and not seen[0] & seen[1]


def test_one_short_document_feeds_eight_shards():
    (stream,) = streams(documents_of([3]), 1)
    batch = next(stream)
    assert (batch["labels"] != IGNORE).any(axis=1).all()


def test_unshuffled_order_is_the_corpus_order():
    stream = Stream(documents_of([LENGTH + 1] * 10), phases=[Phase(0, LENGTH, 1)], virtual_shards=1, packing_bins=1,
                    shuffle=False)  # fmt: skip
    firsts = [int(next(stream)["tokens"][0, 0]) for _ in range(12)]
    assert firsts == [1 + (LENGTH + 1) * (i % 10) for i in range(12)]


def test_documents_without_a_target_are_an_error():
    with pytest.raises(ConfigError, match="3 documents to train on and none has a token to predict"):
        streams(documents_of([1, 1, 1]), 1)


def test_a_state_of_another_number_of_shards_is_an_error():
    (stream,) = streams(documents_of([30] * 9), 1)
    state = {name: position for name, position in stream.get_state().items() if name != "5"}
    with pytest.raises(ConfigError, match=r"lacks shard 5 .it has 7 shards, data.virtual_shards is 8"):
        stream.set_state(state)


@pytest.mark.parametrize(("batch", "shards"), [(1, 1), (16, 16), (61, 61), (67, 1), (96, 48), (128, 64), (1000, 50)])
def test_default_virtual_shards(batch, shards):
    assert resolve_virtual_shards(DataConfig(), batch) == shards


def test_configured_virtual_shards():
    assert resolve_virtual_shards(DataConfig(virtual_shards=4), 16) == 4
    with pytest.raises(
        ConfigError, match=r"data.virtual_shards 3 does not divide train.global_batch 16 .16 / 3 = 5.333"
    ):
        resolve_virtual_shards(DataConfig(virtual_shards=3), 16)


@pytest.mark.parametrize(
    ("lo", "hi", "owned"), [(0, 16, range(8)), (4, 8, range(2, 4)), (3, 5, range(1, 3)), (15, 16, range(7, 8))]
)
def test_shards_that_hold_rows(lo, hi, owned):
    assert shards_of_rows(lo, hi, 16, 8) == owned


def test_held_out_pass_scores_every_target_once_and_pads():
    lengths = [5, 40, 13, 2, 1, 29, 8] * 3
    documents = documents_of(lengths)
    batches = held_out_batches(documents, seq_len=LENGTH, global_batch=BATCH, batches=50)
    assert all(batch[field].shape == (BATCH, LENGTH) for batch in batches for field in FIELDS)
    labels = np.concatenate([batch["labels"].ravel() for batch in batches])
    scored = np.sort(labels[labels != IGNORE])
    first = set((documents.starts + 1).tolist())
    assert scored.tolist() == [t for t in range(1, sum(lengths) + 1) if t not in first]
    last = batches[-1]
    empty = (last["labels"] == IGNORE).all(axis=1)
    assert empty.any() and not empty.all()
    assert not any(last[field][empty].any() for field in ("tokens", "segments", "positions"))


def test_held_out_pass_is_fixed_and_bounded():
    documents = documents_of([30] * 200)
    one, two = (held_out_batches(documents, seq_len=LENGTH, global_batch=BATCH, batches=3) for _ in range(2))
    assert len(one) == 3 and all(same(a, b) for a, b in zip(one, two, strict=True))
    assert held_out_batches(documents.select(np.array([], int)), seq_len=8, global_batch=4, batches=2) == []


def test_a_failure_in_the_thread_is_raised_to_the_reader():
    documents = documents_of([LENGTH + 1] * 10)
    beyond = Documents(documents.tokens[:5], documents.starts, documents.stops, documents.names)
    (stream,) = streams(beyond, 1)
    with pytest.raises(ValueError, match="broadcast"):
        next(stream)
    stream.close()


def test_grain_transformations_compose_and_keep_the_exact_state() -> None:
    config = validate({
        "model": {"max_seq_len": LENGTH}, "train": {"global_batch": BATCH},
        "data": {"seq_len": LENGTH, "virtual_shards": SHARDS, "packing_bins": 4},
    })  # fmt: skip
    dataset = Batches(documents_of([5, 9, 30, 2, 14, 7] * 20), config).map(lambda batch: batch["tokens"].sum())
    first = iter(dataset)
    ahead = [next(first) for _ in range(7)]
    state = json.loads(json.dumps(first.get_state()))
    expected = [next(first) for _ in range(5)]
    again = iter(dataset)
    again.set_state(state)
    assert [next(again) for _ in range(5)] == expected
    assert len({*map(int, ahead), *map(int, expected)}) > 6
