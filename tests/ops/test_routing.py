"""Routing against a loop over tokens, and the balancing losses against their formulas."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.ops import routing

SCORES = ("softmax", "softmax_chosen", "sigmoid", "sigmoid_chosen")


def by_hand(
    logits: np.ndarray, top_k: int, scores: str, correction: np.ndarray, groups: int, top_groups: int, scale: float
) -> tuple[list[int], list[float]]:
    """Experts and weights of one token, in double precision."""
    s = 1 / (1 + np.exp(-logits)) if scores.startswith("sigmoid") else np.exp(logits) / np.exp(logits).sum()
    choice = s + correction
    parts = np.split(np.arange(len(s)), groups)
    best = 2 if scores.startswith("sigmoid") else 1
    ratings = [sorted(choice[part], reverse=True)[:best] for part in parts]
    open_groups = sorted(range(groups), key=lambda g: -sum(ratings[g]))[:top_groups]
    allowed = [x for g in open_groups for x in parts[g]]
    chosen = sorted(allowed, key=lambda x: -choice[x])[:top_k]
    weights = s[chosen]
    if scores.endswith("_chosen"):
        weights = weights / weights.sum()
    return [int(x) for x in chosen], list(weights * scale)


@settings(max_examples=25, deadline=None)
@given(
    scores=st.sampled_from(SCORES), shape=st.sampled_from([(8, 1, 1), (8, 4, 2), (12, 3, 2), (6, 2, 2)]),
    top_k=st.integers(1, 4), seed=st.integers(0, 10**6), corrected=st.booleans(),
)  # fmt: skip
def test_chosen_experts_and_weights(
    scores: routing.Scores, shape: tuple[int, int, int], top_k: int, seed: int, corrected: bool
) -> None:
    experts, groups, top_groups = shape
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(2, 5, experts))
    correction = rng.normal(size=experts) * 0.3 * corrected
    real = rng.random((2, 5)) < 0.8
    routed = routing.route(
        jnp.asarray(logits, jnp.float32), jnp.asarray(real), top_k, scores,
        jnp.asarray(correction, jnp.float32) if corrected else None, groups, top_groups, 2.5,
    )  # fmt: skip
    for b, i in np.ndindex(2, 5):
        if not real[b, i]:
            assert (np.asarray(routed.chosen_BLK[b, i]) == experts).all()
            assert not np.asarray(routed.weights_BLK[b, i]).any() and not np.asarray(routed.shares_BLX[b, i]).any()
            continue
        chosen, weights = by_hand(logits[b, i], top_k, scores, correction, groups, top_groups, 2.5)
        assert list(np.asarray(routed.chosen_BLK[b, i])) == chosen
        np.testing.assert_allclose(routed.weights_BLK[b, i], weights, rtol=1e-5)
        assert float(jnp.sum(routed.shares_BLX[b, i])) == pytest.approx(1, rel=1e-5)


def test_ties_go_to_the_first_experts() -> None:
    routed = routing.route(jnp.zeros((1, 3, 8)), jnp.ones((1, 3), bool), 3, "sigmoid", groups=4, top_groups=2)
    assert np.asarray(routed.chosen_BLK).tolist() == [[[0, 1, 2]] * 3]


def test_the_correction_has_no_gradient_and_changes_no_weight() -> None:
    logits, real = jax.random.normal(jax.random.key(0), (1, 6, 4)), jnp.ones((1, 6), bool)

    def total(correction: jax.Array) -> jax.Array:
        routed = routing.route(logits, real, 2, "sigmoid", correction)
        return jnp.sum(routed.weights_BLK * jnp.arange(1, 3)) + jnp.sum(routed.shares_BLX**2)

    assert not np.asarray(jax.grad(total)(jnp.array([0.5, 0.0, -0.5, 0.1]))).any()
    favoured = routing.route(logits, real, 2, "sigmoid", jnp.array([9.0, 0, 0, 0]))
    assert (np.asarray(favoured.chosen_BLK)[..., 0] == 0).all()
    np.testing.assert_allclose(favoured.weights_BLK[..., 0], jax.nn.sigmoid(logits[..., 0]), rtol=1e-6)


def routed_of(chosen: list[list[list[int]]], shares: np.ndarray) -> routing.Routed:
    return routing.Routed(jnp.asarray(chosen), jnp.ones(np.shape(chosen)), jnp.asarray(shares, jnp.float32))


def test_capacity_keeps_the_first_tokens_of_each_document_order() -> None:
    # The second half of the sequence is permuted: the order of tokens decides, not their index.
    routed = routed_of([[[0, 1], [0, 2], [0, 1], [2, 2]]], np.zeros((1, 4, 3)))
    limited, dropped = routing.apply_capacity(routed, jnp.array([[1, 3, 2, 4]]), 2)
    assert int(dropped) == 1
    assert np.asarray(limited.chosen_BLK).tolist() == [[[0, 1], [3, 2], [0, 1], [2, 2]]]
    assert np.asarray(limited.weights_BLK).tolist() == [[[1, 1], [0, 1], [1, 1], [1, 1]]]


def test_balancing_losses_are_one_for_an_even_load_and_x_for_a_single_expert() -> None:
    totals = routing.RoutingTotals(jnp.asarray(4), jnp.asarray(1))
    even = routed_of([[[0], [1], [2], [3]]], np.full((1, 4, 4), 0.25))
    single = routed_of([[[2]] * 4], np.tile(np.eye(4)[2], (1, 4, 1)))
    real = jnp.ones((1, 4), bool)
    for routed, want in ((even, 1.0), (single, 4.0)):
        assert float(routing.batch_balance(routed, routing.load_of(routed), totals)) == pytest.approx(want)
        assert float(routing.sequence_balance(routed, real, totals)) == pytest.approx(want)
    assert float(routing.router_z(jnp.zeros((1, 4, 4)), real, totals)) == pytest.approx(np.log(4) ** 2, rel=1e-6)


def test_losses_of_microbatches_add_up() -> None:
    logits = jax.random.normal(jax.random.key(1), (6, 5, 8))
    real = jax.random.uniform(jax.random.key(2), (6, 5)) < 0.6
    real = real.at[3].set(False)
    whole = routing.route(logits, real, 2, "softmax")
    totals = routing.RoutingTotals(jnp.sum(real), jnp.sum(jnp.any(real, 1)), routing.load_of(whole))
    sums = np.zeros((2, 3))
    for row, parts in enumerate(([slice(0, 6)], [slice(0, 1), slice(1, 4), slice(4, 6)])):
        for part in parts:
            routed = jax.tree.map(lambda a, part=part: a[part], whole)
            load = routing.load_of(routed)
            sums[row] += [
                routing.batch_balance(routed, load, totals),
                routing.sequence_balance(routed, real[part], totals),
                routing.router_z(logits[part], real[part], totals),
            ]
    np.testing.assert_allclose(sums[1], sums[0], rtol=1e-5)
    # The formulas, over real tokens only.
    s = np.asarray(jax.nn.softmax(logits), np.float64)[np.asarray(real)]
    f = np.bincount(np.argsort(-s, axis=1)[:, :2].ravel(), minlength=8) / (2 * len(s))
    assert sums[0, 0] == pytest.approx(8 * float((f * s.mean(0)).sum()), rel=1e-5)
