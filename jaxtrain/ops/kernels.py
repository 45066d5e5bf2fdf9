"""Kernels of attention behind one interface: a block of queries, a block of keys, and what the ones see of the others.

B batch, P queries of a block, M its keys, H heads, E head width, V value width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.ops import blocks
from jaxtrain.ops.blocks import HIDDEN, TokenPositions, Window

Triple = tuple[jax.Array, jax.Array, jax.Array]


class Sight(NamedTuple):
    """What the queries of a block see of its keys, said twice: for tokens in any order, and for keys in row order.

    A query sees keys `first` (at the earliest) to `end` of the block, int32 [B, P]; `end` None is all that follow, or
    all up to the query itself where the block is `ordered`: queries and keys are the same tokens, in row order.
    """

    queries: TokenPositions
    keys: TokenPositions
    first_BP: jax.Array
    end_BP: jax.Array | None = None
    ordered: bool = False


class Score(NamedTuple):
    """What is done with scores: keys in a window, cap * tanh(score / cap), score = scale * q k."""

    window: Window
    softcap: float | None
    scale: float


class Kept(NamedTuple):
    """What the backward pass knows of queries: output, lse over all keys, the output's gradient, their `row_delta`."""

    out_BPHV: jax.Array
    lse_BHP: jax.Array
    dout_BPHV: jax.Array
    delta_BHP: jax.Array


class Kernel(NamedTuple):
    """Attention of a block.

    forward(q, k, v, sight, score) -> output [B, P, H, V], lse [B, H, P], HIDDEN where a query sees nothing;
    backward(q, k, v, kept, sight, score) -> gradients of q, k, v from this block alone.
    """

    forward: Callable[[jax.Array, jax.Array, jax.Array, Sight, Score], tuple[jax.Array, jax.Array]]
    backward: Callable[[jax.Array, jax.Array, jax.Array, Kept, Sight, Score], Triple]


def first_keys(places: TokenPositions, window: Window) -> jax.Array:
    """Index of the first key that each query of a row sees, int32 [B, L]; L, behind the row, for padding.

    The row lies in its own order: documents are unbroken runs with positions from 0.
    """
    L = places.positions.shape[1]
    seen = places.positions if window is None else jnp.minimum(places.positions, window - 1)
    return jnp.where(places.segments > 0, jnp.arange(L) - seen, L).astype(jnp.int32)


def _tiles_forward(q: jax.Array, k: jax.Array, v: jax.Array, sight: Sight, score: Score) -> tuple[jax.Array, jax.Array]:
    return blocks.forward(q, k, v, sight.queries, sight.keys, *score, sight.ordered)


def _tiles_backward(q: jax.Array, k: jax.Array, v: jax.Array, kept: Kept, sight: Sight, score: Score) -> Triple:
    sums = kept.lse_BHP, kept.delta_BHP, kept.dout_BPHV
    return blocks.backward(q, k, v, *sums, sight.queries, sight.keys, *score, sight.ordered)


TILES = Kernel(_tiles_forward, _tiles_backward)
"""Runs everywhere."""


def _mosaic_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, sight: Sight, score: Score
) -> tuple[jax.Array, jax.Array]:
    from tokamax._src.ops.attention.pallas_mosaic_gpu import PallasMosaicGpuFlashAttention

    out_BPHV, (top_BHP, sum_BHP) = PallasMosaicGpuFlashAttention()(
        q, k, v, logits_scale=score.scale, logits_soft_cap=score.softcap, mask=_mask(sight), return_residuals=True
    )
    some_BHP = sum_BHP > 0
    lse_BHP = jnp.where(some_BHP, top_BHP + jnp.log(jnp.where(some_BHP, sum_BHP, 1.0)), HIDDEN)
    return jnp.where(some_BHP.swapaxes(1, 2)[..., None], out_BPHV, 0), lse_BHP


def _mosaic_backward(q: jax.Array, k: jax.Array, v: jax.Array, kept: Kept, sight: Sight, score: Score) -> Triple:
    from tokamax._src.ops.attention.pallas_mosaic_gpu import PallasMosaicGpuFlashAttention

    # A query that sees nothing has weight exp(score + HIDDEN) = 0 on whatever the kernel looks at.
    lse_BHP = jnp.where(kept.lse_BHP > blocks.FLOOR, kept.lse_BHP, -HIDDEN)
    gradients = PallasMosaicGpuFlashAttention().vjp(
        (lse_BHP, jnp.ones_like(lse_BHP)), kept.out_BPHV.astype(q.dtype), kept.dout_BPHV.astype(q.dtype), q, k, v,
        precision=(jax.lax.DotAlgorithmPreset.DEFAULT,) * 2, logits_dtype=jnp.dtype(jnp.float32),
        logits_scale=score.scale, bias=None, logits_soft_cap=score.softcap, mask=_mask(sight), dropout_mask=None,
        dropout_rate=0.0, paging_info=None, q_indices=None, k_indices=None, normalize_output=True,
        return_residuals=False,
    )  # fmt: skip
    return gradients["q"], gradients["k"], gradients["v"]


def _mask(sight: Sight) -> Any:
    """The window stands in `first` already: a window of the kernel's own would have it look at every block."""
    from tokamax._src.ops.attention.base import Mask

    end = None if sight.end_BP is None else sight.end_BP[:, None]
    return Mask(k_start=sight.first_BP[:, None], k_end=end, is_causal=sight.ordered)


MOSAIC = Kernel(_mosaic_forward, _mosaic_backward)
"""tokamax' Mosaic kernel for Hopper and Blackwell, float16 and bfloat16; keys in row order."""


def _cudnn_forward(q: jax.Array, k: jax.Array, v: jax.Array, sight: Sight, score: Score) -> tuple[jax.Array, jax.Array]:
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    kind = _cudnn_mask(cudnn, sight)
    return cudnn.dot_product_attention(q, k, v, scale=score.scale, mask_type=kind, return_residual=True)


def _cudnn_backward(q: jax.Array, k: jax.Array, v: jax.Array, kept: Kept, sight: Sight, score: Score) -> Triple:
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    # The public function keeps its own lse; a block's gradient needs that of all blocks.
    absent = jnp.zeros(0, q.dtype)
    dq, dk, dv = cudnn._dot_product_attention_bwd_p_wrapper.bind(
        q, k, v, *(absent,) * 7, kept.lse_BHP, kept.out_BPHV.astype(q.dtype), kept.dout_BPHV.astype(q.dtype),
        scale=score.scale, seed=0, dropout_rate=0.0, variadic_args=(False, False), mask_type=_cudnn_mask(cudnn, sight),
        layout=cudnn.AttentionLayout.BTNH.value, sliding_window_length=None, score_mod=None,
    )  # fmt: skip
    return dq, dk, dv


def _cudnn_mask(cudnn: Any, sight: Sight) -> Any:
    assert sight.end_BP is None, "cuDNN sees a block's keys up to the query itself, or all of them"
    return cudnn.MaskType.CAUSAL if sight.ordered else cudnn.MaskType.NO_MASK


CUDNN = Kernel(_cudnn_forward, _cudnn_backward)
"""cuDNN's kernel for rows of one document, no window; what padding gives has no meaning."""
