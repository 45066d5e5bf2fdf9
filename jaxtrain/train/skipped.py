"""Skipped steps: why one was skipped, and what to do when a run cannot go on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.config import DivergedError, RunConfig
from jaxtrain.train.signals import saved_steps


def why_skipped(values: Mapping[str, Any], spike: bool) -> str:
    """The reason for which a step with these metrics was not applied."""
    if values["scored_tokens"] == 0:
        return "no token was scored"
    if spike:
        return f"loss {values['loss']:.4f}, gradient norm {values['grad_norm']:.4g} are a spike"
    if not math.isfinite(values["loss"]):
        return "the loss was not finite"
    if not math.isfinite(values["grad_norm"]):
        return "a gradient was not finite"
    return "the new parameters or moments were not finite"


def diverged(config: RunConfig, directory: Path, step: int, in_a_row: int, why: str, scale: float) -> DivergedError:
    """The error that ends a run after `in_a_row` skipped steps up to `step`, with what can be done."""
    precision = config.precision
    steps = "1 step" if in_a_row == 1 else f"{in_a_row} steps in a row"
    begins = (
        f"{steps} up to step {step} skipped, the last because {why} (precision.max_skipped {precision.max_skipped})"
    )
    if precision.compute == "float16" and scale > 1:
        return DivergedError(
            f"{begins}; the loss scale of float16 began at precision.scale_init {precision.scale_init:g}, halves at "
            f"each skipped step and is still {scale:g}: begin a new run with --precision.scale_init 32768, resume this "
            "one with a larger --precision.max_skipped, or train in bfloat16"
        )
    change = f"--optimizer.learning_rate {config.optimizer.learning_rate / 4:.3g}"
    if config.guard.spike is not None:
        change += f" or --guard.spike {2 * config.guard.spike:g}"
    if precision.recipe is not None:
        change += f" or --precision.recipe null (matmuls are in {precision.recipe})"
    good = [saved for saved in saved_steps(directory) if saved <= step - in_a_row]
    if not good:
        return DivergedError(f"{begins}; no step before is saved: start a new run with {change}")
    return DivergedError(
        f"{begins}; the newest checkpoint before is that of step {good[-1]}: resume with the same command and "
        f"{change}, or start a new run from it: jaxtrain train CONFIG --from {directory}/checkpoints/{good[-1]} "
        f"--run NEW {change}"
    )
