"""A model as pure functions of nested dicts of arrays: the interface of the decoder to the rest of the trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config import ModelConfig, RematConfig
from jaxtrain.mesh.constraints import constrain
from jaxtrain.mesh.param import DEPTHS, Param
from jaxtrain.nn.activations import ACTIVATIONS
from jaxtrain.nn.block import Stats
from jaxtrain.nn.decoder import Decoder
from jaxtrain.nn.layer_table import MTP_STACK, LayerData, check_segments, layer_data, layer_table
from jaxtrain.nn.layers import NO_TOTALS, BatchContext, BatchTotals
from jaxtrain.nn.mla import check_latent
from jaxtrain.nn.mtp import mtp_labels
from jaxtrain.numerics.remat import check_remat
from jaxtrain.numerics.wide import widen
from jaxtrain.ops.loss import cross_entropy, mask_padding, soft_cap

Tree = dict[str, Any]
"""A nested dict with arrays (or Params) as leaves."""

KEEP_ALL = RematConfig()


@dataclass(frozen=True, eq=False)
class Model:
    """A decoder without arrays: functions of its parameters, computed in the dtype of the parameters passed in."""

    config: ModelConfig
    graph: nnx.GraphDef[Decoder]
    params: Tree
    """Tree of Param: global shape and logical names of every parameter."""

    def init(self, key: jax.Array) -> Tree:
        """Initialise every parameter in float32. Jit it with out_shardings; sharding changes at most the last bit."""
        return nnx.to_pure_dict(nnx.state(Decoder(self.config, nnx.Rngs(key)), nnx.Param))

    def hidden(
        self,
        params: Tree,
        tokens_BL: jax.Array,
        positions_BL: jax.Array,
        segments_BL: jax.Array,
        remat: RematConfig = KEEP_ALL,
        totals: BatchTotals = NO_TOTALS,
    ) -> tuple[jax.Array, Stats]:
        """Token, position (in the document), segment ids (0: padding) [B, L] -> (input of the head [B, L, D], stats).

        `totals` are those of the global batch; absent ones are counted in this microbatch. Raises ConfigError where
        remat does not fit this model.
        """
        check_remat(remat, self.config, ACTIVATIONS[self.config.activation].gated)
        check_segments(remat, self.config)
        return nnx.merge(self.graph, params)(tokens_BL, positions_BL, segments_BL, totals, remat)

    def mtp_loss(
        self,
        params: Tree,
        x_BLD: jax.Array,
        batch: Mapping[str, jax.Array],
        remat: RematConfig,
        totals: BatchTotals,
        batch_shards: int = 1,
    ) -> tuple[jax.Array, dict[str, jax.Array], Stats]:
        """Multi-token prediction of a microbatch: (its share of the weighted loss, sums, stats stacked over depths).

        `x_BLD` is the output of `hidden` for the fields [B, L] of `batch`; totals["mtp_scored"] [K] is the number of
        labels of each depth in the global batch. Sums of each depth: mtp_loss and mtp_scored [K].
        """
        config, head_DV = self.config, self.head(params)
        fields = (batch["tokens"], batch["positions"], batch["segments"])
        streams, stats = nnx.merge(self.graph, params).mtp_streams(x_BLD, *fields, totals, remat)
        labels_KBL = mtp_labels(batch["labels"], batch["segments"], config.mtp)
        parts = [
            cross_entropy(x_BLD, head_DV, labels_BL, config.logit_softcap, batch_shards, config.unpadded_vocab_size)
            for x_BLD, labels_BL in zip(streams, labels_KBL, strict=True)
        ]
        loss_K, scored_K = (jnp.stack(sums) for sums in zip(*parts, strict=True))
        share = jnp.sum(loss_K * (config.mtp_weight / config.mtp / totals["mtp_scored"]))
        return share, {"mtp_loss": loss_K, "mtp_scored": scored_K}, stats

    def embed_tokens(self, params: Tree, tokens_BL: jax.Array, positions_BL: jax.Array) -> jax.Array:
        """The first part of `hidden`: token and position ids [B, L] -> residual stream before the first layer."""
        return nnx.merge(self.graph, params).embed_tokens(tokens_BL, positions_BL)

    @property
    def stacks(self) -> tuple[str, ...]:
        """Stack of each layer, in the order of the model; the n-th layer of a stack is row n of the stack."""
        return tuple(slot.stack for slot in layer_table(self.config) if slot.stack != MTP_STACK)

    def block(self, params: Tree, stack: str) -> Callable[[Tree, jax.Array, BatchContext, LayerData], Any]:
        """One layer of a stack as a function: (params, x_BLD, context, its row of `data`) -> (x_BLD, stats)."""
        return nnx.merge(self.graph, params).layer(stack)

    def data(self, totals: BatchTotals = NO_TOTALS) -> dict[str, LayerData]:
        """Data of the layers of each stack, stacked over its layers."""
        return {stack: layer_data(self.config, stack, totals) for stack in dict.fromkeys(self.stacks)}

    def context(
        self, params: Tree, positions_BL: jax.Array, segments_BL: jax.Array, totals: BatchTotals = NO_TOTALS
    ) -> BatchContext:
        """Inputs that all layers share, beside the residual stream; totals of single layers are in `data`."""
        return nnx.merge(self.graph, params).context(positions_BL, segments_BL, totals)

    def final_norm(self, params: Tree, x_BLD: jax.Array) -> jax.Array:
        """The last part of `hidden`: residual stream after the last layer -> input of the head [B, L, D]."""
        return nnx.merge(self.graph, params).final_norm(x_BLD)

    def head(self, params: Tree) -> jax.Array:
        """The output projection [D, V]; the transposed embedding if it is tied."""
        weight = params["embed"]["tokens"] if self.config.tied_head else params["head"]["weight"]
        return widen(weight).T if self.config.tied_head else widen(weight)

    def logits(self, params: Tree, tokens_BL: jax.Array, positions_BL: jax.Array, segments_BL: jax.Array) -> jax.Array:
        """Float32 logits [B, L, V], soft-capped where configured, -inf for padding; ops.loss never stores them."""
        x_BLD, _ = self.hidden(params, tokens_BL, positions_BL, segments_BL)
        x_BLD = constrain(x_BLD, "batch", "seq_len", "hidden")
        logits_BLV = jnp.einsum(
            "bld,dv->blv", x_BLD, self.head(params).astype(x_BLD.dtype), preferred_element_type=jnp.float32
        )
        logits_BLV = soft_cap(constrain(logits_BLV, "batch", "seq_len", "vocab"), self.config.logit_softcap)
        return mask_padding(logits_BLV, self.config.unpadded_vocab_size)

    def to_stack(self, stack: str, rows: jax.Array) -> jax.Array:
        """A stack's layers from the order of the model to that of its parameters; here they are the same."""
        return rows

    def from_stack(self, stack: str, rows: jax.Array) -> jax.Array:
        """The inverse of `to_stack`."""
        return rows

    def count(self) -> int:
        """Number of parameters; a tied head counts once."""
        return sum(param.size for param in jax.tree.leaves(self.params))


def build(config: ModelConfig) -> Model:
    """The model of a configuration; allocates no arrays.

    Raises ConfigError for an unknown activation or norm, or an impossible order of layers or latent attention.
    """
    check_latent(config)
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))
    described = jax.tree.map_with_path(_describe, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    return Model(config, graph, nnx.to_pure_dict(described))


def _describe(path: tuple[Any, ...], variable: nnx.Variable[Any]) -> Param:
    shape = variable.get_value().shape
    names = variable.get_metadata("names")
    # Stacking modules adds a dim before those that the module named.
    stack = DEPTHS if path[0].key == "mtp" else "layers"
    return Param(shape, (stack,) * (len(shape) - len(names)) + names)
