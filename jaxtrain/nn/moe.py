"""A mixture of experts in place of the feed-forward layer (Shazeer et al. 2017).

B batch, L length, D model, F feed-forward, X experts, K experts a token visits.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxtrain.config import ModelConfig
from jaxtrain.mesh.constraints import constrain
from jaxtrain.nn.layers import GATED, MLP, NONLINEARITIES, Flow, Names, constant, gaussian, residual_std
from jaxtrain.numerics.remat import tag
from jaxtrain.ops import dispatch, routing


class Router(nnx.Module):
    """Logits of experts; its parameters stay float32 whatever the run computes in (numerics/precision.py)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        D, X = config.d_model, config.moe.experts
        self.weight = gaussian(rngs, (D, X), ("embed", "whole"), config.init_std)
        self.bias = constant(0.0, (X,), ("whole",)) if config.mlp_bias else None
        self.correction = constant(0.0, (X,), ("whole",)) if config.moe.bias_rate is not None else None

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        """[B, L, D] -> float32 logits [B, L, X]."""
        # Gathered where FSDP shards it: left to itself the partitioner may exchange the larger activations.
        weight_DX = constrain(self.weight[...].astype(jnp.float32), None, "whole")
        logits_BLX = jnp.einsum("BLD,DX->BLX", x_BLD.astype(jnp.float32), weight_DX, precision=lax.Precision.HIGHEST)
        return logits_BLX if self.bias is None else logits_BLX + self.bias[...].astype(jnp.float32)


class Stacked(nnx.Module):
    """One linear map an expert: weight [X, in, out], bias [X, out] where it has names."""

    def __init__(
        self, rngs: nnx.Rngs, shape: tuple[int, int, int], names: Names, std: float, bias: Names | None
    ) -> None:
        self.weight = gaussian(rngs, shape, names, std)
        self.bias = constant(0.0, (shape[0], shape[2]), bias) if bias else None

    @property
    def map(self) -> dispatch.ExpertLinear:
        """Its arrays."""
        return dispatch.ExpertLinear(self.weight[...], None if self.bias is None else self.bias[...])


class MoE(nnx.Module):
    """Router, routed experts, and experts that every token visits."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        moe, D = config.moe, config.d_model
        X, F, std = moe.experts, moe.d_ff or config.d_ff, config.init_std
        wide, narrow = (("experts", "mlp"), ("experts", "norm")) if config.mlp_bias else (None, None)
        into = ("experts", "embed", "mlp")
        self.config = config
        self.router = Router(config, rngs)
        self.gate = Stacked(rngs, (X, D, F), into, std, wide) if config.activation in GATED else None
        self.up = Stacked(rngs, (X, D, F), into, std, wide)
        self.down = Stacked(rngs, (X, F, D), ("experts", "mlp", "embed"), residual_std(config), narrow)
        shared = config.model_copy(update={"d_ff": moe.shared * F})
        self.shared = MLP(shared, rngs) if moe.shared else None

    def __call__(self, x_BLD: jax.Array, flow: Flow) -> tuple[jax.Array, dict[str, jax.Array]]:
        """[B, L, D] -> [B, L, D], and sums over this microbatch.

        `flow.totals` holds `tokens` and `rows` of the global batch, and `load` [X] of this layer where the microbatch
        is not all of it; without totals the microbatch is taken for the whole. The sums: objective (balancing losses,
        weighted and divided by the totals), balance and router_z (the same before weighting), load [X] (choices that
        fell on each expert), dropped, overflowed (choices), traffic [N, N] (rows sent from device to device of an
        expert group).
        """
        moe, real_BL, length = self.config.moe, flow.segments_BL > 0, x_BLD.shape[1]
        logits_BLX = tag(constrain(self.router(x_BLD), "batch", "seq_len", "whole"), "router_logits")
        correction = self.router.correction
        routed = routing.route(
            logits_BLX, real_BL, moe.top_k, moe.router, None if correction is None else correction[...],
            moe.groups, moe.top_groups, moe.scale,
        )  # fmt: skip
        stats = self._losses(logits_BLX, routed, flow)
        stats["dropped"], capacity = jnp.zeros((), jnp.int32), None
        if moe.capacity is not None:
            capacity = math.ceil(moe.capacity * moe.top_k * length / moe.experts)
            routed, stats["dropped"] = routing.apply_capacity(
                routed, flow.segments_BL * length + flow.positions_BL, capacity
            )
        y_BLD, stats["overflowed"], stats["traffic"] = dispatch.mixture(
            x_BLD, routed.chosen_BLK, routed.weights_BLK, self._experts(), self._hidden, capacity, moe.buffer
        )
        y_BLD = tag(y_BLD, "experts_out")
        return y_BLD if self.shared is None else y_BLD + self.shared(x_BLD), stats

    def _losses(self, logits_BLX: jax.Array, routed: routing.Routed, flow: Flow) -> dict[str, jax.Array]:
        moe, known, real_BL = self.config.moe, flow.totals, flow.segments_BL > 0
        totals = routing.RoutingTotals(
            known.get("tokens", jnp.maximum(jnp.sum(real_BL), 1)),
            known.get("rows", jnp.maximum(jnp.sum(jnp.any(real_BL, axis=1)), 1)),
            known.get("load"),
        )
        load_X = routing.load_of(routed)
        if moe.balance == "batch":
            balance = routing.batch_balance(routed, load_X, totals)
        else:
            balance = routing.sequence_balance(routed, real_BL, totals)
        z = routing.router_z(logits_BLX, real_BL, totals)
        objective = moe.balance_weight * balance + moe.z_weight * z
        return {"objective": objective, "balance": balance, "router_z": z, "load": load_X}

    def _experts(self) -> dispatch.Experts:
        return dispatch.Experts(None if self.gate is None else self.gate.map, self.up.map, self.down.map)

    def _hidden(self, gate: jax.Array | None, up: jax.Array) -> jax.Array:
        name = self.config.activation
        return NONLINEARITIES[name](up) if gate is None else GATED[name](gate, up)
