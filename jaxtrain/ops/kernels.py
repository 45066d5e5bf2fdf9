"""Attention kernels behind one interface: a block of queries, a block of keys, and the visibility between them.

B batch, P queries of a block, M its keys, H heads, E head width, V value width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.ops import blocks
from jaxtrain.ops.blocks import MASKED, TokenPositions, Window

Triple = tuple[jax.Array, jax.Array, jax.Array]


class Visibility(NamedTuple):
    """Which keys a block of queries sees, in two forms: tokens for kernels of any order, ranges for keys in order.

    A query sees at most the keys `first` to `end` of the block (exclusive), int32 [B, P]. `end` None: to the last key
    or, if the block is `ordered`, to the query itself. `ordered`: queries and keys are the same tokens, in the order of
    the sequence.
    """

    queries: TokenPositions
    keys: TokenPositions
    first_BP: jax.Array
    end_BP: jax.Array | None = None
    ordered: bool = False


class ScoreOptions(NamedTuple):
    """Options of the scores: s = scale * q k, then softcap * tanh(s / softcap), for keys within the window."""

    window: Window
    softcap: float | None
    scale: float


class AttentionResiduals(NamedTuple):
    """Inputs of a backward pass for a block of queries: output, lse over all keys, output gradient, `row_delta`."""

    out_BPHV: jax.Array
    lse_BHP: jax.Array
    dout_BPHV: jax.Array
    delta_BHP: jax.Array


class Kernel(NamedTuple):
    """Attention of one block.

    forward(q, k, v, visibility, options) -> output [B, P, H, V] and lse [B, H, P], MASKED for a query without keys;
    backward(q, k, v, residuals, visibility, options) -> the contributions of this block to the gradients of q, k and v.
    """

    forward: Callable[[jax.Array, jax.Array, jax.Array, Visibility, ScoreOptions], tuple[jax.Array, jax.Array]]
    backward: Callable[[jax.Array, jax.Array, jax.Array, AttentionResiduals, Visibility, ScoreOptions], Triple]


def first_keys(tokens: TokenPositions, window: Window) -> jax.Array:
    """Index of the first key that each query of a sequence sees, int32 [B, L]; L, past the end, for padding.

    Tokens are in the order of the sequence: documents are contiguous, with positions from 0.
    """
    L = tokens.positions.shape[1]
    distance = tokens.positions if window is None else jnp.minimum(tokens.positions, window - 1)
    return jnp.where(tokens.segments > 0, jnp.arange(L) - distance, L).astype(jnp.int32)


def _tiles_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, visibility: Visibility, options: ScoreOptions
) -> tuple[jax.Array, jax.Array]:
    return blocks.forward(q, k, v, visibility.queries, visibility.keys, *options, visibility.ordered)


def _tiles_backward(
    q: jax.Array, k: jax.Array, v: jax.Array, residuals: AttentionResiduals, visibility: Visibility,
    options: ScoreOptions,
) -> Triple:  # fmt: skip
    sums = residuals.lse_BHP, residuals.delta_BHP, residuals.dout_BPHV
    return blocks.backward(q, k, v, *sums, visibility.queries, visibility.keys, *options, visibility.ordered)


TILES = Kernel(_tiles_forward, _tiles_backward)
"""Tiles in plain JAX (ops/blocks.py): runs on every platform."""


def _mosaic_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, visibility: Visibility, options: ScoreOptions
) -> tuple[jax.Array, jax.Array]:
    from tokamax._src.ops.attention.pallas_mosaic_gpu import PallasMosaicGpuFlashAttention

    out_BPHV, (top_BHP, sum_BHP) = PallasMosaicGpuFlashAttention()(
        q,
        k,
        v,
        logits_scale=options.scale,
        logits_soft_cap=options.softcap,
        mask=_mask(visibility),
        return_residuals=True,
    )
    some_BHP = sum_BHP > 0
    lse_BHP = jnp.where(some_BHP, top_BHP + jnp.log(jnp.where(some_BHP, sum_BHP, 1.0)), MASKED)
    return jnp.where(some_BHP.swapaxes(1, 2)[..., None], out_BPHV, 0), lse_BHP


def _mosaic_backward(
    q: jax.Array, k: jax.Array, v: jax.Array, residuals: AttentionResiduals, visibility: Visibility,
    options: ScoreOptions,
) -> Triple:  # fmt: skip
    from tokamax._src.ops.attention.pallas_mosaic_gpu import PallasMosaicGpuFlashAttention

    # For a query without keys, lse = -MASKED makes every weight exp(score - lse) 0.
    lse_BHP = jnp.where(residuals.lse_BHP > blocks.FLOOR, residuals.lse_BHP, -MASKED)
    gradients = PallasMosaicGpuFlashAttention().vjp(
        (lse_BHP, jnp.ones_like(lse_BHP)), residuals.out_BPHV.astype(q.dtype), residuals.dout_BPHV.astype(q.dtype),
        q, k, v,
        precision=(jax.lax.DotAlgorithmPreset.DEFAULT,) * 2, logits_dtype=jnp.dtype(jnp.float32),
        logits_scale=options.scale, bias=None, logits_soft_cap=options.softcap, mask=_mask(visibility),
        dropout_mask=None, dropout_rate=0.0, paging_info=None, q_indices=None, k_indices=None, normalize_output=True,
        return_residuals=False,
    )  # fmt: skip
    return gradients["q"], gradients["k"], gradients["v"]


def _mask(visibility: Visibility) -> Any:
    """The window is part of `first`: given as a local window it would make the kernel visit every block."""
    from tokamax._src.ops.attention.base import Mask

    end = None if visibility.end_BP is None else visibility.end_BP[:, None]
    return Mask(k_start=visibility.first_BP[:, None], k_end=end, is_causal=visibility.ordered)


MOSAIC = Kernel(_mosaic_forward, _mosaic_backward)
"""tokamax' Mosaic kernel for Hopper and Blackwell, float16 and bfloat16; needs keys in sequence order."""


def _cudnn_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, visibility: Visibility, options: ScoreOptions
) -> tuple[jax.Array, jax.Array]:
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    kind = _cudnn_mask(cudnn, visibility)
    return cudnn.dot_product_attention(q, k, v, scale=options.scale, mask_type=kind, return_residual=True)


def _cudnn_backward(
    q: jax.Array, k: jax.Array, v: jax.Array, residuals: AttentionResiduals, visibility: Visibility,
    options: ScoreOptions,
) -> Triple:  # fmt: skip
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    # The public function uses the lse of this block; the gradient needs the lse over all blocks.
    absent = jnp.zeros(0, q.dtype)
    dq, dk, dv = cudnn._dot_product_attention_bwd_p_wrapper.bind(
        q, k, v, *(absent,) * 7, residuals.lse_BHP, residuals.out_BPHV.astype(q.dtype),
        residuals.dout_BPHV.astype(q.dtype), scale=options.scale, seed=0, dropout_rate=0.0,
        variadic_args=(False, False), mask_type=_cudnn_mask(cudnn, visibility),
        layout=cudnn.AttentionLayout.BTNH.value, sliding_window_length=None, score_mod=None,
    )  # fmt: skip
    return dq, dk, dv


def _cudnn_mask(cudnn: Any, visibility: Visibility) -> Any:
    assert visibility.end_BP is None, "cuDNN attends to the keys up to the query, or to all keys of a block"
    return cudnn.MaskType.CAUSAL if visibility.ordered else cudnn.MaskType.NO_MASK


CUDNN = Kernel(_cudnn_forward, _cudnn_backward)
"""cuDNN's kernel for sequences of one document without a window; outputs of padding are undefined."""
