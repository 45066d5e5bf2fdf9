"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): extra blocks, one per predicted token.

At position i, depth k reads the output of depth k - 1 at i and the embedding of token i + k, and predicts token
i + k + 1, if both tokens belong to the document of i. Embedding and head are those of the main model.

B batch, L length, D model, E twice D, K depths.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config import ModelConfig
from jaxtrain.mesh.constraints import active_axes, active_mesh, constrain
from jaxtrain.nn.block import Block, Stats, normalise
from jaxtrain.nn.layer_table import LayerData, LayerSlot
from jaxtrain.nn.layers import BatchContext, Linear, Norm
from jaxtrain.ops.loss import IGNORE
from jaxtrain.ops.zigzag import shifted_indices


class MTPBlock(nnx.Module):
    """One depth: normalise, concatenate and project residual stream and next embedding, then apply a block."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, slot: LayerSlot) -> None:
        D, eps = config.d_model, config.norm_eps
        self.embed_norm = Norm(config.norm, D, ("norm",), eps)
        self.hidden_norm = Norm(config.norm, D, ("norm",), eps)
        self.project = Linear(rngs, "mtp.project", "BLE,ED->BLD", (2 * D, D), ("embed", "whole"), config.init_std, None)
        self.block = Block(config, rngs, slot)
        self.norm = Norm(config.norm, D, ("norm",), eps)

    def __call__(
        self, x_BLD: jax.Array, next_BLD: jax.Array, context: BatchContext, data: LayerData
    ) -> tuple[jax.Array, Stats]:
        """Output of the depth before and embedding of the next token [B, L, D] -> (output of this depth, stats)."""
        both_BLE = jnp.concatenate([normalise(self.embed_norm, next_BLD), normalise(self.hidden_norm, x_BLD)], axis=-1)
        x_BLD = constrain(self.project(both_BLE), "batch", "residual_seq", "hidden")
        x_BLD, stats = self.block(x_BLD, context, data)
        return normalise(self.norm, x_BLD), stats


def shifted_fields(depth: int, segments_BL: jax.Array, *fields: tuple[jax.Array, int]) -> tuple[jax.Array, ...]:
    """Each field [..., L] shifted left by `depth` tokens within its document, filled where no such token exists.

    Sequences are in the order in which the devices of "seq_len" store them (ops/zigzag.py), and so are the results.
    With segments as a field, tokens without a shifted one become padding, which attention and routers ignore.
    """
    mesh = active_mesh()
    devices = math.prod(mesh.shape[axis] for axis in active_axes("seq_len")) if mesh is not None else 1
    source_L, exists_L = shifted_indices(segments_BL.shape[-1], devices, depth)

    def shifted(field_BL: jax.Array, fill: int) -> jax.Array:
        return jnp.where(exists_L, jnp.take(field_BL, source_L, axis=-1), fill)

    same_document_BL = (shifted(segments_BL, 0) == segments_BL) & (segments_BL > 0)
    return tuple(jnp.where(same_document_BL, shifted(field_BL, fill), fill) for field_BL, fill in fields)


def mtp_labels(labels_BL: jax.Array, segments_BL: jax.Array, depths: int) -> jax.Array:
    """Labels of each depth [K, ..., L]; IGNORE where the document has no such token or it is not scored."""
    return jnp.stack([shifted_fields(k + 1, segments_BL, (labels_BL, IGNORE))[0] for k in range(depths)])
