"""Cross entropy of a vocabulary head, computed in chunks of tokens.

B batch, L sequence length, C length of a chunk, N chunks, D model, V vocabulary, G batch shards, T sequences of a
shard, S length shards, U tokens of a shard's chunk.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.mesh.constraints import active_axes, active_mesh, constrain
from jaxtrain.numerics.labels import IGNORE

# Smallest number of tokens of a chunk. Smaller chunks need less memory for logits, but each chunk reads and writes the
# whole [D, V] gradient of the head.
CHUNK_TOKENS = 256
CHUNK_TOKENS_PER_WIDTH = 1 / 4

# The gradient of logits is in [-1, 1]. In float16 most of it would underflow before the loss scale is applied.
FLOAT16_SHIFT = 2.0**15


LossTotals = tuple[jax.Array, jax.Array]
"""Sums over scored positions: -log softmax(x @ w)[label], logsumexp(x @ w) squared."""


class _LossOptions(NamedTuple):
    softcap: float | None
    z_weight: float
    chunks: int
    shards: tuple[int, int]
    """Number of shards of the batch and of the length."""
    rows: int | None
    """Columns of the head that are tokens; None: all."""


def cross_entropy(
    x_BLD: jax.Array, w_DV: jax.Array, labels_BL: jax.Array, softcap: float | None = None, batch_shards: int = 1,
    rows: int | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Sum of -log softmax(x @ w)[label] over scored positions (float32) and their number (int32): see `loss_sums`."""
    loss, sums = loss_sums(x_BLD, w_DV, labels_BL, softcap, batch_shards, rows=rows)
    return loss, sums["scored"]


def loss_sums(
    x_BLD: jax.Array, w_DV: jax.Array, labels_BL: jax.Array, softcap: float | None = None, batch_shards: int = 1,
    z_weight: float = 0.0, rows: int | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:  # fmt: skip
    """The objective, float32, and sums over scored positions.

    "loss" is -log softmax(x @ w)[label]; "z_loss", present if z_weight is not 0, is z_weight times the square of
    logsumexp(x @ w) (PaLM); "scored" is the number of positions (int32). The objective is loss + z_loss; only it has a
    gradient.

    Columns of w from `rows` on are padding of the vocabulary: no part of the softmax, and without a gradient.
    Labels of IGNORE are not scored; without a scored label the sums and gradients are 0. The vocabulary may be sharded;
    it is not gathered. Under differentiation the forward pass computes the gradients of x and w chunk by chunk, so that
    logits are computed once and not saved. `batch_shards`: over how many devices the batch is sharded (divides B). Each
    device sums its gradient of w over the chunks, and one reduction follows the last.
    """
    x_BLD = constrain(x_BLD, "batch", "seq_len", "hidden")
    L, D = x_BLD.shape[1:]
    mesh = active_mesh()
    length_shards = math.prod(mesh.shape[axis] for axis in active_axes("seq_len")) if mesh is not None else 1
    options = _LossOptions(softcap, z_weight, _chunks(L // length_shards, D), (batch_shards, length_shards), rows)
    objective, totals = _loss_sum(x_BLD, w_DV, labels_BL, options)
    loss, squares = lax.stop_gradient(totals)
    sums = {"loss": loss, "scored": jnp.sum(labels_BL != IGNORE, dtype=jnp.int32)}
    return objective, {**sums, "z_loss": z_weight * squares} if z_weight else sums


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """cap * tanh(x / cap); x without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def mask_padding(logits_V: jax.Array, rows: int | None) -> jax.Array:
    """Logits [..., V] with -inf from index `rows` on, where the vocabulary is padding; None: no padding."""
    return logits_V if rows is None else jnp.where(jnp.arange(logits_V.shape[-1]) < rows, logits_V, -jnp.inf)


def _chunks(L: int, D: int) -> int:
    """The largest number of equal chunks of L tokens (of one device) that are not too short."""
    shortest = max(CHUNK_TOKENS, D * CHUNK_TOKENS_PER_WIDTH)
    return next(n for n in range(L, 0, -1) if L % n == 0 and (L / n >= shortest or n == 1))


def _to_chunks(x_BL: jax.Array, chunks: int) -> jax.Array:
    """[B, L, ...] -> [N, B, C, ...]: a chunk is every N-th token, so that it has tokens of every length shard."""
    B, L = x_BL.shape[:2]
    return jnp.moveaxis(x_BL.reshape(B, L // chunks, chunks, *x_BL.shape[2:]), 2, 0)


def _from_chunks(x_NBC: jax.Array) -> jax.Array:
    """The inverse of `_to_chunks`."""
    N, B, C = x_NBC.shape[:3]
    return jnp.moveaxis(x_NBC, 0, 2).reshape(B, C * N, *x_NBC.shape[3:])


class _ChunkLoss(NamedTuple):
    """Sums, capped logits [B, C, V], one-hot labels [B, C, V], log of the softmax's denominator [B, C]."""

    totals: LossTotals
    logits_BCV: jax.Array
    onehot_BCV: jax.Array
    lse_BC: jax.Array


def _chunk_loss(x_BCD: jax.Array, w_DV: jax.Array, labels_BC: jax.Array, options: _LossOptions) -> _ChunkLoss:
    logits_BCV = jnp.einsum("bcd,dv->bcv", x_BCD, w_DV, preferred_element_type=jnp.float32)
    logits_BCV = soft_cap(constrain(logits_BCV, "batch", "seq_len", "vocab"), options.softcap)
    logits_BCV = mask_padding(logits_BCV, options.rows)
    # Unlike take_along_axis, a comparison needs no communication when the vocabulary is sharded.
    onehot_BCV = labels_BC[..., None] == jnp.arange(w_DV.shape[1], dtype=labels_BC.dtype)
    lse_BC = jax.nn.logsumexp(logits_BCV, axis=-1)
    label_logit_BC = jnp.sum(jnp.where(onehot_BCV, logits_BCV, 0.0), axis=-1)
    scored_BC = labels_BC != IGNORE
    loss, squares = (jnp.sum(jnp.where(scored_BC, x_BC, 0.0)) for x_BC in (lse_BC - label_logit_BC, jnp.square(lse_BC)))
    return _ChunkLoss((loss, squares), logits_BCV, onehot_BCV, lse_BC)


def _chunk_cotangent(chunk: _ChunkLoss, labels_BC: jax.Array, options: _LossOptions) -> jax.Array:
    """Gradient of the objective with respect to the logits before the cap, float32 [B, C, V]."""
    softmax_BCV = jnp.exp(chunk.logits_BCV - chunk.lse_BC[..., None])
    if options.z_weight:
        softmax_BCV *= 1.0 + 2.0 * options.z_weight * chunk.lse_BC[..., None]
    cotangent_BCV = softmax_BCV - chunk.onehot_BCV
    if options.softcap is not None:
        cotangent_BCV *= 1.0 - jnp.square(chunk.logits_BCV / options.softcap)
    if options.rows is not None:  # the cap's derivative at -inf is not a number
        cotangent_BCV = jnp.where(jnp.arange(cotangent_BCV.shape[-1]) < options.rows, cotangent_BCV, 0.0)
    return jnp.where((labels_BC != IGNORE)[..., None], cotangent_BCV, 0.0)


def _shift(chunk: _ChunkLoss, labels_BC: jax.Array, options: _LossOptions, dtype: jnp.dtype) -> jax.Array | float:
    """A power of two by which the cotangent of the logits is multiplied before it is rounded, 1 except in float16."""
    if dtype != jnp.float16:
        return 1.0
    if not options.z_weight:
        return FLOAT16_SHIFT
    # With a z-loss the cotangent is as large as 1 + 2 z_weight logsumexp, whatever the loss scale.
    largest = jnp.max(jnp.where(labels_BC != IGNORE, jnp.abs(chunk.lse_BC), 0.0))
    # A thousandth more: 2 x FLOAT16_SHIFT is not finite in float16.
    _, exponent = jnp.frexp(1.001 * (1.0 + 2.0 * options.z_weight * largest))
    return jnp.ldexp(jnp.float32(FLOAT16_SHIFT), 1 - exponent)


def _narrow(w_DV: jax.Array, x_BLD: jax.Array) -> jax.Array:
    """The head in the dtype of its input; a sharded D (FSDP) is gathered here, once for all chunks."""
    return constrain(w_DV.astype(x_BLD.dtype), None, "vocab")


def _head_gradient(x_BCD: jax.Array, cotangent_BCV: jax.Array, shards: tuple[int, int]) -> jax.Array:
    """x^T cotangent of each shard, float32 [G, S, D, V]; [D, V] for a single shard."""
    if shards == (1, 1):  # dims of size one would prevent the fusion of the cotangent into the product
        return jnp.einsum("bcd,bcv->dv", x_BCD, cotangent_BCV, preferred_element_type=jnp.float32)
    G, S = shards
    x_GTSUD, cotangent_GTSUV = (
        a.reshape(G, a.shape[0] // G, S, a.shape[1] // S, a.shape[2]) for a in (x_BCD, cotangent_BCV)
    )
    return jnp.einsum("gtsud,gtsuv->gsdv", x_GTSUD, cotangent_GTSUV, preferred_element_type=jnp.float32)


def _add(a: LossTotals, b: LossTotals) -> LossTotals:
    return a[0] + b[0], a[1] + b[1]


def _with_objective(totals: LossTotals, options: _LossOptions) -> tuple[jax.Array, LossTotals]:
    loss, squares = totals
    return loss + options.z_weight * squares if options.z_weight else loss, totals


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _loss_sum(
    x_BLD: jax.Array, w_DV: jax.Array, labels_BL: jax.Array, options: _LossOptions
) -> tuple[jax.Array, LossTotals]:
    head_DV = _narrow(w_DV, x_BLD)

    def step(totals: LossTotals, part: tuple[jax.Array, jax.Array]) -> tuple[LossTotals, None]:
        return _add(totals, _chunk_loss(part[0], head_DV, part[1], options).totals), None

    parts = _to_chunks(x_BLD, options.chunks), _to_chunks(labels_BL, options.chunks)
    return _with_objective(lax.scan(step, (jnp.float32(0), jnp.float32(0)), parts)[0], options)


def _forward(
    x_BLD: jax.Array, w_DV: jax.Array, labels_BL: jax.Array, options: _LossOptions
) -> tuple[tuple[jax.Array, LossTotals], Any]:
    head_DV = _narrow(w_DV, x_BLD)
    single = options.shards == (1, 1)
    # A batch of a single shard may still be under an outer vmap.
    batch = "batch" if options.shards[0] > 1 else None
    lead, names = ((), ()) if single else (options.shards, (batch, "seq_len"))

    def step(carry: tuple[LossTotals, jax.Array], part: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        (totals, dw_GSDV), (x_BCD, labels_BC) = carry, part
        chunk = _chunk_loss(x_BCD, head_DV, labels_BC, options)
        shift = _shift(chunk, labels_BC, options, x_BCD.dtype)
        cotangent_BCV = (_chunk_cotangent(chunk, labels_BC, options) * shift).astype(x_BCD.dtype)
        dx_BCD = jnp.einsum("bcv,dv->bcd", cotangent_BCV, head_DV, preferred_element_type=jnp.float32) / shift
        dw_GSDV += _head_gradient(x_BCD, cotangent_BCV, options.shards) / shift
        return (_add(totals, chunk.totals), constrain(dw_GSDV, *names, None, "vocab")), dx_BCD

    start = (jnp.float32(0), jnp.float32(0)), jnp.zeros((*lead, *w_DV.shape), jnp.float32)
    parts = _to_chunks(x_BLD, options.chunks), _to_chunks(labels_BL, options.chunks)
    (totals, dw_GSDV), dx_NBCD = lax.scan(step, start, parts)
    # Devices add up their sums in the dtype of the gradient; jnp.sum would widen it.
    dw_DV = dw_GSDV if single else lax.reduce(dw_GSDV.astype(w_DV.dtype), jnp.zeros((), w_DV.dtype), lax.add, (0, 1))
    residuals = _from_chunks(dx_NBCD), dw_DV, jnp.zeros((), x_BLD.dtype), jnp.zeros((), w_DV.dtype)
    return _with_objective(totals, options), residuals


def _backward(
    options: _LossOptions, residuals: Any, cotangents: tuple[jax.Array, LossTotals]
) -> tuple[jax.Array, jax.Array, None]:
    dx_BLD, dw_DV, x_like, w_like = residuals
    cotangent, _ = cotangents
    return (dx_BLD * cotangent).astype(x_like.dtype), (dw_DV * cotangent).astype(w_like.dtype), None


_loss_sum.defvjp(_forward, _backward)
