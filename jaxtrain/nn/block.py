"""The decoder block: attention and a feed-forward layer, both chosen by the configuration.

B batch, L length, D model.
"""

from __future__ import annotations

import jax
from flax import nnx

from jaxtrain.config import ModelConfig
from jaxtrain.mesh.constraints import constrain
from jaxtrain.nn.layer_table import LayerData, LayerSlot
from jaxtrain.nn.layers import MLP, Attention, BatchContext, Norm
from jaxtrain.nn.mla import LatentAttention
from jaxtrain.nn.moe import MoE
from jaxtrain.numerics.remat import tag

Stats = dict[str, jax.Array]
"""What layers return beside the residual stream: sums over tokens, stacked over mixture layers.

Empty for dense layers. `objective`, where present, is added to the loss; it is already weighted and divided by the
totals of the global batch.
"""


class Block(nnx.Module):
    """Pre-norm block: x + attention(norm(x)), then x + feed_forward(norm(x)), dense or a mixture of experts."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, slot: LayerSlot) -> None:
        D, eps = config.d_model, config.norm_eps
        self.window = slot.window
        self.attention_norm = Norm(config.norm, D, ("norm",), eps)
        self.attention = LatentAttention(config, rngs) if config.mla.kv_rank else Attention(config, rngs)
        self.mlp_norm = Norm(config.norm, D, ("norm",), eps)
        self.mlp = MLP(config, rngs) if slot.mixture is None else MoE(config, rngs)

    def __call__(self, x_BLD: jax.Array, context: BatchContext, data: LayerData) -> tuple[jax.Array, Stats]:
        """[B, L, D] -> ([B, L, D], stats)."""
        window = self.window if data.window is None else data.window
        h_BLD = tag(normalise(self.attention_norm, x_BLD), "attention_input")
        x_BLD = tag(_add(x_BLD, self.attention(h_BLD, context, window)), "attention_residual")
        h_BLD = tag(normalise(self.mlp_norm, x_BLD), "mlp_input")
        if isinstance(self.mlp, MLP):
            return _add(x_BLD, self.mlp(h_BLD)), {}
        branch_BLD, stats = self.mlp(h_BLD, context._replace(totals={**context.totals, **data.totals}))
        return _add(x_BLD, branch_BLD), stats


def normalise(norm: Norm, x_BLD: jax.Array) -> jax.Array:
    """A norm computed in the sharding of the residual stream, then resharded for the next layer.

    Without the first constraint the norm would be computed on the gathered sequence.
    """
    return constrain(constrain(norm(x_BLD), "batch", "residual_seq", "hidden"), "batch", "seq_len", "hidden")


def _add(x_BLD: jax.Array, branch_BLD: jax.Array) -> jax.Array:
    """Add a branch to the residual stream, in whose sharding the branch's partial sums are reduced."""
    return x_BLD + constrain(branch_BLD, "batch", "residual_seq", "hidden")
