"""A mixture of experts as the feed-forward layer (Shazeer et al. 2017).

B batch, L length, D model, F feed-forward, X experts, K experts per token, N devices of an expert group.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxtrain.config import ModelConfig
from jaxtrain.mesh.constraints import constrain
from jaxtrain.nn.activations import ACTIVATIONS
from jaxtrain.nn.layers import MLP, BatchContext, Names, constant, gaussian, read, residual_std
from jaxtrain.numerics.remat import tag
from jaxtrain.ops import dispatch, routing


class Router(nnx.Module):
    """Logits of the experts; its parameters stay float32 at any compute dtype (numerics/precision.py)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        D, X = config.d_model, config.moe.experts
        self.weight = gaussian(rngs, (D, X), ("embed", "whole"), config.init_std)
        self.bias = constant(0.0, (X,), ("whole",)) if config.mlp_bias else None
        self.correction = constant(0.0, (X,), ("whole",)) if config.moe.bias_rate is not None else None

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        """[B, L, D] -> float32 logits [B, L, X]."""
        # A weight that FSDP shards is gathered here; the partitioner might otherwise reshard the larger activations.
        weight_DX = constrain(read(self.weight).astype(jnp.float32), None, "whole")
        logits_BLX = jnp.einsum("BLD,DX->BLX", x_BLD.astype(jnp.float32), weight_DX, precision=lax.Precision.HIGHEST)
        return logits_BLX if self.bias is None else logits_BLX + read(self.bias).astype(jnp.float32)


class ExpertProjection(nnx.Module):
    """A linear map per expert: weight [X, in, out], and a bias [X, out] if `bias` gives its names."""

    def __init__(
        self, rngs: nnx.Rngs, shape: tuple[int, int, int], names: Names, std: float, bias: Names | None
    ) -> None:
        self.weight = gaussian(rngs, shape, names, std)
        self.bias = constant(0.0, (shape[0], shape[2]), bias) if bias else None

    @property
    def map(self) -> dispatch.ExpertLinear:
        """Weight and bias, as the dispatch takes them."""
        return dispatch.ExpertLinear(read(self.weight), None if self.bias is None else read(self.bias))


def expert_capacity(config: ModelConfig, seq_len: int) -> int | None:
    """Largest number of tokens of a sequence that one expert takes; None without model.moe.capacity."""
    moe = config.moe
    return None if moe.capacity is None else math.ceil(moe.capacity * moe.top_k * seq_len / moe.experts)


class MoE(nnx.Module):
    """Router, routed experts, and shared experts, which process every token."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        moe, D = config.moe, config.d_model
        X, F, std = moe.experts, moe.d_ff or config.d_ff, config.init_std
        wide, narrow = (("experts", "mlp"), ("experts", "norm")) if config.mlp_bias else (None, None)
        into = ("experts", "embed", "mlp")
        self.config, self.activation = config, ACTIVATIONS[config.activation]
        self.router = Router(config, rngs)
        self.gate = ExpertProjection(rngs, (X, D, F), into, std, wide) if self.activation.gated else None
        self.up = ExpertProjection(rngs, (X, D, F), into, std, wide)
        self.down = ExpertProjection(rngs, (X, F, D), ("experts", "mlp", "embed"), residual_std(config), narrow)
        shared = config.model_copy(update={"d_ff": moe.shared * F})
        self.shared = MLP(shared, rngs) if moe.shared else None

    def __call__(self, x_BLD: jax.Array, context: BatchContext) -> tuple[jax.Array, dict[str, jax.Array]]:
        """[B, L, D] -> ([B, L, D], stats of this microbatch).

        `context.totals` holds the global batch's `tokens`, its `rows` (sequences), the `capacity` of an expert where
        it is limited and, with several microbatches, this layer's `load` [X]; absent totals are counted in this
        microbatch. Stats: objective (balancing losses, weighted, divided by the totals), balance and router_z (before
        weighting), load [X] (assignments to each expert), dropped and overflowed (assignments), traffic [N, N] (tokens
        sent between devices of an expert group). With moe.balance "batch", the balance of a microbatch says nothing;
        mass [X], the mean of normalised scores, takes its place.
        """
        moe, real_BL, length = self.config.moe, context.segments_BL > 0, x_BLD.shape[1]
        logits_BLX = tag(constrain(self.router(x_BLD), "batch", "seq_len", "whole"), "router_logits")
        correction = self.router.correction
        routed = routing.route(
            logits_BLX, real_BL, moe.top_k, moe.router, None if correction is None else read(correction),
            moe.groups, moe.top_groups, moe.scale,
        )  # fmt: skip
        stats = self._losses(logits_BLX, routed, context)
        # A layout may pad sequences: the bound of buffers follows their length here, the capacity that of the data.
        stats["dropped"], capacity = jnp.zeros((), jnp.int32), expert_capacity(self.config, length)
        if capacity is not None:
            routed, stats["dropped"] = routing.apply_capacity(
                routed, context.segments_BL * length + context.positions_BL, context.totals.get("capacity", capacity)
            )
        y_BLD, stats["overflowed"], stats["traffic"] = dispatch.mixture(
            x_BLD, routed.chosen_BLK, routed.weights_BLK, self._experts(), self.activation, capacity, moe.buffer
        )
        y_BLD = tag(y_BLD, "experts_out")
        return y_BLD if self.shared is None else y_BLD + self.shared(x_BLD), stats

    def _losses(self, logits_BLX: jax.Array, routed: routing.Routed, context: BatchContext) -> dict[str, jax.Array]:
        moe, given, real_BL = self.config.moe, context.totals, context.segments_BL > 0
        totals = routing.RoutingTotals(
            given.get("tokens", jnp.maximum(jnp.sum(real_BL), 1)),
            given.get("rows", jnp.maximum(jnp.sum(jnp.any(real_BL, axis=1)), 1)),
            given.get("load"),
        )
        load_X = routing.load_of(routed)
        if moe.balance == "batch":
            mass_X = routing.mass_of(routed, totals)
            balance = routing.batch_balance(routed, load_X, totals)
            report = {"mass": mass_X}
        else:
            balance = routing.sequence_balance(routed, real_BL, totals)
            report = {"balance": balance}
        z = routing.router_z(logits_BLX, real_BL, totals)
        objective = moe.balance_weight * balance + moe.z_weight * z
        return {"objective": objective, **report, "router_z": z, "load": load_X}

    def _experts(self) -> dispatch.Experts:
        return dispatch.Experts(None if self.gate is None else self.gate.map, self.up.map, self.down.map)
