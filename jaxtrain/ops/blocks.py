"""Attention of a block of queries on a block of keys, tile by tile: memory linear in length, forward and backward.

The forward pass returns the log of the softmax's denominator (lse) with the output, so that outputs of several blocks
of keys can be merged. The backward pass takes the merged lse, so that the gradients of the blocks can be summed (Dao et
al. 2022, Liu et al. 2023).

B batch, L queries, M keys, H heads, K kv heads, G query heads a kv head, E head width, V value width, T queries and S
keys of a tile, N query tiles, J key tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Finite: with -inf, a query that sees no key would compute inf - inf.
MASKED = -1e30
"""Added to a masked score; lse of a query that sees no key."""
# Below every visible score: exp(MASKED - FLOOR) is 0 where a query sees no key of a tile.
FLOOR = -1e20

TILE = 512
"""Largest number of queries and keys of a tile: only the scores of one tile exist at a time."""


class TokenPositions(NamedTuple):
    """Document of each token in its sequence (from 1; 0 is padding) and position in the document, int32 [B, L] each."""

    segments: jax.Array
    positions: jax.Array


Window = jax.Array | int | None
"""Number of visible tokens, including the query itself; None: all. May be a traced scalar."""


def visible(queries: TokenPositions, keys: TokenPositions, window: Window = None) -> jax.Array:
    """Which keys a query sees, bool [B, L, M]: those of its document (not padding) with 0 <= distance < window."""
    distance_BLM = queries.positions[:, :, None] - keys.positions[:, None, :]
    near_BLM = distance_BLM >= 0
    if window is not None:
        near_BLM &= distance_BLM < window
    same_BLM = queries.segments[:, :, None] == keys.segments[:, None, :]
    return near_BLM & same_BLM & (queries.segments[:, :, None] > 0)


def forward(
    q_BLHE: jax.Array, k_BMKE: jax.Array, v_BMKV: jax.Array, queries: TokenPositions, keys: TokenPositions,
    window: Window, softcap: float | None, scale: float, ordered: bool = False,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Output [B, L, H, V] and log of the softmax's denominator [B, H, L], both float32.

    A query that sees no key gives 0 and MASKED. `ordered` promises that queries and keys are the same tokens in the
    order of the sequence: tiles wholly in the future, or wholly outside a static window, are then skipped.
    """
    B, L, H = q_BLHE.shape[:3]
    K, V = v_BMKV.shape[2:]
    queries_N, keys_J, q_NBKGTE = _tiled(queries), _tiled(keys), _by_group(q_BLHE, K)
    k_JBKSE, v_JBKSV = _by_head(k_BMKE), _by_head(v_BMKV)

    def on_pair(carry: tuple[jax.Array, ...], pair: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        out_NBKGTV, top_NBKGT, sum_NBKGT = carry
        n, j = pair
        q_BKGTE, v_BKSV = q_NBKGTE[n], v_JBKSV[j]
        scores_BKGTS, _ = _scores(q_BKGTE, k_JBKSE[j], _at(queries_N, n), _at(keys_J, j), window, softcap, scale)
        highest_BKGT = jnp.maximum(top_NBKGT[n], jnp.max(scores_BKGTS, axis=-1))
        weights_BKGTS = jnp.exp(scores_BKGTS - highest_BKGT[..., None])
        rescale_BKGT = jnp.exp(top_NBKGT[n] - highest_BKGT)
        added_BKGTV = _dot("bkgts,bksv->bkgtv", weights_BKGTS.astype(v_BKSV.dtype), v_BKSV)
        return (
            out_NBKGTV.at[n].set(out_NBKGTV[n] * rescale_BKGT[..., None] + added_BKGTV),
            top_NBKGT.at[n].set(highest_BKGT),
            sum_NBKGT.at[n].set(sum_NBKGT[n] * rescale_BKGT + jnp.sum(weights_BKGTS, axis=-1)),
        ), None

    queries_shape = q_NBKGTE.shape[:5]
    outputs, sums = jnp.zeros((*queries_shape, V), jnp.float32), jnp.zeros(queries_shape, jnp.float32)
    start: tuple[jax.Array, ...] = outputs, jnp.full_like(sums, FLOOR), sums
    pairs = _pairs(len(q_NBKGTE), len(k_JBKSE), q_NBKGTE.shape[4], window, ordered)
    (out_NBKGTV, top_NBKGT, sum_NBKGT), _ = lax.scan(on_pair, start, pairs)
    some_NBKGT = sum_NBKGT > 0
    total_NBKGT = jnp.where(some_NBKGT, sum_NBKGT, 1.0)
    lse_NBKGT = jnp.where(some_NBKGT, top_NBKGT + jnp.log(total_NBKGT), MASKED)
    lse_BHL = jnp.moveaxis(lse_NBKGT, 0, 3).reshape(B, H, -1)[..., :L]
    return _by_token(out_NBKGTV / total_NBKGT[..., None], L), lse_BHL


def backward(
    q_BLHE: jax.Array, k_BMKE: jax.Array, v_BMKV: jax.Array, lse_BHL: jax.Array, delta_BHL: jax.Array,
    dout_BLHV: jax.Array, queries: TokenPositions, keys: TokenPositions,
    window: Window, softcap: float | None, scale: float, ordered: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Contributions of this block to the gradients of q, k and v, float32: sum them over all blocks of keys.

    `lse_BHL` is the merged lse of all blocks (and of sinks), `delta_BHL` is `row_delta` of the merged output.
    """
    L, M, K = q_BLHE.shape[1], k_BMKE.shape[1], k_BMKE.shape[2]
    queries_N, keys_J = _tiled(queries), _tiled(keys)
    q_NBKGTE, dout_NBKGTV, k_JBKSE, v_JBKSV = (
        *(_by_group(x, K) for x in (q_BLHE, dout_BLHV)), *map(_by_head, (k_BMKE, v_BMKV)),
    )  # fmt: skip
    # Without the maximum a query that sees no key in any block would compute exp(MASKED - MASKED) = 1.
    lse_NBKGT, delta_NBKGT = (
        _by_group(x_BHL.swapaxes(1, 2)[..., None], K)[..., 0] for x_BHL in (jnp.maximum(lse_BHL, FLOOR), delta_BHL)
    )

    def on_pair(carry: tuple[jax.Array, ...], pair: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        dq_NBKGTE, dk_JBKSE, dv_JBKSV = carry
        n, j = pair
        q_BKGTE, dout_BKGTV, k_BKSE = q_NBKGTE[n], dout_NBKGTV[n], k_JBKSE[j]
        tiles = _at(queries_N, n), _at(keys_J, j)
        scores_BKGTS, derivative_BKGTS = _scores(q_BKGTE, k_BKSE, *tiles, window, softcap, scale)
        weights_BKGTS = jnp.exp(scores_BKGTS - lse_NBKGT[n][..., None])
        dweights_BKGTS = _dot("bkgtv,bksv->bkgts", dout_BKGTV, v_JBKSV[j])
        cotangent_BKGTS = weights_BKGTS * (dweights_BKGTS - delta_NBKGT[n][..., None]) * scale
        if derivative_BKGTS is not None:
            cotangent_BKGTS *= derivative_BKGTS
        cotangent_BKGTS = cotangent_BKGTS.astype(q_BKGTE.dtype)
        return (
            dq_NBKGTE.at[n].add(_dot("bkgts,bkse->bkgte", cotangent_BKGTS, k_BKSE)),
            dk_JBKSE.at[j].add(_dot("bkgts,bkgte->bkse", cotangent_BKGTS, q_BKGTE)),
            dv_JBKSV.at[j].add(_dot("bkgts,bkgtv->bksv", weights_BKGTS.astype(dout_BKGTV.dtype), dout_BKGTV)),
        ), None

    start = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q_NBKGTE, k_JBKSE, v_JBKSV))
    pairs = _pairs(len(q_NBKGTE), len(k_JBKSE), q_NBKGTE.shape[4], window, ordered)
    (dq_NBKGTE, dk_JBKSE, dv_JBKSV), _ = lax.scan(on_pair, start, pairs)
    return _by_token(dq_NBKGTE, L), _by_token(dk_JBKSE[:, :, :, None], M), _by_token(dv_JBKSV[:, :, :, None], M)


def row_delta(out_BLHV: jax.Array, dout_BLHV: jax.Array) -> jax.Array:
    """Sum over V of output times its gradient, float32 [B, H, L]: `backward` subtracts it in each score's gradient."""
    return jnp.einsum("blhv,blhv->bhl", out_BLHV, dout_BLHV, preferred_element_type=jnp.float32)


def merge(
    out_BLHV: jax.Array, lse_BHL: jax.Array, other_BLHV: jax.Array, other_lse_BHL: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Merge output and lse of the same queries on two blocks of keys, float32."""
    merged_lse_BHL = jnp.logaddexp(lse_BHL, other_lse_BHL)
    weight_BLH1, other_weight_BLH1 = (
        jnp.exp(a - merged_lse_BHL).swapaxes(1, 2)[..., None] for a in (lse_BHL, other_lse_BHL)
    )
    return out_BLHV * weight_BLH1 + other_BLHV * other_weight_BLH1, merged_lse_BHL


def add_sinks(out_BLHV: jax.Array, lse_BHL: jax.Array, sinks_H: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Output and lse with each head's sink in the softmax's denominator; a sink has no value."""
    total_BHL = jnp.logaddexp(lse_BHL, sinks_H.astype(jnp.float32)[:, None])
    return out_BLHV * jnp.exp(lse_BHL - total_BHL).swapaxes(1, 2)[..., None], total_BHL


def sinks_gradient(lse_BHL: jax.Array, delta_BHL: jax.Array, sinks_H: jax.Array) -> jax.Array:
    """Gradient of the sinks [H], float32; `lse_BHL` includes them."""
    weight_BHL = jnp.exp(sinks_H.astype(jnp.float32)[:, None] - lse_BHL)
    return -jnp.sum(weight_BHL * delta_BHL, axis=(0, 2))


def _scores(
    q_BKGTE: jax.Array, k_BKSE: jax.Array, queries: TokenPositions, keys: TokenPositions,
    window: Window, softcap: float | None, scale: float,
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """Float32 scores [B, K, G, T, S] with MASKED added where not visible, and the derivative of the soft cap."""
    scores_BKGTS, derivative_BKGTS = _dot("bkgte,bkse->bkgts", q_BKGTE, k_BKSE) * scale, None
    if softcap is not None:
        tanh_BKGTS = jnp.tanh(scores_BKGTS / softcap)
        scores_BKGTS, derivative_BKGTS = softcap * tanh_BKGTS, 1.0 - jnp.square(tanh_BKGTS)
    mask_BTS = jnp.where(visible(queries, keys, window), 0.0, MASKED)
    return scores_BKGTS + mask_BTS[:, None, None], derivative_BKGTS


def _pairs(N: int, J: int, size: int, window: Window, ordered: bool) -> jax.Array:
    """Indices of the query tile and key tile of every pair that may have a visible score, [pairs, 2]; static."""
    n, j = np.indices((N, J), np.int32).reshape(2, -1)
    if ordered:
        farthest = N * size if window is None or isinstance(window, jax.Array) else int(window)
        # The nearest two tokens of tiles n and j are (n - j - 1) size + 1 apart.
        visible_pairs = (j <= n) & ((n - j - 1) * size + 1 < farthest)
        n, j = n[visible_pairs], j[visible_pairs]
    return jnp.asarray(np.stack([n, j], axis=1))


def _tile(length: int) -> tuple[int, int]:
    """Number and size of the tiles of a length: of equal size, with as little padding as possible."""
    tiles = -(-length // TILE)
    return tiles, -(-length // tiles)


def _cut(x_BL: jax.Array) -> jax.Array:
    """[B, L, ...] -> [N, B, T, ...], padded with zeros."""
    B, L = x_BL.shape[:2]
    tiles, size = _tile(L)
    padded = jnp.pad(x_BL, ((0, 0), (0, tiles * size - L), *((0, 0),) * (x_BL.ndim - 2)))
    return jnp.moveaxis(padded.reshape(B, tiles, size, *x_BL.shape[2:]), 1, 0)


def _tiled(tokens: TokenPositions) -> TokenPositions:
    return TokenPositions(_cut(tokens.segments), _cut(tokens.positions))


def _at(tokens: TokenPositions, index: jax.Array) -> TokenPositions:
    return TokenPositions(tokens.segments[index], tokens.positions[index])


def _by_head(x_BMKE: jax.Array) -> jax.Array:
    """[B, M, K, E] -> [J, B, K, S, E]."""
    return _cut(x_BMKE).swapaxes(2, 3)


def _by_group(x_BLHE: jax.Array, K: int) -> jax.Array:
    """[B, L, H, E] -> [N, B, K, G, T, E]."""
    B, L, H, E = x_BLHE.shape
    return jnp.moveaxis(_cut(x_BLHE.reshape(B, L, K, H // K, E)), 2, 4)


def _by_token(x_NBKGTE: jax.Array, L: int) -> jax.Array:
    """The inverse of `_by_group`, without the padding."""
    N, B, K, G, T, E = x_NBKGTE.shape
    return jnp.moveaxis(x_NBKGTE, (0, 4), (1, 2)).reshape(B, N * T, K * G, E)[:, :L]


def _dot(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)
