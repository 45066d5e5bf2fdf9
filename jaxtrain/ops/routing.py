"""Routing of tokens to experts: scores, weights and load-balancing losses, all in float32.

B batch, L sequence length, X experts, K experts a token visits, G groups of experts.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.numerics.remat import CHOICE

Scores = Literal["softmax", "softmax_chosen", "sigmoid", "sigmoid_chosen"]


class RoutingTotals(NamedTuple):
    """Totals of the global batch; losses of a microbatch are divided by them, so that they add up."""

    tokens: jax.Array
    """Number of tokens other than padding, at least 1."""
    sequences: jax.Array
    """Number of sequences with such a token, at least 1."""
    load: jax.Array | None = None
    """Choices of each expert [X]; None: this microbatch is the whole global batch, which counts its own."""


class Routed(NamedTuple):
    """The experts of every token; indices from 0, X for no expert."""

    chosen_BLK: jax.Array
    """Experts of a token, best first, int32; X for padding."""
    weights_BLK: jax.Array
    """Weights of their outputs; 0 for no expert."""
    shares_BLX: jax.Array
    """Scores normalised to sum 1 over all experts, for the balancing losses; 0 for padding."""


def route(
    logits_BLX: jax.Array,
    real_BL: jax.Array,
    top_k: int,
    scores: Scores,
    correction_X: jax.Array | None = None,
    groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
) -> Routed:
    """The top_k experts of each real token; ties go to the lower index, padding to no expert.

    correction_X is added to the scores for the choice only (Wang et al. 2024). With groups, a token chooses among the
    experts of its top_groups best groups. A group is rated by the sum of its two best scores for sigmoid (DeepSeek-V3),
    by its best score for softmax (DeepSeek-V2). Weights are scores times scale; *_chosen first divides the scores by
    their sum over the chosen experts.
    """
    X = logits_BLX.shape[-1]
    logits_BLX = logits_BLX.astype(jnp.float32)
    sigmoid = scores.startswith("sigmoid")
    scores_BLX = jax.nn.sigmoid(logits_BLX) if sigmoid else jax.nn.softmax(logits_BLX)
    choice_BLX = lax.stop_gradient(scores_BLX)
    if correction_X is not None:
        choice_BLX += lax.stop_gradient(correction_X)
    if top_groups < groups:
        choice_BLX = _best_groups(choice_BLX, groups, top_groups, 2 if sigmoid else 1)
    # Saved under every remat policy: rounding may differ where scores are computed again, and with it the choice.
    chosen_BLK = checkpoint_name(lax.top_k(choice_BLX, top_k)[1], CHOICE)
    weights_BLK = jnp.take_along_axis(scores_BLX, chosen_BLK, axis=-1)
    if scores.endswith("_chosen"):
        weights_BLK /= jnp.sum(weights_BLK, axis=-1, keepdims=True) + 1e-20
    shares_BLX = scores_BLX / jnp.sum(scores_BLX, axis=-1, keepdims=True) if sigmoid else scores_BLX
    real_BL1 = real_BL[..., None]
    return Routed(
        jnp.where(real_BL1, chosen_BLK, X),
        jnp.where(real_BL1, weights_BLK * scale, 0.0),
        jnp.where(real_BL1, shares_BLX, 0.0),
    )


def _best_groups(choice_BLX: jax.Array, groups: int, top_groups: int, best: int) -> jax.Array:
    grouped_BLGx = choice_BLX.reshape(*choice_BLX.shape[:-1], groups, -1)
    best = min(best, grouped_BLGx.shape[-1])
    rating_BLG = jnp.sum(lax.top_k(grouped_BLGx, best)[0], axis=-1)
    top_BLk = lax.top_k(rating_BLG, top_groups)[1]
    inside_BLG = jnp.any(top_BLk[..., None] == jnp.arange(groups), axis=-2)
    return jnp.where(inside_BLG[..., None], grouped_BLGx, -jnp.inf).reshape(choice_BLX.shape)


def visits(chosen_BLK: jax.Array, experts: int) -> jax.Array:
    """Whether a token is routed to an expert: bool [B, L, X]."""
    return jnp.any(chosen_BLK[..., None] == jnp.arange(experts), axis=-2)


def apply_capacity(routed: Routed, order_BL: jax.Array, capacity: int | jax.Array) -> tuple[Routed, jax.Array]:
    """Keep the first `capacity` tokens of a sequence for each expert, by `order_BL`; also the number of drops.

    A dropped choice becomes X with weight 0. Sequences are independent, so the result does not depend on the mesh.
    """
    X = routed.shares_BLX.shape[-1]
    visits_BLX = visits(routed.chosen_BLK, X)
    sorted_BL = jnp.argsort(order_BL, axis=-1, stable=True)
    rank_BL = jnp.argsort(sorted_BL, axis=-1)
    queue_BLX = jnp.cumsum(jnp.take_along_axis(visits_BLX, sorted_BL[..., None], axis=1), axis=1, dtype=jnp.int32)
    full_BLX = jnp.take_along_axis(queue_BLX, rank_BL[..., None], axis=1) > capacity
    dropped_BLK = jnp.any(full_BLX[:, :, None] & (routed.chosen_BLK[..., None] == jnp.arange(X)), axis=-1)
    limited = routed._replace(
        chosen_BLK=jnp.where(dropped_BLK, X, routed.chosen_BLK),
        weights_BLK=jnp.where(dropped_BLK, 0.0, routed.weights_BLK),
    )
    return limited, jnp.sum(dropped_BLK, dtype=jnp.int32)


def load_of(routed: Routed) -> jax.Array:
    """Number of tokens that chose each expert, int32 [X]."""
    return jnp.sum(visits(routed.chosen_BLK, routed.shares_BLX.shape[-1]), axis=(0, 1), dtype=jnp.int32)


def batch_balance(routed: Routed, load_X: jax.Array, totals: RoutingTotals) -> jax.Array:
    """This microbatch's contribution to X sum(f P), which is 1 for an even load (Fedus et al. 2021, eq. 4).

    f is an expert's fraction of all choices of the global batch, without gradient; P is the mean of its normalised
    scores over the tokens of the global batch.
    """
    X, K = routed.shares_BLX.shape[-1], routed.chosen_BLK.shape[-1]
    f_X = load_X if totals.load is None else totals.load
    return X / K * jnp.sum(f_X.astype(jnp.float32) / totals.tokens * mass_of(routed, totals))


def mass_of(routed: Routed, totals: RoutingTotals) -> jax.Array:
    """This microbatch's contribution to the mean of the normalised scores over the tokens of the global batch [X]."""
    return jnp.sum(routed.shares_BLX, axis=(0, 1)) / totals.tokens


def sequence_balance(routed: Routed, real_BL: jax.Array, totals: RoutingTotals) -> jax.Array:
    """This microbatch's contribution to the mean over sequences of X sum(f P) (DeepSeek-V3, eq. 17-20)."""
    X, K = routed.shares_BLX.shape[-1], routed.chosen_BLK.shape[-1]
    tokens_B1 = jnp.maximum(jnp.sum(real_BL, axis=1, dtype=jnp.float32), 1.0)[:, None]
    f_BX = jnp.sum(visits(routed.chosen_BLK, X), axis=1, dtype=jnp.float32) / tokens_B1
    mass_BX = jnp.sum(routed.shares_BLX, axis=1) / tokens_B1
    return X / K * jnp.sum(f_BX * mass_BX) / totals.sequences


def router_z(logits_BLX: jax.Array, real_BL: jax.Array, totals: RoutingTotals) -> jax.Array:
    """This microbatch's contribution to the mean over tokens of logsumexp(logits)^2 (Zoph et al. 2022, eq. 5)."""
    square_BL = jnp.square(jax.nn.logsumexp(logits_BLX.astype(jnp.float32), axis=-1))
    return jnp.sum(jnp.where(real_BL, square_BL, 0.0)) / totals.tokens
