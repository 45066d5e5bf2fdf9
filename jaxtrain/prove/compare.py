"""Two outcomes, leaf by leaf: what differs by more than float32 explains."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
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
OF_THE_LAYOUT = {"fill", "loss_scale", "traffic", "expert_traffic"}
"""Metrics and sums that describe how the batch is laid, what moves, or how the loss is scaled, not what is learned."""


@dataclass(frozen=True)
class Check:
    """One leaf's largest relative error: at birth (update 0), or after so many updates."""

    kind: str
    leaf: str
    error: float
    update: int = 0

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


def compare(got: Outcome, want: Outcome, initial: Tree) -> list[Check]:
    """Every leaf that `want` has, checked in `got`; `born` is the state from which both started."""
    quiet = _quiet(want.gradients or got.gradients)
    checks = [Check("masked", leaf, math.inf) for leaf in got.moved]
    for batch, gradient in enumerate(want.gradients):
        checks += _leaves("gradient", got.gradients[batch], gradient, quiet)
        checks += _values("sum", got.sums[batch], _learned(want.sums[batch]))
    for update in range(len(want.states)):
        checks += (replace(check, update=update + 1) for check in _one_update(got, want, initial, update, quiet))
    return checks


def guilty(checks: Iterable[Check]) -> Check | None:
    """Of what failed first, by update and then by kind, the worst; None where all passed."""

    def when(check: Check) -> tuple[int, int]:
        return check.update, list(BOUNDS).index(check.kind)

    failed = [check for check in checks if not check.passed]
    first = min(map(when, failed), default=None)
    return max((check for check in failed if when(check) == first), key=lambda check: check.excess, default=None)


def flatten(tree: Tree) -> dict[str, np.ndarray]:
    """{'layers/attention/query/weight': array} of a tree."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}


def _one_update(got: Outcome, want: Outcome, initial: Tree, update: int, quiet: Collection[str]) -> Iterator[Check]:
    yield from _values("metric", got.metrics[update], _learned(want.metrics[update]))
    have, wanted = got.states[update], want.states[update]
    yield from _values("metric", have, {name: wanted[name] for name in ("steps", "tokens")})
    opt = flatten(have["opt"])
    for moments in _by_moment(wanted["opt"], flatten(initial["params"])):
        yield from _leaves("moment", opt, moments, quiet)
    yield from _leaves(
        "parameter", _way(have["params"], initial["params"]), _way(wanted["params"], initial["params"]), quiet
    )


def _learned(values: Tree) -> Tree:
    return {name: value for name, value in values.items() if name not in OF_THE_LAYOUT}


def _leaves(kind: str, got: Tree, want: Tree, quiet: Collection[str]) -> Iterator[Check]:
    """Leaves of one size, each beside the largest."""
    have, wanted = flatten(got), flatten(want)
    largest = max((_largest(leaf) for leaf in wanted.values()), default=0.0)
    for name, leaf in wanted.items():
        noise = any(name == still or name.endswith("/" + still) for still in quiet)
        yield Check(kind, name, _error(have.get(name), leaf, largest * (NOISE_FLOOR if noise else FLOOR)))


def _values(kind: str, got: Tree, want: Tree) -> Iterator[Check]:
    """Numbers that have nothing to do with each other."""
    have = flatten(got)
    for name, leaf in flatten(want).items():
        yield Check(kind, name, _error(have.get(name), leaf, 0.0))


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


def _way(params: Tree, initial: Tree) -> Tree:
    return jax.tree.map(lambda now, then: np.asarray(now, np.float64) - then, params, initial)
