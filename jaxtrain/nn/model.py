"""A model as pure functions on nested dicts of arrays: what the rest of the trainer sees of the decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config import ModelConfig, RematConfig
from jaxtrain.mesh.param import Param
from jaxtrain.mesh.rules import constrain
from jaxtrain.nn.decoder import Decoder, Stats
from jaxtrain.nn.layers import Flow
from jaxtrain.numerics.remat import check_remat
from jaxtrain.ops.loss import soft_cap

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
    ) -> tuple[jax.Array, Stats]:
        """Token, position (in its document) and segment ids (0 is padding) -> [B, L, D] after the final norm, stats.

        Raises ConfigError where remat.names does not fit this model.
        """
        check_remat(remat, self.config)
        return nnx.merge(self.graph, params)(tokens_BL, positions_BL, segments_BL, remat)

    def enter(self, params: Tree, tokens_BL: jax.Array, positions_BL: jax.Array) -> jax.Array:
        """The first part of `hidden`: token and position ids -> the residual stream before the first layer."""
        return nnx.merge(self.graph, params).enter(tokens_BL, positions_BL)

    def block(self, params: Tree) -> Callable[[Tree, jax.Array, Flow, Any], tuple[jax.Array, Stats]]:
        """One layer of `hidden` as a function (its params, x_BLD, flow, its row of `layer_data`) -> (x_BLD, stats)."""
        graph, _ = nnx.split(nnx.merge(self.graph, params).layers)
        return lambda layer, x_BLD, flow, data: nnx.merge(graph, layer)(x_BLD, flow, data)

    def flow(self, params: Tree, positions_BL: jax.Array, segments_BL: jax.Array) -> Flow:
        """What every layer sees of the batch beside the residual stream."""
        return nnx.merge(self.graph, params).flow(positions_BL, segments_BL)

    def leave(self, params: Tree, x_BLD: jax.Array) -> jax.Array:
        """The last part of `hidden`: the residual stream after the last layer -> what the head reads."""
        return nnx.merge(self.graph, params).leave(x_BLD)

    def head(self, params: Tree) -> jax.Array:
        """The output projection [D, V]; the transposed embedding when tied."""
        return params["embed"]["tokens"].T if self.config.tied_head else params["head"]["weight"]

    def logits(self, params: Tree, tokens_BL: jax.Array, positions_BL: jax.Array, segments_BL: jax.Array) -> jax.Array:
        """Float32 logits [B, L, V], soft-capped where configured; training uses ops.loss, which never keeps them."""
        x_BLD, _ = self.hidden(params, tokens_BL, positions_BL, segments_BL)
        x_BLD = constrain(x_BLD, "batch", "length", "hidden")
        logits_BLV = jnp.einsum("bld,dv->blv", x_BLD, self.head(params), preferred_element_type=jnp.float32)
        return soft_cap(constrain(logits_BLV, "batch", "length", "vocab"), self.config.logit_softcap)

    def count(self) -> int:
        """Number of parameters; a tied head counts once."""
        return sum(param.size for param in jax.tree.leaves(self.params))


def build(config: ModelConfig) -> Model:
    """Describe the decoder of a config; no array is made, whatever the size."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0))))
    params = nnx.to_pure_dict(jax.tree.map(_describe, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)))
    return Model(config, graph, params)


def _describe(variable: nnx.Variable[Any]) -> Param:
    shape = variable.get_value().shape
    names = variable.get_metadata("names")
    # Stacking the blocks put one dim before those that the module named.
    return Param(shape, ("layers",) * (len(shape) - len(names)) + names)
