"""One decoder block: what kind of attention and of feed-forward layer it has is data.

B batch, L length, D model.
"""

from __future__ import annotations

import jax
from flax import nnx

from jaxtrain.config import ModelConfig
from jaxtrain.mesh.constraints import constrain
from jaxtrain.nn.layers import MLP, NOTHING, Attention, BatchTotals, Flow, Norm
from jaxtrain.nn.mla import LatentAttention
from jaxtrain.nn.moe import MoE
from jaxtrain.numerics.remat import tag

Stats = dict[str, jax.Array]
"""What layers report beside the residual stream, sums over tokens, stacked over mixture layers; empty for dense layers.

`objective`, where present, is added to the loss: it is already weighted and divided by the global batch's totals.
"""


class Block(nnx.Module):
    """Pre-norm half-blocks: x + attention(norm(x)), then x + feed-forward(norm(x)), the latter a mixture or dense."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, mixture: bool) -> None:
        D, eps = config.d_model, config.norm_eps
        self.attention_norm = Norm(config.norm, D, ("norm",), eps)
        self.attention = LatentAttention(config, rngs) if config.mla.kv_rank else Attention(config, rngs)
        self.mlp_norm = Norm(config.norm, D, ("norm",), eps)
        self.mlp = MoE(config, rngs) if mixture else MLP(config, rngs)

    def __call__(
        self, x_BLD: jax.Array, flow: Flow, window: jax.Array | int | None, own: BatchTotals = NOTHING
    ) -> tuple[jax.Array, Stats]:
        """[B, L, D] -> [B, L, D], and what the layer reports; `own` is added to the totals that this layer sees."""
        h_BLD = tag(normalise(self.attention_norm, x_BLD), "attention_input")
        x_BLD = tag(_add(x_BLD, self.attention(h_BLD, flow, window)), "attention_residual")
        h_BLD = tag(normalise(self.mlp_norm, x_BLD), "mlp_input")
        if isinstance(self.mlp, MLP):
            return _add(x_BLD, self.mlp(h_BLD)), {}
        branch_BLD, stats = self.mlp(h_BLD, flow._replace(totals={**flow.totals, **own}))
        return _add(x_BLD, branch_BLD), stats


def normalise(norm: Norm, x_BLD: jax.Array) -> jax.Array:
    """A norm computed where the residual stream lies, then moved: else it is computed on the gathered sequence."""
    return constrain(constrain(norm(x_BLD), "batch", "residual_seq", "hidden"), "batch", "seq_len", "hidden")


def _add(x_BLD: jax.Array, branch_BLD: jax.Array) -> jax.Array:
    """Back to the residual stream; the branch itself is constrained, so that its partial sums are scattered there."""
    return x_BLD + constrain(branch_BLD, "batch", "residual_seq", "hidden")
