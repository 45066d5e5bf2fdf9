"""Compare two outcomes leaf by leaf, with bounds that float32 rounding explains."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxtrain.config import OptimizerConfig
from jaxtrain.mesh.layout import flatten_paths
from jaxtrain.prove.limits import DIRECTIONS, moments_of, parameter_limits
from jaxtrain.prove.measure import Outcome

Tree = Any

BOUNDS = {"gradient": 2e-5, "masked": 0.0, "sum": 1e-5, "metric": 2e-5, "moment": 1e-4, "parameter": 1e-3}
"""Largest relative error of each kind of leaf, in the order in which failures are reported. Integers must be equal.

Gradients are those of the initial weights. The later kinds follow chained steps. The error of a parameter is that of
its change since initialisation. Under adamw, lion and adafactor its bound is not the constant, but follows from the
errors of the moments (prove/limits.py): they divide rounding errors by the root of a second moment, or take a sign.
"""
LEAST_SCALE = 1e-3
"""A leaf's error is relative to at least this share of the largest leaf of its kind."""
ZERO_GRADIENT, ZERO_SCALE = 1e-6, 0.1
"""A parameter whose gradient never exceeds ZERO_GRADIENT of the largest has the gradient 0 in exact arithmetic (a key
bias without rotary positions). It holds rounding errors only, so ZERO_SCALE replaces LEAST_SCALE."""
LAYOUT_METRICS = {"fill", "loss_scale", "traffic", "expert_traffic"}
"""Metrics and sums that describe packing, communication or loss scaling, and so depend on the layout."""


@dataclass(frozen=True)
class Check:
    """The largest relative error of one leaf, at the initial state (step 0) or after `step` steps.

    `limit` replaces the bound of the kind. Then `error` is that of the element that exceeds its own limit most.
    """

    kind: str
    leaf: str
    error: float
    step: int = 0
    limit: float | None = None

    @property
    def bound(self) -> float:
        """The largest error that passes."""
        return BOUNDS[self.kind] if self.limit is None else self.limit

    @property
    def passed(self) -> bool:
        """Whether the error is within the bound; NaN is not."""
        return self.error <= self.bound

    @property
    def error_over_bound(self) -> float:
        """The error in units of the bound; infinite for NaN."""
        return math.inf if math.isnan(self.error) else self.error / max(self.bound, 1e-30)


def compare(got: Outcome, want: Outcome, initial: Tree, optimizer: OptimizerConfig | None = None) -> list[Check]:
    """One check for every leaf of `want`. Both outcomes start from the state `initial`.

    optimizer: if it is one of DIRECTIONS, bounds of parameters follow from the moments.
    """
    zero = _zero_gradients(want.gradients or got.gradients)
    limits: list[dict[str, np.ndarray]] | None = None
    if optimizer is not None and optimizer.name in DIRECTIONS:
        moment_errors = [_moment_errors(state["opt"], zero) for state in want.states]
        limits = parameter_limits(optimizer, got, want, moment_errors)
    checks = [Check("masked", leaf, math.inf) for leaf in got.mask_leaks]
    for batch, gradient in enumerate(want.gradients):
        checks += _leaf_checks("gradient", got.gradients[batch], gradient, zero)
        checks += _value_checks("sum", got.sums[batch], _layout_independent(want.sums[batch]))
    for step in range(len(want.states)):
        of_step = [
            *_optimizer_checks(got, want, initial, step, zero),
            *_parameter_checks(got, want, initial, step, zero, limits),
        ]
        checks += (replace(check, step=step + 1) for check in of_step)
    return checks


def first_failure(checks: Iterable[Check]) -> Check | None:
    """The worst failed check of the first step and kind that fail; None if all passed."""

    def order(check: Check) -> tuple[int, int]:
        return check.step, list(BOUNDS).index(check.kind)

    failed = [check for check in checks if not check.passed]
    first = min(map(order, failed), default=None)
    return max(
        (check for check in failed if order(check) == first), key=lambda check: check.error_over_bound, default=None
    )


def _optimizer_checks(got: Outcome, want: Outcome, initial: Tree, step: int, zero: Collection[str]) -> Iterator[Check]:
    yield from _value_checks("metric", got.metrics[step], _layout_independent(want.metrics[step]))
    have, wanted = got.states[step], want.states[step]
    yield from _value_checks("metric", have, {name: wanted[name] for name in ("steps", "tokens")})
    opt = _arrays(have["opt"])
    for moments in _by_moment(wanted["opt"], _arrays(initial["params"])):
        yield from _leaf_checks("moment", opt, moments, zero)


def _parameter_checks(
    got: Outcome,
    want: Outcome,
    initial: Tree,
    step: int,
    zero: Collection[str],
    limits: list[dict[str, np.ndarray]] | None,
) -> Iterator[Check]:
    """Checks of the changes since initialisation, by element if there are limits."""
    have, wanted = (_arrays(_change(outcome.states[step]["params"], initial["params"])) for outcome in (got, want))
    for name, scale in _scales(wanted, zero).items():
        leaf = have.get(name)
        if limits is None or leaf is None or leaf.shape != wanted[name].shape:
            yield Check("parameter", name, _relative_error(leaf, wanted[name], scale))
            continue
        difference, limit = np.abs(leaf - wanted[name]).ravel(), limits[step][name].ravel()
        worst = int(np.argmax(difference / np.maximum(limit, 1e-30)))
        scale = max(scale, 1e-30)
        yield Check("parameter", name, float(difference[worst]) / scale, limit=float(limit[worst]) / scale)


def _arrays(tree: Tree) -> dict[str, np.ndarray]:
    """{'layers/attention/query/weight': array}."""
    return {path: np.asarray(leaf) for path, leaf in flatten_paths(tree).items()}


def _layout_independent(values: Tree) -> Tree:
    return {name: value for name, value in values.items() if name not in LAYOUT_METRICS}


def _leaf_checks(kind: str, got: Tree, want: Tree, zero: Collection[str]) -> Iterator[Check]:
    """Checks of leaves of one kind, relative to at least a share of the largest leaf."""
    have, wanted = _arrays(got), _arrays(want)
    for name, scale in _scales(wanted, zero).items():
        yield Check(kind, name, _relative_error(have.get(name), wanted[name], scale))


def _scales(leaves: dict[str, np.ndarray], zero: Collection[str]) -> dict[str, float]:
    """The value that each leaf's error is relative to."""
    largest = max(map(_largest, leaves.values()), default=0.0)

    def scale(name: str, leaf: np.ndarray) -> float:
        is_zero = any(name == path or name.endswith("/" + path) for path in zero)
        return max(_largest(leaf), largest * (ZERO_SCALE if is_zero else LEAST_SCALE))

    return {name: scale(name, leaf) for name, leaf in leaves.items()}


def _moment_errors(opt: Tree, zero: Collection[str]) -> dict[str, float]:
    """{parameter: largest absolute error that passes of its first moment, or of the root of its second one}."""
    moments = moments_of(opt)
    scales = _scales(moments["mu"] or {path: np.sqrt(v) for path, v in moments["v"].items()}, zero)
    return {path: BOUNDS["moment"] * scale for path, scale in scales.items()}


def _value_checks(kind: str, got: Tree, want: Tree) -> Iterator[Check]:
    """Checks of unrelated numbers, each relative to itself."""
    have = _arrays(got)
    for name, leaf in _arrays(want).items():
        yield Check(kind, name, _relative_error(have.get(name), leaf, 0.0))


def _relative_error(got: np.ndarray | None, want: np.ndarray, least_scale: float) -> float:
    if got is None or got.shape != want.shape:
        return math.inf
    if want.dtype.kind in "biu":
        return 0.0 if np.array_equal(got, want) else math.inf
    scale = max(_largest(want), least_scale, 1e-30)
    return float(np.max(np.abs(np.asarray(got, np.float64) - want), initial=0)) / scale


def _largest(leaf: np.ndarray) -> float:
    return float(np.max(np.abs(leaf), initial=0))


def _zero_gradients(gradients: list[Tree]) -> set[str]:
    """Paths of parameters whose gradient is rounding error in every batch."""
    zero: list[set[str]] = []
    for leaves in map(_arrays, gradients):
        largest = max(map(_largest, leaves.values()))
        zero.append({name for name, leaf in leaves.items() if _largest(leaf) <= ZERO_GRADIENT * largest})
    return set.intersection(*zero) if zero else set()


def _by_moment(opt: Tree, params: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """The optimizer's leaves in groups of similar size: first moments, second moments, everything else."""
    groups: dict[str, dict[str, np.ndarray]] = {}
    for name, leaf in _arrays(opt).items():
        owner = next((path for path in params if name.endswith("/" + path)), "")
        groups.setdefault(name.removesuffix(owner), {})[name] = leaf
    return list(groups.values())


def _change(params: Tree, initial: Tree) -> Tree:
    return jax.tree.map(lambda now, then: np.asarray(now, np.float64) - then, params, initial)
