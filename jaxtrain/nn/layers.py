"""Modules of a decoder block. Each parameter is declared with the logical names of its dims.

B batch, L length, D model, H heads, K kv heads, E head width, F feed-forward, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config import ModelConfig, Registry
from jaxtrain.mesh.constraints import active_axes, constrain, sharding_of
from jaxtrain.nn.activations import ACTIVATIONS
from jaxtrain.numerics.remat import tag
from jaxtrain.numerics.wide import WideWeight, widen
from jaxtrain.ops import attention, linear, low_precision, norm, rope
from jaxtrain.ops.low_precision import recipe_for

Names = tuple[str, ...]


def gaussian(rngs: nnx.Rngs, shape: tuple[int, ...], names: Names, std: float) -> nnx.Param:
    """A float32 parameter drawn from N(0, std**2)."""
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32), names=names)


def read(param: nnx.Param) -> jax.Array:
    """The value of a parameter; in 16 bits it may be float32 with a 16-bit value, to be cast where it is used."""
    return widen(param.get_value())


def constant(value: float, shape: tuple[int, ...], names: Names) -> nnx.Param:
    """A float32 parameter initialised to a constant."""
    return nnx.Param(jnp.full(shape, value, jnp.float32), names=names)


BatchTotals = Mapping[str, Any]
"""Totals of a global batch, counted before its first microbatch: the divisors of every mean.

Leaves of `mixtures` are stacked over layers, in the order of `layer_table.mixture_layers`.
"""
NO_TOTALS: BatchTotals = {}


class BatchContext(NamedTuple):
    """Inputs that all layers share, beside the residual stream."""

    segments_BL: jax.Array
    """Document of each token in its sequence, from 1; 0 is padding."""
    positions_BL: jax.Array
    """Position of each token in its document."""
    rotation: tuple[jax.Array, jax.Array] | None
    """Cosines and sines [B, L, E/2] of rotary position embedding; None without it."""
    totals: BatchTotals = NO_TOTALS
    """Totals of the global batch; empty where no loss is computed."""


class Linear(nnx.Module):
    """An einsum with a weight, and a bias over the weight's last dims if `bias` gives their names.

    `path`, such as attention.query, names it for recipes of low precision, which choose by its first part.
    """

    def __init__(
        self, rngs: nnx.Rngs, path: str, equation: str, shape: tuple[int, ...], names: Names, std: float,
        bias: Names | None,
    ) -> None:  # fmt: skip
        self.path, self.equation, self.names = path, equation, names
        self.weight = gaussian(rngs, shape, names, std)
        self.bias = constant(0.0, shape[-len(bias) :], bias) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Contract x with the weight by the equation, and add the bias."""
        out = self._product(x, read(self.weight))
        return out if self.bias is None else linear.add_bias(out, read(self.bias))

    def _product(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        recipe = recipe_for(self.path.split(".")[0])
        if recipe is None:
            return linear.contract(self.equation, x, weight)
        # What FSDP shards is gathered; other dims are sharded as activations are.
        names = (None if name == "embed" else name for name in self.names)
        gathered = sharding_of(weight.shape, *names) if active_axes("embed") else None
        return low_precision.contract(recipe, self.path, self.equation, x, weight, gathered)


@dataclass(frozen=True)
class NormKind:
    """Normalisation over the last dim.

    `function` takes (x [..., N], scale [N], eps), or with `bias` (x, scale, bias [N], eps), and returns x's shape and
    dtype.
    """

    function: Callable[..., jax.Array]
    bias: bool = False


NORMS: Registry[NormKind] = Registry("model.norm")
"""model.norm -> NormKind; user code can extend it."""

NORMS.register("rmsnorm")(NormKind(norm.rms_norm))
NORMS.register("layernorm")(NormKind(norm.layer_norm, bias=True))


class Norm(nnx.Module):
    """A registered normalisation with its parameters."""

    def __init__(self, kind: str, width: int, names: Names, eps: float) -> None:
        self.kind, self.eps = NORMS[kind], eps
        self.scale = constant(1.0, (width,), names)
        self.bias = constant(0.0, (width,), names) if self.kind.bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., width] -> [..., width]."""
        vectors = [read(self.scale)] if self.bias is None else [read(self.scale), read(self.bias)]
        return self.kind.function(x, *vectors, self.eps)


class Attention(nnx.Module):
    """Grouped-query attention, with rotary positions if the context has their tables."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        D, H, K, E, std = config.d_model, config.n_heads, config.kv_heads, config.width_of_head, config.init_std
        bias = (("heads", "head_dim"), ("kv_heads", "head_dim")) if config.qkv_bias else (None, None)
        self.softcap, self.scale = config.attention_softcap, config.attention_scale
        self.query = Linear(
            rngs, "attention.query", "BLD,DHE->BLHE", (D, H, E), ("embed", "heads", "head_dim"), std, bias[0]
        )
        self.key = Linear(
            rngs, "attention.key", "BLD,DKE->BLKE", (D, K, E), ("embed", "kv_heads", "head_dim"), std, bias[1]
        )
        self.value = Linear(
            rngs, "attention.value", "BLD,DKE->BLKE", (D, K, E), ("embed", "kv_heads", "head_dim"), std, bias[1]
        )
        self.query_norm = Norm("rmsnorm", E, ("head_dim",), config.norm_eps) if config.qk_norm else None
        self.key_norm = Norm("rmsnorm", E, ("head_dim",), config.norm_eps) if config.qk_norm else None
        self.out = Linear(
            rngs, "attention.out", "BLHE,HED->BLD", (H, E, D), ("heads", "head_dim", "embed"), residual_std(config),
            ("norm",) if config.out_bias else None,
        )  # fmt: skip
        self.sinks = constant(0.0, (H,), ("heads",)) if config.attention_sinks else None

    def __call__(self, x_BLD: jax.Array, context: BatchContext, window: jax.Array | int | None) -> jax.Array:
        """[B, L, D] -> [B, L, D]; `window` is the number of visible tokens, None for all."""
        q_BLHE = self._prepare(self.query(x_BLD), self.query_norm, context.rotation, "heads")
        k_BLKE = self._prepare(self.key(x_BLD), self.key_norm, context.rotation, "kv_heads")
        v_BLKE = self._prepare(self.value(x_BLD), None, None, "kv_heads")
        sinks_H = None if self.sinks is None else read(self.sinks)
        out_BLHE = attention.attend(
            q_BLHE, k_BLKE, v_BLKE, context.segments_BL, context.positions_BL, window, self.softcap, self.scale, sinks_H
        )
        return self.out(constrain(out_BLHE, "batch", "seq_len", "heads", "head_dim"))

    @staticmethod
    def _prepare(
        x_BLHE: jax.Array, normalise: Norm | None, rotation: tuple[jax.Array, jax.Array] | None, heads: str
    ) -> jax.Array:
        x_BLHE = constrain(x_BLHE, "batch", "seq_len", heads, "head_dim")
        if normalise is not None:
            x_BLHE = normalise(x_BLHE)
        if rotation is not None:
            x_BLHE = rope.rotate(x_BLHE, *rotation)
        return tag(x_BLHE, "qkv")


class MLP(nnx.Module):
    """Feed-forward layer: up (and gate), nonlinearity, down."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        D, F, std = config.d_model, config.d_ff, config.init_std
        wide, narrow = (("mlp",), ("norm",)) if config.mlp_bias else (None, None)
        self.activation = ACTIVATIONS[config.activation]
        self.gate = (
            Linear(rngs, "mlp.gate", "BLD,DF->BLF", (D, F), ("embed", "mlp"), std, wide)
            if self.activation.gated
            else None
        )
        self.up = Linear(rngs, "mlp.up", "BLD,DF->BLF", (D, F), ("embed", "mlp"), std, wide)
        self.down = Linear(rngs, "mlp.down", "BLF,FD->BLD", (F, D), ("mlp", "embed"), residual_std(config), narrow)

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        """[B, L, D] -> [B, L, D]."""
        up_BLF = tag(constrain(self.up(x_BLD), "batch", "seq_len", "mlp"), "mlp_up")
        gate_BLF = None
        if self.gate is not None:
            gate_BLF = tag(constrain(self.gate(x_BLD), "batch", "seq_len", "mlp"), "mlp_gate")
        return self.down(tag(self.activation(gate_BLF, up_BLF), "mlp_hidden"))


class Embedding(nnx.Module):
    """Embedding table of tokens, and one of positions where model.positions is learned."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        D, std = config.d_model, config.init_std
        learned = config.positions == "learned"
        self.tokens = gaussian(rngs, (config.vocab_size, D), ("vocab", "embed"), std)
        self.positions = gaussian(rngs, (config.max_seq_len, D), ("positions", "embed"), std) if learned else None

    def __call__(self, tokens_BL: jax.Array, positions_BL: jax.Array) -> jax.Array:
        """Token and position ids [B, L] -> [B, L, D]."""
        x_BLD = lookup(self.tokens.get_value(), tokens_BL, "vocab")
        if self.positions is None:
            return x_BLD
        return x_BLD + lookup(self.positions.get_value(), positions_BL, "positions")


def lookup(table_VD: jax.Array | WideWeight, ids_BL: jax.Array, rows: str) -> jax.Array:
    """Rows of a table [B, L, D]. `rows` is the logical name of the table's first dim, which may stay sharded.

    A sharded width (FSDP) is gathered first. The partitioner would otherwise reshard the activations, which are larger,
    and replicate their gradient.
    """
    wide_VD = widen(table_VD)
    return linear.lookup(wide_VD, ids_BL, table_VD.dtype, sharding_of(wide_VD.shape, rows, None))


def residual_std(config: ModelConfig) -> float:
    """Initial standard deviation of output projections, which keeps the variance of the residual stream.

    Source: GPT-2 (Radford et al. 2019, section 2.3).
    """
    return config.init_std / math.sqrt(2 * config.n_layers)
