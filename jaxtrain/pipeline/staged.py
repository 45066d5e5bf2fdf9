"""A model with layers in stage order: the same pure functions, run by the stages that hold the weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jaxtrain.config import RematConfig
from jaxtrain.nn.block import Stats
from jaxtrain.nn.layers import NO_TOTALS, BatchTotals
from jaxtrain.nn.model import KEEP_ALL, Model, Tree
from jaxtrain.pipeline.chunk import Chunk, Sums
from jaxtrain.pipeline.execute import Batch, Pipeline
from jaxtrain.pipeline.schedule import forward_schedule
from jaxtrain.pipeline.stages import Stages
from jaxtrain.pipeline.table import PipelineShape


@dataclass(frozen=True, eq=False)
class StagedModel(Model):
    """The model `canonical` with its stacks in stage order; `params` describes that order."""

    canonical: Model
    stages: Stages

    def init(self, key: jax.Array) -> Tree:
        """The canonical model's parameters of this key, in stage order."""
        params = self.canonical.init(key)
        stacks = {k: jax.tree.map(partial(self.to_stack, k), params[k]) for k in self.stages.rows}
        return {**params, **stacks}

    def hidden(
        self,
        params: Tree,
        tokens_BL: jax.Array,
        positions_BL: jax.Array,
        segments_BL: jax.Array,
        remat: RematConfig = KEEP_ALL,
        totals: BatchTotals = NO_TOTALS,
    ) -> tuple[jax.Array, Stats]:
        """`Model.hidden` for one microbatch that passes through the stages; no weight moves between devices."""
        fields = {"tokens": tokens_BL, "positions": positions_BL, "segments": segments_BL}

        def leave(weights: Tree, x_BLD: jax.Array, rows: Batch) -> tuple[jax.Array, Sums]:
            return jnp.float32(0), {"hidden": self.final_norm(weights, x_BLD)}

        batch = jax.tree.map(lambda field: field[None], fields)
        pipeline = Pipeline(Chunk(self, self.stages, params, None, totals), batch)
        stages, chunks, _ = self.stages.shape
        stats = pipeline.forward(forward_schedule(PipelineShape(stages, chunks, 1)), leave)
        return stats.pop("hidden"), stats

    def to_stack(self, stack: str, rows: jax.Array) -> jax.Array:
        """Layers of a stack [n, ...] in the model's order -> in stage order, zero in empty slots."""
        return self.stages.to_stages(stack, rows)

    def from_stack(self, stack: str, rows: jax.Array) -> jax.Array:
        """The inverse of `to_stack`."""
        return self.stages.to_model(stack, rows)

    def count(self) -> int:
        """Number of parameters, empty slots excluded."""
        return self.canonical.count()


def stage_model(model: Model, stages: Stages) -> StagedModel:
    """`model` with its layers in stage order."""
    return StagedModel(model.config, model.graph, stages.staged(model.params), model, stages)
