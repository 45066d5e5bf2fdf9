"""Splits of layers: against all possible ones, explicit lists, layer slots of several kinds."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.config import ConfigError, PipelineConfig, load_config
from jaxtrain.nn.model import build
from jaxtrain.pipeline.split import Loop, loops_of, split_layers, split_stages


def all_splits(n: int, runs: int) -> list[tuple[int, ...]]:
    return [tuple(b - a for a, b in pairwise((0, *cut, n))) for cut in combinations(range(1, n), runs - 1)]


@settings(max_examples=80, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 2))
def test_auto_is_the_best_of_all_splits(data: st.DataObject, stages: int, chunks: int) -> None:
    runs = stages * chunks
    n = data.draw(st.integers(runs, 12))
    first, head = data.draw(st.floats(0, 5)), data.draw(st.floats(0, 5))
    split = split_layers(["layers"] * n, stages, chunks, "auto", None, (first, head))
    fewest = -(-n // runs)

    def slowest(counts: tuple[int, ...]) -> float:
        ends = [first, *[0.0] * (runs - 2), head] if runs > 1 else [first + head]
        return max(c + e for c, e in zip(counts, ends, strict=True))

    assert max(split.counts) == fewest
    best = min(slowest(counts) for counts in all_splits(n, runs) if max(counts) == fewest)
    assert slowest(split.counts) == pytest.approx(best)


def test_head_and_embedding_take_layers_from_the_ends() -> None:
    def counts(end_costs: tuple[float, float]) -> tuple[int, ...]:
        return split_layers(["layers"] * 30, 4, 1, "auto", None, end_costs).counts

    assert counts((0, 0)) == (8, 8, 7, 7)
    assert counts((0, 2.4)) == (8, 8, 8, 6)
    assert counts((2.4, 0)) == (6, 8, 8, 8)
    assert counts((1, 1)) == (7, 8, 8, 7)


def test_configuration_b_has_eight_layers_a_stage() -> None:
    """Requirements section 5: layers 1-8, 9-16, 17-24, 25-32; the head costs 2.4 layers, a ninth slot more."""
    model = build(load_config("models/llama3_8b").model)
    split = split_stages(model, PipelineConfig(), 4, 1)
    assert split.runs == [range(8), range(8, 16), range(16, 24), range(24, 32)]
    assert split_stages(model, PipelineConfig(stages=[9, 8, 8, 7]), 4, 1).counts == (9, 8, 8, 7)


def test_chunks_alternate_between_stages() -> None:
    split = split_layers(["layers"] * 8, 2, 2)
    np.testing.assert_array_equal(split.layers, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]])


@settings(max_examples=60, deadline=None)
@given(st.data(), st.lists(st.sampled_from(["layers", "dense_layers"]), min_size=4, max_size=14))
def test_slots_hold_every_layer_once_in_order(data: st.DataObject, kinds: list[str]) -> None:
    stages, chunks = data.draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (2, 2), (1, 2)]))
    split = split_layers(kinds, stages, chunks, "auto", {"layers": 3.0, "dense_layers": 1.0})
    order = split.layers.transpose(1, 0, 2).ravel()
    assert [layer for layer in order if layer >= 0] == list(range(len(kinds)))
    for slot, kind in enumerate(split.pattern):
        assert {kinds[layer] for layer in split.layers[:, :, slot].ravel() if layer >= 0} <= {kind}


def test_dense_layers_first_then_mixtures() -> None:
    """DeepSeek-V3's 3 dense and 58 mixture layers: slots of both kinds on every stage, the dense ones first."""
    kinds = ["dense_layers"] * 3 + ["layers"] * 58
    split = split_layers(kinds, 4, 1, "auto", {"layers": 2.0, "dense_layers": 1.0})
    assert split.pattern == ("dense_layers",) * 3 + ("layers",) * 15
    assert sum(split.counts) == 61
    alternating = split_layers(["dense_layers", "layers"] * 6, 4, 1)
    assert len(alternating.pattern) == 4


@pytest.mark.parametrize(
    ("stages", "error"),
    [
        ([3, 3, 2], r"pipeline.stages \[3, 3, 2\] are 3 numbers, but mesh.pipe 2 x pipeline.chunks 2 = 4 runs"),
        ([3, 3, 2, 1], r"pipeline.stages \[3, 3, 2, 1\] sum to 9, but model.n_layers is 8"),
    ],
)
def test_a_list_that_does_not_fit_is_refused(stages: list[int], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        split_layers(["layers"] * 8, 2, 2, stages)


def test_more_runs_than_layers_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"mesh.pipe 4 x pipeline.chunks 2 = 8 runs of layers, but model.n_layers is 6"
    ):
        split_layers(["layers"] * 6, 4, 2)


def unrolled(loops: tuple[Loop, ...]) -> list[tuple[str, int]]:
    """Kind and slot of each layer, in the order of the loops."""
    found = []
    for loop in loops:
        for n in range(loop.iterations):
            for segment in loop.segments:
                slot = {kind: first + n * per_iteration for kind, (first, per_iteration) in segment.slots.items()}
                for kind in segment.stacks:
                    found.append((kind, slot[kind]))
                    slot[kind] += 1
    return found


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=14), st.sampled_from([1, 2, 3, 4]))
def test_loops_run_the_pattern_in_order(pattern: list[str], every: int) -> None:
    try:
        loops = loops_of(pattern, every)
    except ConfigError:
        assert every > 1
        return
    want = [(kind, pattern[:i].count(kind)) for i, kind in enumerate(pattern)]
    assert unrolled(loops) == want
    assert all(len(segment.stacks) == every for loop in loops for segment in loop.segments)


def test_repetitions_are_loops() -> None:
    assert [(len(loop.segments), loop.iterations) for loop in loops_of(["d"] * 3 + ["m"] * 15, 1)] == [(1, 3), (1, 15)]
    assert [(len(loop.segments), loop.iterations) for loop in loops_of(["d", "m"] * 6 + ["d"], 1)] == [(2, 6), (1, 1)]
    assert [(len(loop.segments), loop.iterations) for loop in loops_of(["d", "m"] * 6, 4)] == [(1, 3)]
    with pytest.raises(ConfigError, match=r"remat.every 4 does not divide 3 x d"):
        loops_of(["d"] * 3 + ["m"] * 16, 4)


def test_dense_layers_come_first() -> None:
    """DeepSeek-V3 on four stages: three dense layers, then mixtures; a mixture costs its active experts."""
    model = build(load_config("models/deepseek_v3").model)
    split = split_stages(model, PipelineConfig(), 4, 1)
    assert split.pattern == ("dense_layers",) * 3 + ("layers",) * 15
    assert split.counts[0] > split.counts[-1]
    assert split.layers[0, 0, :3].tolist() == [0, 1, 2] and (split.layers[1:, 0, :3] == -1).all()
    np.testing.assert_array_equal(np.sort(split.layers[split.layers >= 0]), np.arange(61))
