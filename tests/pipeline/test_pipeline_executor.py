"""The executor alone, on one device: several schedules, and layers that report sums and objectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import packed_rows, worst_relative_error

from jaxtrain.config import ModelConfig, RematConfig
from jaxtrain.nn.model import Model, build
from jaxtrain.ops.loss import cross_entropy
from jaxtrain.pipeline.chunk import Chunk
from jaxtrain.pipeline.execute import Pipeline
from jaxtrain.pipeline.schedule import forward_schedule, make_schedule
from jaxtrain.pipeline.stages import Stages
from jaxtrain.pipeline.table import PipelineShape

CONFIG = ModelConfig(vocab_size=48, d_model=16, n_layers=5, n_heads=2, d_ff=24, max_seq_len=8, windows=[None, 3])
MICROBATCHES, COTANGENT = 4, 1.7
LAYERS = "layers"


@dataclass(frozen=True, eq=False)
class Reporting(Model):
    """Layers that report an objective, which depends on their weights and input, and a count of tokens."""

    def block(self, params: Any, stack: str) -> Callable[..., Any]:
        block_without_report = super().block(params, stack)

        def block(layer: Any, x_BLD: jax.Array, context: Any, data: Any) -> Any:
            y_BLD, _ = block_without_report(layer, x_BLD, context, data)
            objective = 0.1 * jnp.mean(jnp.tanh(x_BLD @ layer["mlp"]["up"]["weight"]) ** 2)
            tokens = jnp.sum(context.segments_BL > 0, dtype=jnp.int32) * jnp.arange(1, 3)
            return y_BLD, {"objective": objective, "tokens": tokens}

        return block


MODEL = Reporting(CONFIG, build(CONFIG).graph, build(CONFIG).params)
# One and two chunks on two stages, one layer slot empty.
SLOTS = {
    1: np.array([[[0, 1, 2]], [[3, 4, -1]]]),
    2: np.array([[[0, 1], [3, -1]], [[2, -1], [4, -1]]]),
}


def batch() -> dict[str, jax.Array]:
    fields = packed_rows(0, 2 * MICROBATCHES + 4, 8, 48)
    return {name: jnp.asarray(field[4:].reshape(MICROBATCHES, 2, 8)) for name, field in fields.items()}


def head(weights: Any, x_BLD: jax.Array, fields: dict[str, jax.Array]) -> Any:
    loss, scored = cross_entropy(MODEL.final_norm(weights, x_BLD), MODEL.head(weights), fields["labels"])
    return COTANGENT * loss, {"loss": loss, "scored": scored}


def sequential_objective(params: Any) -> tuple[jax.Array, Any]:
    """The objective and all sums, layer by layer and microbatch by microbatch."""
    data, total, found = jax.tree.map(jnp.asarray, MODEL.data()["layers"]), jnp.float32(0), []
    for m in range(MICROBATCHES):
        fields = {name: field[m] for name, field in batch().items()}
        x_BLD = MODEL.embed_tokens(params, fields["tokens"], fields["positions"])
        context = MODEL.context(params, fields["positions"], fields["segments"])
        reports = []
        for i in range(CONFIG.n_layers):
            layer = jax.tree.map(lambda w, i=i: w[i], params[LAYERS])
            layer_data = jax.tree.map(lambda a, i=i: a[i], data)
            x_BLD, report = MODEL.block(params, LAYERS)(layer, x_BLD, context, layer_data)
            reports.append(report)
        stats = jax.tree.map(lambda *each: jnp.stack(each), *reports)
        objective, sums = head(params, x_BLD, fields)
        total += objective + COTANGENT * jnp.sum(stats["objective"])
        found.append({**sums, **stats})
    return total, jax.tree.map(lambda *each: sum(each), *found)


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("1f1b", 1),
        ("zero_bubble", 2),
        pytest.param("gpipe", 1, marks=pytest.mark.prove),
        pytest.param("interleaved", 2, marks=pytest.mark.prove),
        pytest.param("zero_bubble", 1, marks=pytest.mark.prove),
    ],
)
def test_gradients_and_reports_of_layers(name: str, chunks: int) -> None:
    params = MODEL.init(jax.random.key(0))
    want, sums = jax.jit(jax.grad(sequential_objective, has_aux=True))(params)
    slots = SLOTS[chunks].astype(np.int32)
    stages = Stages(slots, (LAYERS,) * slots.shape[2], MODEL.stacks)
    shape = PipelineShape(2, chunks, MICROBATCHES)
    staged = {**params, LAYERS: jax.tree.map(partial(stages.to_stages, LAYERS), params[LAYERS])}

    def pipeline(weights: Any) -> Pipeline:
        return Pipeline(Chunk(MODEL, stages, weights, None), batch())

    got, reported = jax.jit(lambda w: pipeline(w).gradients(make_schedule(name, shape), head, COTANGENT))(staged)
    got = {**got, LAYERS: jax.tree.map(partial(stages.to_model, LAYERS), got[LAYERS])}
    error, path = worst_relative_error(jax.device_get(got), jax.device_get(want))
    assert error < 2e-5, path
    evaluated = jax.jit(lambda w: pipeline(w).forward(forward_schedule(shape), head))(staged)
    for found in (reported, evaluated):
        assert found.keys() == sums.keys()
        np.testing.assert_array_equal(found["tokens"], sums["tokens"])
        assert found["scored"] == sums["scored"] > 0
        np.testing.assert_allclose(found["objective"], sums["objective"], rtol=1e-5)
        np.testing.assert_allclose(found["loss"], sums["loss"], rtol=1e-5)


@pytest.mark.parametrize(
    ("remat", "widths"),
    [
        (RematConfig(policy="full"), [16]),
        (RematConfig(policy="names", names=["attention_residual", "mlp_up"]), [16, 16, 24]),
    ],
)
def test_residuals_are_the_input_and_the_named_values(remat: RematConfig, widths: list[int]) -> None:
    """No weight, position or mask: a stage has them in its backward pass anyway."""
    slots = SLOTS[1].astype(np.int32)
    stages = Stages(slots, (LAYERS,) * slots.shape[2], MODEL.stacks)
    params = MODEL.init(jax.random.key(0))
    staged = {**params, LAYERS: jax.tree.map(partial(stages.to_stages, LAYERS), params[LAYERS])}
    chunk = Chunk(MODEL, stages, staged, None, remat=remat)
    state = jax.tree.map(lambda leaf: leaf[0], Pipeline(chunk, batch()).state)
    fields = batch()["positions"][0], batch()["segments"][0]
    (((*values,),),) = chunk.residual_shapes(state, jnp.zeros((2, 8, 16)), fields)
    assert [value.shape for value in values] == [(3, 2, 8, width) for width in widths]
