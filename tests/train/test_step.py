"""The step: token-weighted loss, masked microbatches, skipped updates, schedules, one compilation."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from runs import LENGTH, ROWS, VOCAB, config_of, packed_rows, setup_of, train_on, worst_relative_error

from jaxtrain.data import IGNORE
from jaxtrain.train.batch import shard_batch
from jaxtrain.train.step import compile_step


def full_rows(seed: int, scored: list[int]) -> dict[str, np.ndarray]:
    """Rows of one whole document with `scored[row]` labels, the rest ignored."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, (ROWS, LENGTH + 1), np.int32)
    labels = np.full((ROWS, LENGTH), IGNORE, np.int32)
    for row, count in enumerate(scored):
        labels[row, :count] = tokens[row, 1 : count + 1]
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), labels.shape).copy()
    return {"tokens": tokens[:, :-1], "labels": labels, "segments": np.ones_like(labels), "positions": positions}


def gradients_of(setup: Any, rows: dict[str, np.ndarray], scale: float) -> Any:
    params = setup.init_state()["params"]
    batch = shard_batch(rows, 0, setup.batch_shape, setup.batch_sharding)
    gradients, sums = jax.jit(lambda p, b: setup.step.gradients(p, b, scale))(params, batch)
    return jax.device_get((gradients, sums["loss"]))


def test_the_mean_is_over_scored_tokens_not_over_microbatches() -> None:
    # Requirements section 4: 2 and 6 scored tokens weigh 2/8 and 6/8.
    rows = full_rows(0, [2, 6] + [0] * (ROWS - 2))
    one = setup_of(config_of(), 1)
    (first,) = [_only(rows, 0)]
    second = _only(rows, 1)
    losses = [train_on(one, [batch])[0][0]["loss"] for batch in (first, second)]
    whole = train_on(setup_of(config_of(train={"accumulation": 2}), 1), [rows])[0][0]
    assert whole["scored_tokens"] == 8
    assert whole["loss"] == pytest.approx(losses[0] * 2 / 8 + losses[1] * 6 / 8, rel=1e-6)
    assert abs(whole["loss"] - sum(losses) / 2) > 1e-3


def _only(rows: dict[str, np.ndarray], row: int) -> dict[str, np.ndarray]:
    labels = np.full_like(rows["labels"], IGNORE)
    labels[row] = rows["labels"][row]
    return {**rows, "labels": labels}


@pytest.mark.parametrize("preset", ["ddp", "zero2", "fsdp"])
def test_masked_microbatches_and_shards_give_no_nan(preset: str) -> None:
    # Rows 1, 3, 5, ... are microbatch 1 of 2: it scores nothing at all, and most of the eight shards neither.
    rows = full_rows(1, [5 if row in (0, 2, 8) else 0 for row in range(ROWS)])
    got, loss = gradients_of(setup_of(config_of(train={"accumulation": 2}, rules={"preset": [preset]})), rows, 7.0)
    want, plain = gradients_of(setup_of(config_of(), 1), rows, 7.0)
    assert np.isfinite(loss) and loss == pytest.approx(plain, rel=1e-6)
    error, path = worst_relative_error(got, want)
    assert error < 2e-5, path


def test_what_is_masked_changes_nothing() -> None:
    rows, setup = packed_rows(3), setup_of(config_of(), 1)
    altered = {name: field.copy() for name, field in rows.items()}
    padding = rows["segments"] == 0
    altered["tokens"][padding] = np.random.default_rng(0).integers(0, VOCAB, int(padding.sum()))
    altered["positions"][padding] = 7
    for got, want in zip(*(jax.tree.leaves(gradients_of(setup, r, 1.0)) for r in (altered, rows)), strict=True):
        np.testing.assert_array_equal(got, want)


def test_an_update_without_scored_tokens_changes_nothing() -> None:
    setup = setup_of(config_of(), 1)
    metrics, state, _ = train_on(setup, [full_rows(0, [0] * ROWS)])
    born = jax.device_get(setup.init_state())
    assert not metrics[0]["applied"] and metrics[0]["scored_tokens"] == 0 and np.isfinite(metrics[0]["loss"])
    assert state["steps"] == 0
    for got, want in zip(*(jax.tree.leaves(s["params"]) for s in (state, born)), strict=True):
        np.testing.assert_array_equal(got, want)


def test_float16_overflow_skips_halves_the_scale_and_holds_the_schedule() -> None:
    config = config_of(
        precision={"compute": "float16", "scale_init": 2.0**24, "scale_growth_every": 3},
        optimizer={"schedule": "linear", "warmup": 0},
        train={"steps": 40},
    )
    setup = setup_of(config, 8)
    step = compile_step(setup.step, setup.abstract, setup.abstract_batch)
    state = setup.init_state()
    batch = shard_batch(full_rows(0, [LENGTH] * ROWS), 0, setup.batch_shape, setup.batch_sharding)
    born = jax.device_get(state["params"])
    seen = []
    for _ in range(30):
        before = jax.device_get(state["params"])
        state, metrics = step(state, batch)
        seen.append({name: value.item() for name, value in jax.device_get(metrics).items()})
        if not seen[-1]["applied"]:
            for got, want in zip(*(jax.tree.leaves(t) for t in (jax.device_get(state["params"]), before)), strict=True):
                np.testing.assert_array_equal(got, want)
    skipped = [row for row in seen if not row["applied"]]
    assert skipped and seen[0] in skipped, "the planted scale must overflow"
    scales = [row["loss_scale"] for row in seen]
    for row, scale, following in zip(seen, scales, scales[1:], strict=False):
        assert following == scale / 2 if not row["applied"] else following in (scale, 2 * scale)
    # The schedule counts applied updates: every skipped one leaves the next learning rate where it was.
    rates = [row["learning_rate"] for row in seen]
    for row, rate, following in zip(seen, rates, rates[1:], strict=False):
        assert (rate == following) == (not row["applied"])
    assert int(state["steps"]) == len(seen) - len(skipped)
    assert int(state["scaler"]["total_skipped"]) == len(skipped)
    applied = [row["loss"] for row in seen if row["applied"]]
    assert applied[-1] < applied[0]
    assert any(not np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (born, state["params"])), strict=True))


@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_low_precision_follows_the_float32_curve(compute: str) -> None:
    batches = [full_rows(seed, [LENGTH] * ROWS) for seed in range(6)]
    rules = {"preset": ["zero2", "tensor"]}
    low = train_on(setup_of(config_of(precision={"compute": compute}, mesh={"tensor": 2}, rules=rules), 8), batches)[0]
    plain = train_on(setup_of(config_of(), 1), batches)[0]
    for got, want in zip(low, plain, strict=True):
        assert got["loss"] == pytest.approx(want["loss"], rel=2e-2)


def test_bfloat16_reduction_stays_near_the_float32_one() -> None:
    rows = full_rows(0, [LENGTH] * ROWS)
    got, _ = gradients_of(setup_of(config_of(precision={"reduce": "bfloat16"})), rows, 1.0)
    want, _ = gradients_of(setup_of(config_of()), rows, 1.0)
    error, path = worst_relative_error(got, want)
    assert 1e-6 < error < 3e-2, path


def test_schedule_by_tokens_counts_what_was_scored() -> None:
    optimizer = {"unit": "tokens", "schedule": "linear", "warmup": 0, "total": 2 * ROWS * LENGTH, "final_ratio": 0.0}
    config = config_of(optimizer=optimizer)
    metrics = train_on(setup_of(config, 1), [full_rows(s, [LENGTH // 2] * ROWS) for s in range(2)])[0]
    peak = config.optimizer.learning_rate
    assert [m["learning_rate"] for m in metrics] == pytest.approx([peak * 0.75, peak * 0.5], rel=1e-5)


@pytest.mark.parametrize("name", ["lion", "adafactor", "muon"])
def test_other_optimizers_do_not_depend_on_the_mesh(name: str) -> None:
    batches = [packed_rows(seed) for seed in range(3)]
    optimizer = {"name": name, "learning_rate": 1e-3}
    plain = train_on(setup_of(config_of(optimizer=optimizer), 1), batches)
    config = config_of(optimizer=optimizer, mesh={"tensor": 2}, rules={"preset": ["fsdp", "tensor"]})
    laid = train_on(setup_of(config), batches)
    for got, want in zip(laid[0], plain[0], strict=True):
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-4)
