"""How far parameters of two layouts may differ, by the optimizer's formula, if their gradients differ by rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.config import OptimizerConfig
from jaxtrain.mesh.layout import flatten_paths
from jaxtrain.prove.adamw import adam_direction
from jaxtrain.prove.measure import Outcome

Tree = Any
Moments = Mapping[str, Mapping[str, np.ndarray]]
Both = tuple[Moments, Moments]
"""The moments of the outcome that is checked and of the one that it is compared with."""

ROUNDING = 2e-5
"""Relative float32 rounding error of an optimizer step, given its moments: the learning rate, the bias corrections."""


def parameter_limits(
    config: OptimizerConfig, got: Outcome, want: Outcome, moment_errors: Sequence[Mapping[str, float]]
) -> list[dict[str, np.ndarray]]:
    """How far each parameter may differ after each step if only the gradients differ, by error.

    moment_errors: for each step, {parameter: largest absolute error of the first moment that passes}; of adafactor,
    which has none, of a gradient.

    An optimizer subtracts rate x (u + weight_decay x p). Where u divides by a small number, or is a sign, it amplifies
    rounding errors of the gradient, so that no constant bound fits all elements. The limit of an element is the sum
    over the steps of

        rate x (du + ROUNDING x (|u| + weight_decay x |p|)) + 2^-23 |p|,

    where 2^-23 |p| is the rounding of p in both outcomes, and du follows from the optimizer's formula (DIRECTIONS).
    An error of p carries over to the next step, multiplied by at most 1 + rate x weight_decay.
    """
    limits: list[dict[str, np.ndarray]] = []
    before: Both = ({}, {})
    for step, (have, wanted) in enumerate(zip(got.states, want.states, strict=True)):
        rate = float(want.metrics[step]["learning_rate"])
        now = moments_of(have["opt"]), moments_of(wanted["opt"])
        limits.append({})
        for path, p in flatten_paths(wanted["params"]).items():
            size = np.abs(np.asarray(p, np.float64))
            u, du = DIRECTIONS[config.name](config, before, now, path, step + 1, moment_errors[step][path])
            decay = rate * config.weight_decay
            previous = limits[step - 1][path] * (1 + decay) if step else 0.0
            limits[step][path] = previous + rate * (du + ROUNDING * u) + (ROUNDING * decay + 2.0**-23) * size
        before = now
    return limits


def moments_of(opt: Tree) -> dict[str, dict[str, np.ndarray]]:
    """{"mu": {parameter: first moment}, "nu", "v": second moment} of an optimizer state, float64."""
    moments: dict[str, dict[str, np.ndarray]] = {"mu": {}, "nu": {}, "v": {}}
    for name, leaf in flatten_paths(opt).items():
        for moment, values in moments.items():
            _, found, parameter = name.partition(f"/{moment}/")
            if found:
                values[parameter] = np.asarray(leaf, np.float64)
    return moments


def _adamw(
    config: OptimizerConfig, before: Both, now: Both, path: str, step: int, e: float
) -> tuple[np.ndarray, np.ndarray]:
    """|u| and du of AdamW (Loshchilov & Hutter 2019): u = m / (r + eps), of the bias-corrected moments m and r^2.

    du is the smaller of two numbers: the difference of u between the moments of both outcomes, and the largest
    difference that gradients within their bound can cause. For the latter let e bound the error of a gradient. m is a
    weighted mean of gradients and r their weighted root mean square, with weights that sum to 1, so neither differs by
    more than e, and to first order

        du <= e / (r + eps) + |m| e / (r + eps)^2 = e (1 + |u|) / (r + eps).

    e is the largest error of the first moment over 1 - beta1^t.
    """
    (have_u, _), (u, root) = (adam_direction(config, moments, path, step) for moments in now)  # type: ignore[arg-type]
    e /= 1 - config.beta1**step
    return np.abs(u), np.fmin(np.abs(have_u - u), e * (1 + np.abs(u)) / (root + config.eps))


def _lion(
    config: OptimizerConfig, before: Both, now: Both, path: str, step: int, e: float
) -> tuple[np.ndarray, np.ndarray]:
    """|u| and du of Lion (Chen et al. 2023): u = sign(c), c = beta1 m + (1 - beta1) g, of the moment m before the step.

    g follows from two moments, m' = beta2 m + (1 - beta2) g. Where the signs of both outcomes differ, du is 2 if c is
    within its error of 0, else 0.
    """
    b1, b2 = config.beta1, config.beta2

    def combined(old: Moments, new: Moments) -> np.ndarray:
        m = old["mu"][path] if old else np.zeros_like(new["mu"][path])
        return b1 * m + (1 - b1) * (new["mu"][path] - b2 * m) / (1 - b2)

    have_c, c = (combined(old, new) for old, new in zip(before, now, strict=True))
    error = b1 * e + (1 - b1) * e * (1 + b2) / (1 - b2)
    return np.ones_like(c), np.where((np.sign(have_c) != np.sign(c)) & (np.abs(c) <= error), 2.0, 0.0)


def _adafactor(
    config: OptimizerConfig, before: Both, now: Both, path: str, step: int, e: float
) -> tuple[np.ndarray, np.ndarray]:
    """|u| and du of Adafactor (Shazeer & Stern 2018) without factors.

    u = g / r, r^2 = d v + (1 - d) g^2, d = 1 - t^-0.8. As for AdamW, du <= e (1 + |u|) / r. |u| is at most t^0.4, and
    clipping its RMS to 1 makes it no larger.
    """
    old, new = (moments[1]["v"].get(path) if moments[1] else None for moments in (before, now))
    assert new is not None, f"adafactor has no second moment of {path}"
    d, root = 1 - step**-0.8, np.sqrt(new)
    g = np.sqrt(np.maximum(new - d * (np.zeros_like(new) if old is None else old), 0.0) / (1 - d))
    u = g / np.maximum(root, 1e-30)
    return u, np.fmin(e * (1 + u) / np.maximum(root, 1e-30), 2 * step**0.4)


DIRECTIONS: dict[str, Callable[..., tuple[np.ndarray, np.ndarray]]] = {
    "adamw": _adamw, "lion": _lion, "adafactor": _adafactor,
}  # fmt: skip
"""Optimizer -> |u| and du of a parameter, from the moments of both outcomes before and after the step, and the largest
error e of the first moment that passes."""
