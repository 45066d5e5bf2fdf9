"""Attention over packed rows.

B batch, L length (queries), M length (keys), H heads, K kv heads, E head width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Finite, so that a row with nothing visible has no inf - inf; far below any score.
HIDDEN = -1e30


def attend(
    q_BLHE: jax.Array,
    k_BLKE: jax.Array,
    v_BLKE: jax.Array,
    segments_BL: jax.Array,
    positions_BL: jax.Array | None = None,
    window: jax.Array | int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks_H: jax.Array | None = None,
) -> jax.Array:
    """Causal attention inside each segment of a row, softmax in float32; [B, L, H, width of a value].

    A query sees the keys of its segment at or before its position; segment 0 is padding, which sees nothing and gives
    zeros. `positions_BL` None is the order of the row. `window` counts visible keys, oneself included; `softcap` bounds
    scores (Gemma 2); `scale` multiplies them, None is 1/sqrt(E); `sinks_H` are scores that join the softmax and add
    nothing (gpt-oss).
    """
    H, E = q_BLHE.shape[2:]
    # Heads before length: batched matmuls of plain matrices. Repeated keys cost little beside the scores, keep the
    # heads one dim, so that any mesh axis that divides them can shard them, and are what the CPU is fastest with.
    k_BMHE, v_BMHE = (jnp.repeat(a, H // a.shape[2], axis=2) for a in (k_BLKE, v_BLKE))
    q_BHLE, k_BHME, v_BHME = (a.swapaxes(1, 2) for a in (q_BLHE, k_BMHE, v_BMHE))
    scores_BHLM = jnp.einsum("bhle,bhme->bhlm", q_BHLE, k_BHME, preferred_element_type=jnp.float32)
    scores_BHLM *= E**-0.5 if scale is None else scale
    if softcap is not None:
        scores_BHLM = softcap * jnp.tanh(scores_BHLM / softcap)
    # Added, not selected: one array for all heads, and a sum has a cheaper gradient than a select.
    hidden_BLM = jnp.where(visible(segments_BL, positions_BL, window), 0.0, HIDDEN)
    scores_BHLM += hidden_BLM[:, None]
    if sinks_H is None:
        weights_BHLM = jax.nn.softmax(scores_BHLM, axis=-1)
    else:
        sinks_BHL1 = jnp.broadcast_to(sinks_H.astype(jnp.float32)[:, None, None], (*scores_BHLM.shape[:3], 1))
        weights_BHLM = jax.nn.softmax(jnp.concatenate([scores_BHLM, sinks_BHL1], axis=-1), axis=-1)[..., :-1]
    weights_BHLM = weights_BHLM.astype(v_BLKE.dtype)
    out_BHLE = jnp.einsum("bhlm,bhme->bhle", weights_BHLM, v_BHME, preferred_element_type=jnp.float32)
    out_BLHE = out_BHLE.swapaxes(1, 2).astype(q_BLHE.dtype)
    return jnp.where(segments_BL[:, :, None, None] > 0, out_BLHE, 0)


def visible(
    segments_BL: jax.Array, positions_BL: jax.Array | None = None, window: jax.Array | int | None = None
) -> jax.Array:
    """Which key (last dim) a query (middle dim) may see: bool [B, L, L]; a query of segment 0 has no promise."""
    order_BL = jnp.arange(segments_BL.shape[1])[None] if positions_BL is None else positions_BL
    distance_BLM = order_BL[:, :, None] - order_BL[:, None, :]
    near_BLM = distance_BLM >= 0
    if window is not None:
        near_BLM &= distance_BLM < window
    return near_BLM & (segments_BL[:, :, None] == segments_BL[:, None, :])
