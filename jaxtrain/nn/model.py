"""A model as pure functions on nested dicts of arrays: what the rest of the trainer sees of the decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.config import ModelConfig, RematConfig
from jaxtrain.mesh.constraints import constrain
from jaxtrain.mesh.param import DEPTHS, Param
from jaxtrain.nn.block import Stats
from jaxtrain.nn.decoder import Decoder, check_segments, layer_data, layer_stacks
from jaxtrain.nn.layers import NOTHING, BatchTotals, Flow
from jaxtrain.nn.mla import check_latent
from jaxtrain.nn.mtp import mtp_labels
from jaxtrain.numerics.remat import check_remat
from jaxtrain.ops.loss import cross_entropy, soft_cap

Tree = dict[str, Any]
"""A nested dict with arrays (or Params) as leaves."""

KEEP_ALL = RematConfig()


@dataclass(frozen=True, eq=False)
class Model:
    """A described decoder; holds no arrays. Compute dtype is the dtype of the parameters that are passed in."""

    config: ModelConfig
    graph: nnx.GraphDef[Decoder]
    params: Tree
    """Tree of Param: global shape and logical names of every parameter."""

    def init(self, key: jax.Array) -> Tree:
        """Draw every parameter in float32; sharding changes no more than a last bit, so jit it with out_shardings."""
        return nnx.to_pure_dict(nnx.state(Decoder(self.config, nnx.Rngs(key)), nnx.Param))

    def hidden(
        self,
        params: Tree,
        tokens_BL: jax.Array,
        positions_BL: jax.Array,
        segments_BL: jax.Array,
        remat: RematConfig = KEEP_ALL,
        totals: BatchTotals = NOTHING,
    ) -> tuple[jax.Array, Stats]:
        """Token, position (in its document) and segment ids (0 is padding) -> [B, L, D] after the final norm, stats.

        `totals`: what is known of the global batch; without any, layers report no loss of their own. Raises ConfigError
        where remat does not fit this model.
        """
        check_remat(remat, self.config)
        check_segments(remat, self.config)
        return nnx.merge(self.graph, params)(tokens_BL, positions_BL, segments_BL, totals, remat)

    def mtp_loss(
        self,
        params: Tree,
        x_BLD: jax.Array,
        rows: Mapping[str, jax.Array],
        remat: RematConfig,
        totals: BatchTotals,
        batch_shards: int = 1,
    ) -> tuple[jax.Array, dict[str, jax.Array], Stats]:
        """A microbatch's share of the weighted loss of model.mtp's further tokens, its sums, and stats of its layers.

        `x_BLD` is what `hidden` gave for the fields [B, L] of `rows`; totals["mtp_scored"] are the labels of each depth
        in the global batch [K]. The sums of each depth: mtp_loss and mtp_scored [K]; stats are stacked over depths.
        """
        config, head_DV = self.config, self.head(params)
        fields = (rows["tokens"], rows["positions"], rows["segments"])
        streams, stats = nnx.merge(self.graph, params).further(x_BLD, *fields, totals, remat)
        labels_KBL = mtp_labels(rows["labels"], rows["segments"], config.mtp)
        parts = [
            cross_entropy(x_BLD, head_DV, labels_BL, config.logit_softcap, batch_shards)
            for x_BLD, labels_BL in zip(streams, labels_KBL, strict=True)
        ]
        loss_K, scored_K = (jnp.stack(sums) for sums in zip(*parts, strict=True))
        share = jnp.sum(loss_K * (config.mtp_weight / config.mtp / totals["mtp_scored"]))
        return share, {"mtp_loss": loss_K, "mtp_scored": scored_K}, stats

    def enter(self, params: Tree, tokens_BL: jax.Array, positions_BL: jax.Array) -> jax.Array:
        """The first part of `hidden`: token and position ids -> the residual stream before the first layer."""
        return nnx.merge(self.graph, params).enter(tokens_BL, positions_BL)

    @property
    def stacks(self) -> tuple[str, ...]:
        """Stack of each layer, in the model's order."""
        return layer_stacks(self.config)

    def block(self, params: Tree, stack: str) -> Callable[[Tree, jax.Array, Flow, Any], tuple[jax.Array, Stats]]:
        """One layer of a stack: (its params, x_BLD, flow, its row of the stack's `data`) -> (x_BLD, stats)."""
        graph, _ = nnx.split(getattr(nnx.merge(self.graph, params), stack))

        def run(layer: Tree, x_BLD: jax.Array, flow: Flow, data: tuple[jax.Array | None, Tree]) -> Any:
            window, own = data
            return nnx.merge(graph, layer)(x_BLD, flow, self.config.windows[0] if window is None else window, own)

        return run

    def data(self, totals: BatchTotals = NOTHING) -> dict[str, tuple[Any, Tree]]:
        """What the layers of each stack see, each its row: their windows where they differ, their totals."""
        stacks, differ = np.array(self.stacks), len(set(self.config.windows)) > 1
        own = {"layers": jax.tree.map(lambda a: a[: self.stacks.count("layers")], totals.get("mixtures", {}))}
        return {
            stack: (layer_data(self.config)[stacks == stack] if differ else None, own.get(stack, {}))
            for stack in dict.fromkeys(self.stacks)
        }

    def flow(
        self, params: Tree, positions_BL: jax.Array, segments_BL: jax.Array, totals: BatchTotals = NOTHING
    ) -> Flow:
        """What every layer sees of the batch beside the residual stream; each layer's own totals come by `data`."""
        common = {name: total for name, total in totals.items() if name != "mixtures"}
        return nnx.merge(self.graph, params).flow(positions_BL, segments_BL, common)

    def leave(self, params: Tree, x_BLD: jax.Array) -> jax.Array:
        """The last part of `hidden`: the residual stream after the last layer -> what the head reads."""
        return nnx.merge(self.graph, params).leave(x_BLD)

    def head(self, params: Tree) -> jax.Array:
        """The output projection [D, V]; the transposed embedding when tied."""
        return params["embed"]["tokens"].T if self.config.tied_head else params["head"]["weight"]

    def logits(self, params: Tree, tokens_BL: jax.Array, positions_BL: jax.Array, segments_BL: jax.Array) -> jax.Array:
        """Float32 logits [B, L, V], soft-capped where configured; training uses ops.loss, which never keeps them."""
        x_BLD, _ = self.hidden(params, tokens_BL, positions_BL, segments_BL)
        x_BLD = constrain(x_BLD, "batch", "seq_len", "hidden")
        logits_BLV = jnp.einsum("bld,dv->blv", x_BLD, self.head(params), preferred_element_type=jnp.float32)
        return soft_cap(constrain(logits_BLV, "batch", "seq_len", "vocab"), self.config.logit_softcap)

    def to_stack(self, stack: str, rows: jax.Array) -> jax.Array:
        """Rows of a stack's layers in the model's order -> as the parameters hold them: the same order."""
        return rows

    def from_stack(self, stack: str, rows: jax.Array) -> jax.Array:
        """The inverse of `to_stack`."""
        return rows

    def count(self) -> int:
        """Number of parameters; a tied head counts once."""
        return sum(param.size for param in jax.tree.leaves(self.params))


def build(config: ModelConfig) -> Model:
    """Describe the decoder of a config; no array is made, whatever the size.

    Raises ConfigError where the order of its layers or its latent attention cannot be.
    """
    check_latent(config)
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))
    described = jax.tree.map_with_path(_describe, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    return Model(config, graph, nnx.to_pure_dict(described))


def _describe(path: tuple[Any, ...], variable: nnx.Variable[Any]) -> Param:
    shape = variable.get_value().shape
    names = variable.get_metadata("names")
    # Stacking the blocks put one dim before those that the module named.
    stack = DEPTHS if path[0].key == "mtp" else "layers"
    return Param(shape, (stack,) * (len(shape) - len(names)) + names)
