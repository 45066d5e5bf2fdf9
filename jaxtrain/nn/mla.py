"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

B batch, L length, D model, H heads, R latent width, E width of a head without position, P rotary width, V value width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config import ConfigError, ModelConfig
from jaxtrain.mesh.constraints import constrain
from jaxtrain.nn.layers import BatchContext, Linear, Norm, residual_std
from jaxtrain.numerics.remat import tag
from jaxtrain.ops import attention, rope


def check_latent(config: ModelConfig) -> None:
    """Raise ConfigError where latent attention is combined with a setting that it does not support."""
    if not config.mla.kv_rank:
        return
    refused = {
        f"n_kv_heads {config.kv_heads}": config.kv_heads != config.n_heads,
        **{name: getattr(config, name) for name in ("qkv_bias", "out_bias", "qk_norm", "attention_sinks")},
    }
    for what, present in refused.items():
        if present:
            raise ConfigError(
                f"model.mla.kv_rank {config.mla.kv_rank} with model.{what}: latent attention has one key and value for "
                "each query head, no biases, no norm per head and no sinks; remove it or set model.mla.kv_rank 0"
            )
    if config.mla.rope_dim % 2:
        raise ConfigError(f"model.mla.rope_dim {config.mla.rope_dim} is odd: rotary positions rotate pairs")


class LatentAttention(nnx.Module):
    """Attention whose keys and values are projected from one latent vector a token; one rotary key serves all heads.

    Queries are projected from a second latent vector if mla.q_rank is set. Scores are scaled by 1/sqrt(E + P).
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        mla, D, H, std, eps = config.mla, config.d_model, config.n_heads, config.init_std, config.norm_eps
        E, P = config.width_of_head, mla.rope_dim
        V, R = mla.v_dim or E, mla.kv_rank
        self.widths = (E, P, R)
        self.scale = config.attention_scale or (E + P) ** -0.5
        self.softcap = config.attention_softcap
        # The latent dim of these projections is named "embed": FSDP shards it as the model dim of others.
        wide = ("embed", "heads", "head_dim")
        if mla.q_rank:
            Q = mla.q_rank
            self.query_down = Linear(rngs, "attention.query_down", "BLD,DR->BLR", (D, Q), ("embed", "whole"), std, None)
            self.query_latent_norm = Norm("rmsnorm", Q, ("whole",), eps)
            self.query_up = Linear(rngs, "attention.query_up", "BLR,RHE->BLHE", (Q, H, E + P), wide, std, None)
        else:
            self.query = Linear(rngs, "attention.query", "BLD,DHE->BLHE", (D, H, E + P), wide, std, None)
        self.kv_down = Linear(rngs, "attention.kv_down", "BLD,DR->BLR", (D, R + P), ("embed", "whole"), std, None)
        self.kv_latent_norm = Norm("rmsnorm", R, ("whole",), eps)
        self.kv_up = Linear(rngs, "attention.kv_up", "BLR,RHE->BLHE", (R, H, E + V), wide, std, None)
        out = ("heads", "head_dim", "embed")
        self.out = Linear(rngs, "attention.out", "BLHE,HED->BLD", (H, V, D), out, residual_std(config), None)

    def __call__(self, x_BLD: jax.Array, context: BatchContext, window: jax.Array | int | None) -> jax.Array:
        """[B, L, D] -> [B, L, D]; `window` is the number of visible tokens, None for all."""
        E, P, R = self.widths
        latent_BLR = tag(constrain(self.kv_down(x_BLD), "batch", "seq_len", None), "latent")
        kv_BLHE = _heads(self.kv_up(self.kv_latent_norm(latent_BLR[..., :R])))
        k_BLHE, v_BLHV = kv_BLHE[..., :E], kv_BLHE[..., E:]
        # One rotary key for all heads, whose gradient is summed over them in float32.
        rotary_BL1P = _rotate(latent_BLR[:, :, None, R:], context).astype(jnp.float32)
        shared_BLHP = jnp.broadcast_to(rotary_BL1P, (*k_BLHE.shape[:3], P)).astype(x_BLD.dtype)
        q_BLHE = _heads(self._queries(x_BLD))
        q_BLHE = jnp.concatenate([q_BLHE[..., :E], _rotate(q_BLHE[..., E:], context)], axis=-1)
        k_BLHE = jnp.concatenate([k_BLHE, shared_BLHP], axis=-1)
        q_BLHE, k_BLHE, v_BLHV = (tag(_heads(a), "qkv") for a in (q_BLHE, k_BLHE, v_BLHV))
        out_BLHV = attention.attend(
            q_BLHE, k_BLHE, v_BLHV, context.segments_BL, context.positions_BL, window, self.softcap, self.scale, None
        )
        return self.out(_heads(out_BLHV))

    def _queries(self, x_BLD: jax.Array) -> jax.Array:
        if hasattr(self, "query"):
            return self.query(x_BLD)
        latent_BLR = tag(constrain(self.query_down(x_BLD), "batch", "seq_len", None), "latent")
        return self.query_up(self.query_latent_norm(latent_BLR))


def _heads(x_BLHE: jax.Array) -> jax.Array:
    return constrain(x_BLHE, "batch", "seq_len", "heads", "head_dim")


def _rotate(x_BLHP: jax.Array, context: BatchContext) -> jax.Array:
    return x_BLHP if context.rotation is None else rope.rotate(x_BLHP, *context.rotation)
