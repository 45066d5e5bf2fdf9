"""Which layers a stage holds: balanced by cost or as told, with places that stay empty where runs differ.

All stages run one program, so every chunk has the same places in the same order of kinds, and a tick takes as long as
all places together, empty or not. The fewest places come first, therefore; what is free after that is balanced by the
time of the slowest run, with embedding and head counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Literal

import jax
import numpy as np
from numpy.typing import NDArray

from jaxtrain.config import ConfigError, PipelineConfig
from jaxtrain.mesh.param import Param
from jaxtrain.nn.model import Model


@dataclass(frozen=True, eq=False)
class StageSplit:
    """Layers cut into P v runs, run q = c P + s being chunk c of stage s.

    counts: layers of each run; pattern: kind (stack) of each of a chunk's J places; places: int32 [P, v, J], the
    layer's number or -1.
    """

    counts: tuple[int, ...]
    pattern: tuple[str, ...]
    places: NDArray[np.int32]

    @property
    def runs(self) -> list[range]:
        """Layers of each run."""
        ends = np.cumsum((0, *self.counts)).tolist()
        return [range(a, b) for a, b in pairwise(ends)]


@dataclass(frozen=True)
class Segment:
    """Layers between two kept inputs: the stack of each, and for each stack the first place and the places a turn."""

    stacks: tuple[str, ...]
    at: Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Loop:
    """Segments of one turn of a loop over a chunk's places, and the turns."""

    segments: tuple[Segment, ...]
    turns: int


def split_stages(model: Model, pipeline: PipelineConfig, stages: int, chunks: int) -> StageSplit:
    """The split of a model's layers.

    A matrix costs its elements a token (an expert's by the share of tokens that choose it), so that the sizes of
    parameters are costs; a lookup costs nothing. Raises ConfigError where pipeline.stages does not fit the model.
    """
    moe = model.config.moe
    chosen = moe.top_k / moe.experts if moe.experts else 1.0

    def cost(stack: str) -> float:
        leaves: list[Param] = jax.tree.leaves(model.params[stack])
        return sum(leaf.size * (chosen if "experts" in leaf.names else 1) for leaf in leaves) / leaves[0].shape[0]

    costs = {stack: cost(stack) for stack in dict.fromkeys(model.stacks)}
    head = model.params["embed"]["tokens"].size
    return split_layers(model.stacks, stages, chunks, pipeline.stages, costs, (0.0, head))


def split_layers(
    kinds: Sequence[str],
    stages: int,
    chunks: int,
    asked: Literal["auto"] | Sequence[int] = "auto",
    costs: Mapping[str, float] | None = None,
    ends: tuple[float, float] = (0.0, 0.0),
) -> StageSplit:
    """Cut layers of these kinds, in the model's order, into a run for each chunk of each stage.

    costs: time of a layer of each kind (default all alike); ends: time of embedding and head, on the first and last
    run. Raises ConfigError where `asked` (pipeline.stages) is not a number for each run that sum to the layers.
    """
    n, runs = len(kinds), stages * chunks
    where = f"mesh.pipe {stages} x pipeline.chunks {chunks} = {runs} runs of layers"
    if n < runs:
        raise ConfigError(f"{where}, but model.n_layers is {n}: use fewer stages or chunks")
    if asked == "auto":
        counts = _balance(kinds, runs, costs or dict.fromkeys(kinds, 1.0), ends)
    else:
        counts = tuple(int(count) for count in asked)
        if len(counts) != runs:
            raise ConfigError(
                f"pipeline.stages {list(counts)} are {len(counts)} numbers, but {where}: give one number a run, in the "
                "model's order, or auto"
            )
        if sum(counts) != n:
            raise ConfigError(
                f"pipeline.stages {list(counts)} sum to {sum(counts)}, but model.n_layers is {n}: make them sum to {n}"
            )
    borders = np.cumsum((0, *counts)).tolist()
    pattern = common_pattern([tuple(kinds[a:b]) for a, b in pairwise(borders)], costs or {})
    places = np.full((stages, chunks, len(pattern)), -1, np.int32)
    for q, (layer, end) in enumerate(pairwise(borders)):
        for place, kind in enumerate(pattern):
            if layer < end and kinds[layer] == kind:
                places[q % stages, q // stages, place] = layer
                layer += 1
        assert layer == end
    return StageSplit(counts, pattern, places)


def loops_of(pattern: Sequence[str], every: int) -> tuple[Loop, ...]:
    """A chunk's places as loops: wherever a sequence of kinds repeats, the one that covers most.

    `every` layers make a segment. Raises ConfigError where that does not cut a loop into whole turns of segments.
    """
    loops, at, found = [], 0, Counter[str]()
    while at < len(pattern):
        period, times = _repeated(pattern[at:])
        kinds = tuple(pattern[at : at + period])
        if every > 1 and (every % period or (period * times) % every):
            raise ConfigError(
                f"remat.every {every} does not cut {times} x {', '.join(kinds)} among the {len(pattern)} places for "
                "layers of a stage's chunk into whole segments (model.n_layers, mesh.pipe and pipeline.chunks make "
                "them): use a divisor, or remat.every 1"
            )
        parts = [(kind,) for kind in kinds] if every == 1 else [kinds * (every // period)]
        a_turn, segments = Counter(kind for part in parts for kind in part), []
        for part in parts:
            segments.append(Segment(part, {kind: (found[kind], a_turn[kind]) for kind in dict.fromkeys(part)}))
            found.update(part)
        turns = period * times // a_turn.total()
        found.update({kind: (turns - 1) * count for kind, count in a_turn.items()})
        loops.append(Loop(tuple(segments), turns))
        at += period * times
    return tuple(loops)


def _repeated(pattern: Sequence[str]) -> tuple[int, int]:
    """(period, times) of the repetition at the pattern's start that covers most, the shortest of equal ones."""
    best = (1, 1)
    for period in range(1, len(pattern) // 2 + 1):
        times = 1
        while list(pattern[times * period : (times + 1) * period]) == list(pattern[:period]):
            times += 1
        if times > 1 and period * times > best[0] * best[1]:
            best = (period, times)
    return best


def common_pattern(runs: Sequence[tuple[str, ...]], costs: Mapping[str, float]) -> tuple[str, ...]:
    """A sequence of kinds that holds each run as a subsequence: the cheapest of those found by going for one kind."""
    kinds = sorted({kind for run in runs for kind in run})
    patterns = [_merge(runs, first) for first in kinds]
    return min(patterns, key=lambda pattern: sum(costs.get(kind, 1.0) for kind in pattern))


def _merge(runs: Sequence[tuple[str, ...]], first: str) -> tuple[str, ...]:
    """Merge runs, placing `first` wherever a run has it next, else what most runs have next."""
    left, pattern = [list(run) for run in runs], []
    while any(left):
        fronts = Counter(run[0] for run in left if run)
        kind = first if first in fronts else fronts.most_common(1)[0][0]
        left = [run[1:] if run[:1] == [kind] else run for run in left]
        pattern.append(kind)
    return tuple(pattern)


def _balance(kinds: Sequence[str], runs: int, costs: Mapping[str, float], ends: tuple[float, float]) -> tuple[int, ...]:
    """Layers of each run: fewest places first, then the fastest slowest run, then the most even ones."""
    present = sorted(set(kinds))
    totals = Counter(kinds)
    bounds = [
        dict(zip(present, counts, strict=True)) for counts in product(*(range(1, totals[k] + 1) for k in present))
    ]
    bounds.sort(key=lambda bound: sum(costs[kind] * count for kind, count in bound.items()))
    bound = next(bound for bound in bounds if _runs_needed(kinds, bound) <= runs)
    unit = max(costs.values())

    def price(run: int, start: int, stop: int) -> float | None:
        counts = Counter(kinds[start:stop])
        if any(counts[kind] > bound[kind] for kind in counts):
            return None
        time = sum(costs[kind] * count for kind, count in counts.items())
        time += ends[0] * (run == 0) + ends[1] * (run == runs - 1)
        # Rounded: equal sums must tie.
        return round(time / unit, 9)

    slowest, _ = _partition(len(kinds), runs, price, max)

    def square(run: int, start: int, stop: int) -> float | None:
        time = price(run, start, stop)
        return None if time is None or time > slowest else time**2

    _, borders = _partition(len(kinds), runs, square, lambda total, more: round(total + more, 9))
    return tuple(b - a for a, b in pairwise((0, *borders)))


def _runs_needed(kinds: Sequence[str], bound: Mapping[str, int]) -> int:
    """Fewest runs of at most `bound` layers of each kind, each as long as it can be."""
    needed, counts = 1, Counter[str]()
    for kind in kinds:
        if counts[kind] == bound[kind]:
            needed, counts = needed + 1, Counter()
        counts[kind] += 1
    return needed


def _partition(
    n: int,
    runs: int,
    price: Callable[[int, int, int], float | None],
    join: Callable[[float, float], float],
) -> tuple[float, tuple[int, ...]]:
    """Least joint price of cutting n layers into runs, and where they end; None prices a run that is too long.

    Of equal ones the one whose earlier runs are longer.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for run in range(runs):
        longer: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start, (value, borders) in best.items():
            for stop in range(start + 1, n - (runs - run - 1) + 1):
                cost = price(run, start, stop)
                if cost is None:
                    break
                joined = join(value, cost)
                if stop not in longer or joined <= longer[stop][0]:
                    longer[stop] = joined, (*borders, stop)
        best = dict(sorted(longer.items()))
    return best[n]
