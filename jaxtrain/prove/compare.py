"""Two outcomes, leaf by leaf: what differs by more than float32 explains."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxtrain.prove.measure import Outcome

Tree = Any

BOUNDS = {"gradient": 2e-5, "masked": 0.0, "sum": 1e-5, "metric": 2e-5, "moment": 1e-4, "parameter": 1e-3}
"""Largest relative error of each kind, in the order in which a fault is looked for. Integers have none.

Gradients are of the weights at birth. Later kinds follow k chained updates: a parameter's error is that of its way from
birth, where Adam divides rounding noise by the root of a second moment.
"""
FLOOR = 1e-3
"""A leaf is measured by at least this share of the largest leaf of its kind."""
NOISE, NOISE_FLOOR = 1e-6, 0.1
"""A parameter whose gradient never exceeds NOISE of the largest is zero in exact arithmetic (a key bias without rotary
positions) and holds rounding alone: NOISE_FLOOR takes the place of FLOOR."""
OF_THE_LAYOUT = {"fill", "loss_scale"}
"""Metrics that describe how the batch is laid or the loss is scaled, not what is learned."""


@dataclass(frozen=True)
class Check:
    """One leaf of one kind: its largest relative error over the updates."""

    kind: str
    leaf: str
    error: float

    @property
    def bound(self) -> float:
        """The largest error that passes."""
        return BOUNDS[self.kind]

    @property
    def passed(self) -> bool:
        """Whether the error is within the bound; NaN is not."""
        return self.error <= self.bound

    @property
    def excess(self) -> float:
        """Error in units of the bound, infinite for NaN."""
        return math.inf if math.isnan(self.error) else self.error / max(self.bound, 1e-30)


def compare(got: Outcome, want: Outcome, born: Tree) -> list[Check]:
    """Every leaf that `want` has, checked in `got`; `born` is the state from which both started."""
    quiet = _quiet(want.gradients or got.gradients)
    found: dict[tuple[str, str], float] = {}
    for update in range(len(want.states)):
        for kind, leaf, error in _one_update(got, want, born, update, quiet):
            # max() would lose a NaN that comes second.
            old = found.get((kind, leaf), 0.0)
            found[kind, leaf] = error if math.isnan(error) else old if math.isnan(old) else max(old, error)
    found |= {("masked", leaf): math.inf for leaf in got.moved}
    return [Check(kind, leaf, error) for (kind, leaf), error in found.items()]


def guilty(checks: Iterable[Check]) -> Check | None:
    """The worst failed check of the first kind that has one, None where all passed."""
    failed = [check for check in checks if not check.passed]
    first = min((list(BOUNDS).index(check.kind) for check in failed), default=0)
    return max(
        (check for check in failed if list(BOUNDS).index(check.kind) == first), key=lambda c: c.excess, default=None
    )


def flatten(tree: Tree) -> dict[str, np.ndarray]:
    """{'layers/attention/query/weight': array} of a tree."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}


def _one_update(
    got: Outcome, want: Outcome, born: Tree, update: int, quiet: Collection[str]
) -> Iterator[tuple[str, str, float]]:
    if want.gradients:
        yield from _leaves("gradient", got.gradients[update], want.gradients[update], quiet)
        yield from _values("sum", got.sums[update], want.sums[update])
    metrics = {name: value for name, value in want.metrics[update].items() if name not in OF_THE_LAYOUT}
    yield from _values("metric", got.metrics[update], metrics)
    have, wanted = got.states[update], want.states[update]
    yield from _values("metric", have, {name: wanted[name] for name in ("updates", "tokens")})
    opt = flatten(have["opt"])
    for moments in _by_moment(wanted["opt"], flatten(born["params"])):
        yield from _leaves("moment", opt, moments, quiet)
    yield from _leaves("parameter", _way(have["params"], born["params"]), _way(wanted["params"], born["params"]), quiet)


def _leaves(kind: str, got: Tree, want: Tree, quiet: Collection[str]) -> Iterator[tuple[str, str, float]]:
    """Leaves of one size, each beside the largest."""
    have, wanted = flatten(got), flatten(want)
    largest = max((_largest(leaf) for leaf in wanted.values()), default=0.0)
    for name, leaf in wanted.items():
        noise = any(name == leaf or name.endswith("/" + leaf) for leaf in quiet)
        yield kind, name, _error(have.get(name), leaf, largest * (NOISE_FLOOR if noise else FLOOR))


def _values(kind: str, got: Tree, want: Tree) -> Iterator[tuple[str, str, float]]:
    """Numbers that have nothing to do with each other."""
    have = flatten(got)
    for name, leaf in flatten(want).items():
        yield kind, name, _error(have.get(name), leaf, 0.0)


def _error(got: np.ndarray | None, want: np.ndarray, least: float) -> float:
    if got is None or got.shape != want.shape:
        return math.inf
    if want.dtype.kind in "biu":
        return 0.0 if np.array_equal(got, want) else math.inf
    scale = max(_largest(want), least, 1e-30)
    return float(np.max(np.abs(np.asarray(got, np.float64) - want), initial=0)) / scale


def _largest(leaf: np.ndarray) -> float:
    return float(np.max(np.abs(leaf), initial=0))


def _quiet(gradients: list[Tree]) -> set[str]:
    """Parameters whose gradient is rounding noise in every update."""
    quiet: list[set[str]] = []
    for leaves in map(flatten, gradients):
        largest = max(map(_largest, leaves.values()))
        quiet.append({name for name, leaf in leaves.items() if _largest(leaf) <= NOISE * largest})
    return set.intersection(*quiet) if quiet else set()


def _by_moment(opt: Tree, parameters: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """The optimizer's leaves in groups of one size: all first moments, all second ones, everything else."""
    groups: dict[str, dict[str, np.ndarray]] = {}
    for name, leaf in flatten(opt).items():
        owner = next((parameter for parameter in parameters if name.endswith("/" + parameter)), "")
        groups.setdefault(name.removesuffix(owner), {})[name] = leaf
    return list(groups.values())


def _way(params: Tree, born: Tree) -> Tree:
    return jax.tree.map(lambda now, then: np.asarray(now, np.float64) - then, params, born)
