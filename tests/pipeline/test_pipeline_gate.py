"""Numbers of microbatches that stages do not divide, or fewer than stages: equal to one device."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from runs import config_of, packed_rows, setup_of

from jaxtrain.prove.compare import compare, first_failure
from jaxtrain.prove.measure import Outcome, StepRunner, random_state
from jaxtrain.prove.verify import FAST_CPU
from jaxtrain.train.resolve import Bound

LAYERS = 8
PADDING = 3
"""Sequences that are dropped: the first remaining one is padding, the second is unscored."""

SCHEDULES = [("1f1b", 1), ("interleaved", 2), ("zero_bubble", 2)]
MICROBATCHES = {"P < M, not a multiple": [(4, 6), (2, 3)], "M = 1": [(4, 1), (2, 1)], "M = P - 1": [(4, 3)]}
CASES = [(stages, m, *schedule) for sizes in MICROBATCHES.values() for stages, m in sizes for schedule in SCHEDULES]
QUICK = [(4, 6, "interleaved", 2), (2, 3, "1f1b", 1), (4, 3, "zero_bubble", 2), (2, 1, "zero_bubble", 2)]


def batch_of(microbatches: int) -> dict[str, np.ndarray]:
    """Two sequences per microbatch, four where there is one microbatch."""
    sequences = max(2 * microbatches, 4)
    return {name: field[PADDING:] for name, field in packed_rows(0, sequences + PADDING).items()}


def bench(sequences: int, devices: int, scale: float, **more: dict[str, Any]) -> tuple[Bound, StepRunner]:
    train = {"global_batch": sequences, "z_loss": 1e-2, **more.pop("train", {})}
    config = config_of(model={"n_layers": LAYERS}, optimizer={"clip_norm": 0.5}, train=train, **more)
    setup = setup_of(config.model_copy(update={"xla": FAST_CPU}), devices)
    return setup, StepRunner(setup, scale)


@cache
def on_one_device(microbatches: int) -> tuple[Any, Outcome]:
    """A random state, and the outcome of one device on all sequences at once."""
    batch = batch_of(microbatches)
    setup, single = bench(len(batch["tokens"]), 1, 1.0)
    initial = random_state(setup)
    return initial, single.run(initial, [batch])


@pytest.mark.parametrize(
    ("stages", "microbatches", "schedule", "chunks"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.prove) for case in CASES if case not in QUICK)],
)
def test_any_number_of_microbatches(stages: int, microbatches: int, schedule: str, chunks: int) -> None:
    """Loss scale 3, two replicas: every leaf's gradient within 2e-5, and the clipped optimizer step that follows."""
    batch = batch_of(microbatches)
    initial, want = on_one_device(microbatches)
    _, piped = bench(
        len(batch["tokens"]), 2 * stages, 3.0, mesh={"data": 2, "pipe": stages},
        pipeline={"schedule": schedule, "chunks": chunks}, train={"accumulation": microbatches},
    )  # fmt: skip
    got = piped.run(initial, [batch])
    checks = compare(got, want, initial)
    gradients = [check for check in checks if check.kind == "gradient"]
    assert len(gradients) == len(jax.tree.leaves(initial["params"])) and max(check.error for check in gradients) < 2e-5
    assert first_failure(checks) is None
    assert want.sums[0]["scored"] > 0 and want.metrics[0]["grad_norm"] > 0.5, "nothing was clipped"
