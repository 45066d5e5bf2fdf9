"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): extra blocks, one a further token.

Depth k at place i reads the stream of depth k - 1 at i and token i + k, and predicts the label k places further, the
token i + k + 1, as far as these lie in the document of i. Embedding and head are the main model's.

B batch, L length, D model, E twice D, K depths.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config import ModelConfig
from jaxtrain.mesh.rules import constrain
from jaxtrain.nn.block import Block, Stats, normalise
from jaxtrain.nn.layers import Flow, Linear, Norm, Totals
from jaxtrain.ops.loss import IGNORE


class Further(nnx.Module):
    """One depth: stream and next embedding, each normalised, joined and projected, through a block and a norm."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, mixture: bool) -> None:
        D, eps = config.d_model, config.norm_eps
        self.embed_norm = Norm(config.norm, D, ("norm",), eps)
        self.hidden_norm = Norm(config.norm, D, ("norm",), eps)
        self.project = Linear(rngs, "BLE,ED->BLD", (2 * D, D), ("embed", "whole"), config.init_std, None)
        self.block = Block(config, rngs, mixture)
        self.norm = Norm(config.norm, D, ("norm",), eps)

    def __call__(
        self, x_BLD: jax.Array, next_BLD: jax.Array, flow: Flow, window: int | None, own: Totals
    ) -> tuple[jax.Array, Stats]:
        """The stream after a final norm and the embedding of the next token [B, L, D] -> the same one depth on."""
        both_BLE = jnp.concatenate([normalise(self.embed_norm, next_BLD), normalise(self.hidden_norm, x_BLD)], axis=-1)
        x_BLD = constrain(self.project(both_BLE), "batch", "residual_length", "hidden")
        x_BLD, stats = self.block(x_BLD, flow, window, own)
        return normalise(self.norm, x_BLD), stats


def further_fields(depth: int, segments_BL: jax.Array, *fields: tuple[jax.Array, int]) -> tuple[jax.Array, ...]:
    """Each field [..., L] `depth` places further in the same document, where there is such a place, else its filler.

    With segments as a field, what has no further place becomes padding: nothing attends to it and no router counts it.
    """

    def shifted(field_BL: jax.Array, fill: int) -> jax.Array:
        rest = jnp.full_like(field_BL[..., :depth], fill)
        return jnp.concatenate([field_BL[..., depth:], rest], axis=-1)

    inside_BL = (shifted(segments_BL, 0) == segments_BL) & (segments_BL > 0)
    return tuple(jnp.where(inside_BL, shifted(field_BL, fill), fill) for field_BL, fill in fields)


def further_labels(labels_BL: jax.Array, segments_BL: jax.Array, depths: int) -> jax.Array:
    """Labels of each depth [K, ..., L], IGNORE where the document has no such token or it is not scored."""
    return jnp.stack([further_fields(k + 1, segments_BL, (labels_BL, IGNORE))[0] for k in range(depths)])
