"""Cross entropy of a vocabulary head, a few rows of logits at a time.

B batch, L length, C length of a chunk, N chunks, D model, V vocabulary, G batch shards, T rows of a shard.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.mesh.rules import constrain

IGNORE = -1
"""Label of a position that is not scored."""

# Tokens of a row whose logits exist at once: few enough that logits never fill the memory, and, since each chunk reads
# and writes the whole [D, V] gradient of the head, enough to pay for that.
CHUNK_TOKENS = 256
CHUNK_TOKENS_PER_WIDTH = 1 / 4

# The gradient of logits lies in [-1, 1]; in float16 most of it would vanish before the loss scale reaches it.
FLOAT16_SHIFT = 2.0**15


def cross_entropy(
    x_BLD: jax.Array, w_DV: jax.Array, labels_BL: jax.Array, softcap: float | None = None, batch_shards: int = 1
) -> tuple[jax.Array, jax.Array]:
    """Sum of -log softmax(x @ w)[label] over scored positions (float32) and their number (int32).

    Labels of IGNORE are not scored; a batch without any gives (0, 0) and zero gradients. The vocabulary may be sharded:
    nothing gathers over it. Under differentiation the gradients of x and w are made in the forward pass, chunk by
    chunk, so that logits are computed once and never kept. `batch_shards` says over how many devices the batch is split
    (it divides B): each sums its own gradient of w over chunks, and they are reduced once after the last.
    """
    x_BLD = constrain(x_BLD, "batch", "length", "hidden")
    chunks = _chunks(x_BLD.shape[1], x_BLD.shape[2])
    return _loss_sum(x_BLD, w_DV, labels_BL, softcap, chunks, batch_shards), jnp.sum(
        labels_BL != IGNORE, dtype=jnp.int32
    )


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """cap * tanh(x / cap), or x itself without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def _chunks(L: int, D: int) -> int:
    """The largest number of chunks of a row, each long enough."""
    shortest = max(CHUNK_TOKENS, D * CHUNK_TOKENS_PER_WIDTH)
    return next(n for n in range(L, 0, -1) if L % n == 0 and (L / n >= shortest or n == 1))


def _split(x_BL: jax.Array, chunks: int) -> jax.Array:
    """[B, L, ...] -> [N, B, C, ...]; every N-th token, so that each chunk has a share of every shard of length."""
    B, L = x_BL.shape[:2]
    return jnp.moveaxis(x_BL.reshape(B, L // chunks, chunks, *x_BL.shape[2:]), 2, 0)


def _join(x_NBC: jax.Array) -> jax.Array:
    """The inverse of `_split`."""
    N, B, C = x_NBC.shape[:3]
    return jnp.moveaxis(x_NBC, 0, 2).reshape(B, C * N, *x_NBC.shape[3:])


def _chunk_loss(
    x_BCD: jax.Array, w_DV: jax.Array, labels_BC: jax.Array, softcap: float | None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Loss sum; capped logits and hits [B, C, V] (the label's place); log of the softmax's denominator [B, C]."""
    logits_BCV = jnp.einsum("bcd,dv->bcv", x_BCD, w_DV, preferred_element_type=jnp.float32)
    logits_BCV = soft_cap(constrain(logits_BCV, "batch", "length", "vocab"), softcap)
    # A comparison, not take_along_axis: it stays local when the vocabulary is sharded.
    hits_BCV = labels_BC[..., None] == jnp.arange(w_DV.shape[1], dtype=labels_BC.dtype)
    lse_BC = jax.nn.logsumexp(logits_BCV, axis=-1)
    label_logit_BC = jnp.sum(jnp.where(hits_BCV, logits_BCV, 0.0), axis=-1)
    loss = jnp.sum(jnp.where(labels_BC != IGNORE, lse_BC - label_logit_BC, 0.0))
    return loss, logits_BCV, hits_BCV, lse_BC


def _head_gradient(x_BCD: jax.Array, slope_BCV: jax.Array, shards: int) -> jax.Array:
    """x^T slope of each batch shard by itself, float32 [G, D, V]; of one shard [D, V]."""
    if shards == 1:  # a dim of one would keep the compiler from fusing slope into the product
        return jnp.einsum("bcd,bcv->dv", x_BCD, slope_BCV, preferred_element_type=jnp.float32)
    x_GTCD, slope_GTCV = (a.reshape(shards, -1, *a.shape[1:]) for a in (x_BCD, slope_BCV))
    return jnp.einsum("gtcd,gtcv->gdv", x_GTCD, slope_GTCV, preferred_element_type=jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _loss_sum(
    x_BLD: jax.Array, w_DV: jax.Array, labels_BL: jax.Array, softcap: float | None, chunks: int, shards: int
) -> jax.Array:
    def chunk(total: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return total + _chunk_loss(part[0], w_DV, part[1], softcap)[0], None

    return lax.scan(chunk, jnp.float32(0), (_split(x_BLD, chunks), _split(labels_BL, chunks)))[0]


def _forward(
    x_BLD: jax.Array, w_DV: jax.Array, labels_BL: jax.Array, softcap: float | None, chunks: int, shards: int
) -> tuple[jax.Array, Any]:
    shift = FLOAT16_SHIFT if x_BLD.dtype == jnp.float16 else 1.0
    group, names = ((shards,), ("batch", None, "vocab")) if shards > 1 else ((), (None, "vocab"))

    def chunk(carry: tuple[jax.Array, jax.Array], part: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        (total, dw_GDV), (x_BCD, labels_BC) = carry, part
        loss, logits_BCV, hits_BCV, lse_BC = _chunk_loss(x_BCD, w_DV, labels_BC, softcap)
        slope_BCV = jnp.exp(logits_BCV - lse_BC[..., None]) - hits_BCV
        if softcap is not None:
            slope_BCV *= 1.0 - jnp.square(logits_BCV / softcap)
        slope_BCV = jnp.where((labels_BC != IGNORE)[..., None], slope_BCV * shift, 0.0).astype(x_BCD.dtype)
        dx_BCD = jnp.einsum("bcv,dv->bcd", slope_BCV, w_DV, preferred_element_type=jnp.float32) / shift
        dw_GDV += _head_gradient(x_BCD, slope_BCV, shards) / shift
        return (total + loss, constrain(dw_GDV, *names)), dx_BCD

    start = (jnp.float32(0), jnp.zeros((*group, *w_DV.shape), jnp.float32))
    (total, dw_GDV), dx_NBCD = lax.scan(chunk, start, (_split(x_BLD, chunks), _split(labels_BL, chunks)))
    return total, (
        _join(dx_NBCD),
        dw_GDV.sum(0) if group else dw_GDV,
        jnp.zeros((), x_BLD.dtype),
        jnp.zeros((), w_DV.dtype),
    )


def _backward(
    softcap: float | None, chunks: int, shards: int, kept: Any, slope: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    dx_BLD, dw_DV, x_like, w_like = kept
    return (dx_BLD * slope).astype(x_like.dtype), (dw_DV * slope).astype(w_like.dtype), None


_loss_sum.defvjp(_forward, _backward)
