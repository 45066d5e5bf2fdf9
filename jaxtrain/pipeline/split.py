"""Assignment of layers to stages: balanced by cost or as configured, with empty layer slots where runs differ.

All stages run one program, so every chunk has the same layer slots in the same order of kinds, and a tick takes the
time of all slots, empty or not. The split therefore minimises the number of slots first. Among the remaining splits it
minimises the time of the slowest run, embedding and head included.
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
    """Layers divided into P v runs; run q = c P + s is chunk c of stage s.

    counts: layers of each run; pattern: kind (stack) of each of a chunk's J layer slots; layers: int32 [P, v, J], the
    number of the layer in each slot, -1 where it is empty.
    """

    counts: tuple[int, ...]
    pattern: tuple[str, ...]
    layers: NDArray[np.int32]

    @property
    def runs(self) -> list[range]:
        """Layers of each run."""
        ends = np.cumsum((0, *self.counts)).tolist()
        return [range(a, b) for a, b in pairwise(ends)]


@dataclass(frozen=True)
class Segment:
    """Layers between two saved inputs.

    stacks: stack of each layer; slots: for each stack its first slot and its slots per iteration of the loop.
    """

    stacks: tuple[str, ...]
    slots: Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Loop:
    """A loop over a chunk's layer slots: the segments of one iteration, and the number of iterations."""

    segments: tuple[Segment, ...]
    iterations: int


def split_stages(model: Model, pipeline: PipelineConfig, stages: int, chunks: int) -> StageSplit:
    """The split of a model's layers.

    The cost of a layer is the number of its matrix elements per token (experts weighted by the share of tokens that
    choose them); an embedding lookup costs nothing. Raises ConfigError where pipeline.stages does not fit the model.
    """
    moe = model.config.moe
    active = moe.top_k / moe.experts if moe.experts else 1.0

    def cost(stack: str) -> float:
        leaves: list[Param] = jax.tree.leaves(model.params[stack])
        return sum(leaf.size * (active if "experts" in leaf.names else 1) for leaf in leaves) / leaves[0].shape[0]

    costs = {stack: cost(stack) for stack in dict.fromkeys(model.stacks)}
    head = model.params["embed"]["tokens"].size
    return split_layers(model.stacks, stages, chunks, pipeline.stages, costs, (0.0, head))


def split_layers(
    kinds: Sequence[str],
    stages: int,
    chunks: int,
    requested: Literal["auto"] | Sequence[int] = "auto",
    costs: Mapping[str, float] | None = None,
    end_costs: tuple[float, float] = (0.0, 0.0),
) -> StageSplit:
    """Divide layers of these kinds, in the model's order, into one run for each chunk of each stage.

    costs: time of a layer of each kind (default 1); end_costs: time of embedding and head, added to the first and last
    run. Raises ConfigError where `requested` (pipeline.stages) is not one number per run with the layers as their sum.
    """
    n, runs = len(kinds), stages * chunks
    where = f"mesh.pipe {stages} x pipeline.chunks {chunks} = {runs} runs of layers"
    if n < runs:
        raise ConfigError(f"{where}, but model.n_layers is {n}: use fewer stages or chunks")
    if requested == "auto":
        counts = _balance(kinds, runs, costs or dict.fromkeys(kinds, 1.0), end_costs)
    else:
        counts = tuple(int(count) for count in requested)
        if len(counts) != runs:
            raise ConfigError(
                f"pipeline.stages {list(counts)} are {len(counts)} numbers, but {where}: give one number per run, in "
                "the model's order, or auto"
            )
        if sum(counts) != n:
            raise ConfigError(
                f"pipeline.stages {list(counts)} sum to {sum(counts)}, but model.n_layers is {n}: make them sum to {n}"
            )
    borders = np.cumsum((0, *counts)).tolist()
    pattern = common_pattern([tuple(kinds[a:b]) for a, b in pairwise(borders)], costs or {})
    layers = np.full((stages, chunks, len(pattern)), -1, np.int32)
    for q, (layer, end) in enumerate(pairwise(borders)):
        for slot, kind in enumerate(pattern):
            if layer < end and kinds[layer] == kind:
                layers[q % stages, q // stages, slot] = layer
                layer += 1
        assert layer == end
    return StageSplit(counts, pattern, layers)


def loops_of(pattern: Sequence[str], every: int) -> tuple[Loop, ...]:
    """A chunk's layer slots as loops; a sequence of kinds that repeats is one loop, the longest repetition first.

    A segment has `every` layers. Raises ConfigError where segments do not divide the slots of a loop.
    """
    loops, start, first = [], 0, Counter[str]()
    while start < len(pattern):
        period, times = _repeated(pattern[start:])
        kinds = tuple(pattern[start : start + period])
        if every > 1 and (every % period or (period * times) % every):
            raise ConfigError(
                f"remat.every {every} does not divide {times} x {', '.join(kinds)} among the {len(pattern)} layer "
                "slots of a stage's chunk into segments (model.n_layers, mesh.pipe and pipeline.chunks determine "
                "them): use a divisor, or remat.every 1"
            )
        parts = [(kind,) for kind in kinds] if every == 1 else [kinds * (every // period)]
        per_iteration, segments = Counter(kind for part in parts for kind in part), []
        for part in parts:
            segments.append(Segment(part, {kind: (first[kind], per_iteration[kind]) for kind in dict.fromkeys(part)}))
            first.update(part)
        iterations = period * times // per_iteration.total()
        first.update({kind: (iterations - 1) * count for kind, count in per_iteration.items()})
        loops.append(Loop(tuple(segments), iterations))
        start += period * times
    return tuple(loops)


def _repeated(pattern: Sequence[str]) -> tuple[int, int]:
    """(period, times) of the longest repetition at the pattern's start; of equal ones the shortest period."""
    best = (1, 1)
    for period in range(1, len(pattern) // 2 + 1):
        times = 1
        while list(pattern[times * period : (times + 1) * period]) == list(pattern[:period]):
            times += 1
        if times > 1 and period * times > best[0] * best[1]:
            best = (period, times)
    return best


def common_pattern(runs: Sequence[tuple[str, ...]], costs: Mapping[str, float]) -> tuple[str, ...]:
    """A sequence of kinds that has each run as a subsequence: the cheapest of the merges that prefer one kind."""
    kinds = sorted({kind for run in runs for kind in run})
    patterns = [_merge(runs, first) for first in kinds]
    return min(patterns, key=lambda pattern: sum(costs.get(kind, 1.0) for kind in pattern))


def _merge(runs: Sequence[tuple[str, ...]], first: str) -> tuple[str, ...]:
    """Merge runs: the next kind is `first` if it is next in any run, else the kind that is next in most runs."""
    rest, pattern = [list(run) for run in runs], []
    while any(rest):
        fronts = Counter(run[0] for run in rest if run)
        kind = first if first in fronts else fronts.most_common(1)[0][0]
        rest = [run[1:] if run[:1] == [kind] else run for run in rest]
        pattern.append(kind)
    return tuple(pattern)


def _balance(
    kinds: Sequence[str], runs: int, costs: Mapping[str, float], end_costs: tuple[float, float]
) -> tuple[int, ...]:
    """Layers of each run: minimise the layer slots, then the slowest run's time, then the sum of squared times."""
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
        time += end_costs[0] * (run == 0) + end_costs[1] * (run == runs - 1)
        # Round, so that equal sums tie.
        return round(time / unit, 9)

    slowest, _ = _partition(len(kinds), runs, price, max)

    def square(run: int, start: int, stop: int) -> float | None:
        time = price(run, start, stop)
        return None if time is None or time > slowest else time**2

    _, borders = _partition(len(kinds), runs, square, lambda total, time: round(total + time, 9))
    return tuple(b - a for a, b in pairwise((0, *borders)))


def _runs_needed(kinds: Sequence[str], bound: Mapping[str, int]) -> int:
    """Fewest runs with at most `bound` layers of each kind."""
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
    """Least joint price of dividing n layers into runs, and the ends of these runs.

    A price of None forbids a run, and every longer run from the same layer. Ties go to longer earlier runs.
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
