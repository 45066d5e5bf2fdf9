"""One decoder for every family: what differs between families is data in ModelConfig.

B batch, L length, D model, E head width.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from jaxtrain.config import ModelConfig, RematConfig
from jaxtrain.mesh.rules import constrain
from jaxtrain.nn.layers import MLP, Attention, Embedding, Flow, Linear, Norm
from jaxtrain.nn.stack import run_layers
from jaxtrain.numerics.remat import tag
from jaxtrain.ops import rope

Stats = dict[str, jax.Array]
"""What layers report beside the residual stream, sums over tokens, stacked over layers; empty for dense layers.

`objective`, where present, is added to the loss: it is already weighted and divided by the global batch's totals.
"""

UNLIMITED = np.iinfo(np.int32).max
"""Window of a layer that sees everything before it."""


class Block(nnx.Module):
    """Pre-norm half-blocks: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        D, eps = config.d_model, config.norm_eps
        self.attention_norm = Norm(config.norm, D, ("norm",), eps)
        self.attention = Attention(config, rngs)
        self.mlp_norm = Norm(config.norm, D, ("norm",), eps)
        self.mlp = MLP(config, rngs)

    def __call__(self, x_BLD: jax.Array, flow: Flow, window: jax.Array) -> tuple[jax.Array, Stats]:
        """[B, L, D] -> [B, L, D], and what the layer reports."""
        h_BLD = tag(_normalise(self.attention_norm, x_BLD), "attention_input")
        x_BLD = tag(_add(x_BLD, self.attention(h_BLD, flow, window)), "attention_residual")
        h_BLD = tag(_normalise(self.mlp_norm, x_BLD), "mlp_input")
        return _add(x_BLD, self.mlp(h_BLD)), {}


class Decoder(nnx.Module):
    """Embedding, stacked blocks, final norm and (unless tied) a head."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        D, V = config.d_model, config.vocab_size
        self.config = config
        self.embed = Embedding(config, rngs)
        self.layers = nnx.vmap(lambda key: Block(config, nnx.Rngs(key)))(
            jax.random.split(rngs.params(), config.n_layers)
        )
        self.norm = Norm(config.norm, D, ("norm",), config.norm_eps)
        head = None if config.tied_head else Linear(
            rngs, "BLD,DV->BLV", (D, V), ("embed", "vocab"), config.init_std, None
        )  # fmt: skip
        self.head = head

    def __call__(
        self, tokens_BL: jax.Array, positions_BL: jax.Array, segments_BL: jax.Array, remat: RematConfig
    ) -> tuple[jax.Array, Stats]:
        """Token, position and segment ids [B, L] -> the residual stream after the final norm [B, L, D], and stats."""
        graph, stacked = nnx.split(self.layers)
        flow = self.flow(positions_BL, segments_BL)

        def block(params: Any, x_BLD: jax.Array, window: jax.Array) -> tuple[jax.Array, Stats]:
            return nnx.merge(graph, params)(x_BLD, flow, window)

        x_BLD = self.enter(tokens_BL, positions_BL)
        x_BLD, stats = run_layers(block, nnx.to_pure_dict(stacked), x_BLD, jnp.asarray(layer_data(self.config)), remat)
        return self.leave(x_BLD), stats

    def enter(self, tokens_BL: jax.Array, positions_BL: jax.Array) -> jax.Array:
        """Token and position ids [B, L] -> the residual stream before the first layer [B, L, D]."""
        # Two steps: a table split over vocabulary sums whole rows, which are then scattered over the residual's shards.
        x_BLD = constrain(self.embed(tokens_BL, positions_BL), "batch", "length", "hidden")
        return constrain(x_BLD, "batch", "residual_length", "hidden")

    def flow(self, positions_BL: jax.Array, segments_BL: jax.Array) -> Flow:
        """What every layer sees of the batch, from position and segment ids [B, L]."""
        rotation = rope.tables(positions_BL, rope_frequencies(self.config)) if self.config.positions == "rope" else None
        return Flow(segments_BL, positions_BL, rotation)

    def leave(self, x_BLD: jax.Array) -> jax.Array:
        """The residual stream after the last layer -> what the head reads [B, L, D]."""
        return _normalise(self.norm, x_BLD)


def layer_data(config: ModelConfig) -> NDArray[np.int32]:
    """Window of each layer [n_layers]: the pattern repeats, and is scanned data so that one body serves all layers."""
    return np.resize([w or UNLIMITED for w in config.windows], config.n_layers).astype(np.int32)


def rope_frequencies(config: ModelConfig) -> NDArray[np.float32]:
    """Frequencies [E/2] as model.rope says."""
    r = config.rope
    plain = rope.frequencies(config.width_of_head, r.theta)
    if r.scaling == "none":
        return plain
    return rope.llama3_frequencies(plain, r.factor, r.low_freq_factor, r.high_freq_factor, r.original_length)


def _normalise(norm: Norm, x_BLD: jax.Array) -> jax.Array:
    """A norm computed where the residual stream lies, then moved: else it is computed on the gathered sequence."""
    return constrain(constrain(norm(x_BLD), "batch", "residual_length", "hidden"), "batch", "length", "hidden")


def _add(x_BLD: jax.Array, branch_BLD: jax.Array) -> jax.Array:
    """Back to the residual stream; the branch itself is constrained, so that its partial sums are scattered there."""
    return x_BLD + constrain(branch_BLD, "batch", "residual_length", "hidden")
