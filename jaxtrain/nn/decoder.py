"""The decoder of every model family: families differ in ModelConfig only.

B batch, L length, D model, E head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.config import ModelConfig, RematConfig
from jaxtrain.mesh.constraints import constrain
from jaxtrain.nn.block import Block, Stats, normalise
from jaxtrain.nn.layer_table import MTP_STACK, LayerData, layer_data, split_ends, stack_slots
from jaxtrain.nn.layers import NO_TOTALS, BatchContext, BatchTotals, Embedding, Linear, Norm
from jaxtrain.nn.mtp import MTPBlock, shifted_fields
from jaxtrain.nn.stack import LayerFunction, run_layers
from jaxtrain.numerics.remat import checkpointed
from jaxtrain.ops import rope
from jaxtrain.ops.low_precision import recipe_only, skipped_layers


class Decoder(nnx.Module):
    """Embedding, stacked blocks, final norm, a head unless it is tied, and blocks of multi-token prediction."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        D, V = config.d_model, config.vocab_size
        self.config = config
        self.embed = Embedding(config, rngs)
        self.layers = _stack(Block, config, rngs, "layers")
        self.dense_layers = _stack(Block, config, rngs, "dense_layers")
        self.norm = Norm(config.norm, D, ("norm",), config.norm_eps)
        head = None if config.tied_head else Linear(
            rngs, "head", "BLD,DV->BLV", (D, V), ("embed", "vocab"), config.init_std, None
        )  # fmt: skip
        self.head = head
        self.mtp = _stack(MTPBlock, config, rngs, MTP_STACK)

    def __call__(
        self,
        tokens_BL: jax.Array,
        positions_BL: jax.Array,
        segments_BL: jax.Array,
        totals: BatchTotals,
        remat: RematConfig,
    ) -> tuple[jax.Array, Stats]:
        """Token, position and segment ids [B, L] -> (residual stream after the final norm [B, L, D], stats)."""
        context = self.context(positions_BL, segments_BL, totals)
        stacks = ("layers",) if self.dense_layers is None else ("layers", "dense_layers")
        inputs = {stack: (self._params(stack), layer_data(self.config, stack, totals)) for stack in stacks}

        def layer(stack: str) -> LayerFunction:
            run = self.layer(stack)
            return lambda params, x_BLD, data: run(params, x_BLD, context, data)

        x_BLD, stats = self.embed_tokens(tokens_BL, positions_BL), Stats()
        for run, follows in split_ends(self.config, *skipped_layers()):
            layers = [layer(stack) for stack, _ in run.pattern]
            slices = [
                jax.tree.map(lambda a, rows=rows: jnp.asarray(a[rows]), inputs[stack]) for stack, rows in run.pattern
            ]
            params, data = zip(*slices, strict=True)
            with recipe_only(follows):
                x_BLD, reports = run_layers(layers, params, x_BLD, data, remat)
            for report in reports:
                stats |= {
                    name: jnp.concatenate([stats[name], each]) if name in stats else each
                    for name, each in report.items()
                }
        return self.final_norm(x_BLD), stats

    def layer(self, stack: str) -> Callable[[Any, jax.Array, BatchContext, LayerData], tuple[jax.Array, Stats]]:
        """One layer of a stack as a function: (params, x_BLD, context, data) -> (x_BLD, stats)."""
        graph, _ = nnx.split(getattr(self, stack))
        return lambda params, x_BLD, context, data: nnx.merge(graph, params)(x_BLD, context, data)

    def _params(self, stack: str) -> Any:
        return nnx.to_pure_dict(nnx.split(getattr(self, stack))[1])

    def mtp_streams(
        self,
        x_BLD: jax.Array,
        tokens_BL: jax.Array,
        positions_BL: jax.Array,
        segments_BL: jax.Array,
        totals: BatchTotals,
        remat: RematConfig,
    ) -> tuple[list[jax.Array], Stats]:
        """The output [B, L, D] of each depth of multi-token prediction, which the head reads, and stats [K, ...].

        `x_BLD` is the output of `__call__` for the same ids.
        """
        graph, _ = nnx.split(self.mtp)
        inputs = self._params(MTP_STACK), layer_data(self.config, MTP_STACK, totals)
        streams, reports = [], []
        for depth in range(self.config.mtp):
            params, data = jax.tree.map(lambda a, depth=depth: a[depth], inputs)
            ids_BL, spans_BL = shifted_fields(depth + 1, segments_BL, (tokens_BL, 0), (segments_BL, 0))
            context = self.context(positions_BL, spans_BL, totals)

            def predict(
                params: Any, x_BLD: jax.Array, next_BLD: jax.Array, context: BatchContext = context,
                data: LayerData = data,
            ) -> Any:  # fmt: skip
                return nnx.merge(graph, params)(x_BLD, next_BLD, context, data)

            # Outside a loop only a barrier keeps the compiler from replacing the recomputation by saved values.
            predict = checkpointed(predict, remat, looped=False)
            x_BLD, report = predict(params, x_BLD, self.embed_tokens(ids_BL, positions_BL))
            streams.append(x_BLD)
            reports.append(report)
        return streams, jax.tree.map(lambda *each: jnp.stack(each), *reports)

    def embed_tokens(self, tokens_BL: jax.Array, positions_BL: jax.Array) -> jax.Array:
        """Token and position ids [B, L] -> residual stream before the first layer [B, L, D]."""
        # Two constraints: a table sharded over vocabulary gives partial sums of whole vectors, which are then sharded.
        x_BLD = constrain(self.embed(tokens_BL, positions_BL), "batch", "seq_len", "hidden")
        return constrain(x_BLD, "batch", "residual_seq", "hidden")

    def context(self, positions_BL: jax.Array, segments_BL: jax.Array, totals: BatchTotals = NO_TOTALS) -> BatchContext:
        """The inputs that all layers share, from position and segment ids [B, L]; `layer_data` has those of each."""
        config = self.config
        scaling = rope.scaled(config.mla.rope_dim if config.mla.kv_rank else config.width_of_head, config.rope)
        rotation = rope.tables(positions_BL, *scaling) if config.positions == "rope" else None
        shared = {name: total for name, total in totals.items() if name != "mixtures"}
        return BatchContext(segments_BL, positions_BL, rotation, shared)

    def final_norm(self, x_BLD: jax.Array) -> jax.Array:
        """Residual stream after the last layer -> input of the head [B, L, D]."""
        return normalise(self.norm, x_BLD)


def _stack(module: type[Block] | type[MTPBlock], config: ModelConfig, rngs: nnx.Rngs, stack: str) -> Any:
    """The modules of a stack, initialised independently, as one with stacked parameters; None for an empty stack."""
    slots = stack_slots(config, stack)
    if not slots:
        return None
    keys = jax.random.split(rngs.params(), len(slots))
    return nnx.vmap(lambda key: module(config, nnx.Rngs(key), slots[0]))(keys)
