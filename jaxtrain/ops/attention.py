"""Attention over packed rows.

B batch, L length (queries), M length (keys), H heads, K kv heads, G query heads a kv head, E head width.
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
    window: jax.Array | int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Causal attention inside each segment of a row, softmax in float32, scores scaled by 1/sqrt(E); [B, L, H, E].

    A query sees the keys at or before its index that share its segment; segment 0 is padding, which sees nothing and
    gives zeros. `window` counts visible keys, oneself included; `softcap` bounds scores (Gemma 2).
    """
    B, L, H, E = q_BLHE.shape
    K = k_BLKE.shape[2]
    q_BKGLE = q_BLHE.reshape(B, L, K, H // K, E).transpose(0, 2, 3, 1, 4)
    k_BKME, v_BKME = k_BLKE.transpose(0, 2, 1, 3), v_BLKE.transpose(0, 2, 1, 3)
    scores_BKGLM = jnp.einsum("bkgle,bkme->bkglm", q_BKGLE, k_BKME, preferred_element_type=jnp.float32) * E**-0.5
    if softcap is not None:
        scores_BKGLM = softcap * jnp.tanh(scores_BKGLM / softcap)
    seen_BLM = visible(segments_BL, window)
    weights_BKGLM = jax.nn.softmax(jnp.where(seen_BLM[:, None, None], scores_BKGLM, HIDDEN), axis=-1)
    out_BKGLE = jnp.einsum(
        "bkglm,bkme->bkgle", weights_BKGLM.astype(v_BLKE.dtype), v_BKME, preferred_element_type=jnp.float32
    )
    out_BLHE = out_BKGLE.transpose(0, 3, 1, 2, 4).reshape(B, L, H, E).astype(q_BLHE.dtype)
    return jnp.where(segments_BL[:, :, None, None] > 0, out_BLHE, 0)


def visible(segments_BL: jax.Array, window: jax.Array | int | None = None) -> jax.Array:
    """Which key (last dim) a query (middle dim) may see: bool [B, L, L]; a query of segment 0 has no promise."""
    order = jnp.arange(segments_BL.shape[1])
    distance_LM = order[:, None] - order[None, :]
    near_LM = distance_LM >= 0
    if window is not None:
        near_LM &= distance_LM < window
    return near_LM & (segments_BL[:, :, None] == segments_BL[:, None, :])
