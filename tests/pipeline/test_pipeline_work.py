"""The executor runs the operations of the table: matmuls of the compiled program, ticks and heads at run time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest
from runs import LENGTH, config_of, packed_rows, setup_of, worst_relative_error

from jaxtrain.config import ModelConfig
from jaxtrain.nn.model import Model, build
from jaxtrain.observe.flops import matmul_weights
from jaxtrain.ops.loss import cross_entropy
from jaxtrain.pipeline.chunk import Chunk
from jaxtrain.pipeline.execute import Pipeline
from jaxtrain.pipeline.schedule import MAKERS, Op, Order, PipelineShape, make_schedule, write_csv
from jaxtrain.pipeline.split import split_layers
from jaxtrain.pipeline.stages import Stages
from jaxtrain.program.flops import count_flops
from jaxtrain.program.hlo import read_program
from jaxtrain.train.batch import shard_batch
from jaxtrain.train.resolve import Bound

LAYERS = "layers"


def piped(schedule: str, microbatches: int, stages: int = 2, **sections: Any) -> Bound:
    """Stages of two layers on two replicas, one sequence of each microbatch per replica."""
    tree = {
        "mesh": {"pipe": stages, "data": 2}, "pipeline": {"schedule": schedule}, "model": {"n_layers": 2 * stages},
        "train": {"global_batch": 2 * microbatches, "accumulation": microbatches},
    }  # fmt: skip
    return setup_of(config_of(**tree | sections), devices=2 * stages)


def executed(setup: Bound) -> int:
    """Matmul FLOPs of one device for the gradients of a step."""
    compiled = jax.jit(setup.step.gradients).lower(setup.abstract["params"], setup.abstract_batch, 1.0).compile()
    program = read_program(compiled.as_text())
    assert not program.unknown
    return count_flops(program).total


CASES = [
    ("1f1b", 4, 1, 2),
    pytest.param("1f1b", 8, 1, 2, marks=pytest.mark.prove),
    pytest.param("interleaved", 4, 2, 2, marks=pytest.mark.prove),
    pytest.param("zero_bubble", 4, 1, 2, marks=pytest.mark.prove),
    pytest.param("zero_bubble", 4, 2, 2, marks=pytest.mark.prove),
    ("zero_bubble", 8, 1, 4),
    pytest.param("1f1b", 8, 1, 4, marks=pytest.mark.prove),
    pytest.param("1f1b", 6, 1, 4, marks=pytest.mark.prove),
    pytest.param("interleaved", 8, 2, 4, marks=pytest.mark.prove),
    pytest.param("zero_bubble", 8, 2, 4, marks=pytest.mark.prove),
]


@pytest.mark.parametrize(("schedule", "microbatches", "chunks", "stages"), CASES)
def test_matmuls_are_those_of_the_table(schedule: str, microbatches: int, chunks: int, stages: int) -> None:
    """A tick costs its kinds of operation, idle stages included, and nothing more; the head runs M times.

    Closed form for one device: F is a forward pass. B recomputes it but for the last product, whose result is not
    read, and computes the cotangents of inputs (attention's two products have four). W (part of B where the schedule is
    not split) has one product per weight. Head and vocabulary are sharded over all stages. Where only some ticks of a
    loop run the head it is a conditional, which the count includes in every tick.
    """
    setup = piped(schedule, microbatches, stages, pipeline={"schedule": schedule, "chunks": chunks})
    model, table = setup.config.model, make_schedule(schedule, PipelineShape(stages, chunks, microbatches))
    head = model.d_model * model.vocab_size
    weights = 2 * LENGTH * (matmul_weights(model) - head) // model.n_layers
    scores = 4 * LENGTH * LENGTH * model.n_heads * model.width_of_head
    unread = 2 * LENGTH * model.d_ff * model.d_model
    of_inputs = 2 * weights + 3 * scores - unread
    layers = model.n_layers // (stages * chunks)
    expected = table.ticks_with("F") * layers * (weights + scores)
    expected += table.ticks_with("B") * layers * (of_inputs + (0 if table.split else weights))
    expected += table.ticks_with("W") * layers * weights
    heads = [table.rows(phase)["head_microbatch"] >= 0 for phase in table.phases]
    assert sum(int(ticks.sum()) for ticks in heads) == microbatches
    expected += sum(len(ticks) for ticks in heads if ticks.any()) * 3 * 2 * LENGTH * head // stages
    assert executed(setup) == expected


@pytest.mark.parametrize(
    ("remat", "saved"),
    [
        # Per layer and token: the output projection, and with dots all products but the down projection, which is
        # not read; queries, keys and values are named after rotary positions.
        ({"policy": "names", "names": ["attention_residual"]}, "out"),
        pytest.param({"policy": "dots"}, "all", marks=pytest.mark.prove),
    ],
)
def test_saved_values_are_not_recomputed(remat: dict[str, Any], saved: str) -> None:
    full, saving = (executed(piped("1f1b", 4, remat=each)) for each in ({"policy": "full"}, remat))
    model = piped("1f1b", 4).config.model
    d, e = model.d_model, model.width_of_head
    products = {"out": model.n_heads * e * d}
    products["all"] = products["out"] + d * e * (model.n_heads + 2 * model.kv_heads) + 2 * d * model.d_ff
    ticks = make_schedule("1f1b", PipelineShape(2, 1, 4)).ticks_with("B")
    assert full - saving == ticks * 2 * 2 * LENGTH * products[saved]


@pytest.mark.prove
def test_attention_with_a_saved_output_is_not_recomputed() -> None:
    """With output and denominator saved, B has no product of probabilities and values; it still computes scores."""
    tiles = {"backend": "xla"}
    remats = {"policy": "full"}, {"policy": "names", "names": ["attention_out"]}
    full, saving = (executed(piped("1f1b", 4, remat=each, attention=tiles)) for each in remats)
    model, ticks = piped("1f1b", 4).config.model, make_schedule("1f1b", PipelineShape(2, 1, 4)).ticks_with("B")
    assert full - saving == ticks * 2 * 2 * LENGTH * LENGTH * model.n_heads * model.width_of_head


@dataclass(frozen=True, eq=False)
class Counted(Model):
    """A model that counts how often it runs, not how often it is traced."""

    ran: list[str] = field(default_factory=list)

    def embed_tokens(self, params: Any, *fields: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: self.ran.append("embedding"))
        return super().embed_tokens(params, *fields)


COUNTED = [
    ("1f1b", 1, 6),
    ("interleaved", 2, 6),
    pytest.param("zero_bubble", 1, 6, marks=pytest.mark.prove),
    pytest.param("zero_bubble", 2, 4, marks=pytest.mark.prove),
    pytest.param("gpipe", 1, 4, marks=pytest.mark.prove),
    pytest.param("interleaved", 2, 3, marks=pytest.mark.prove),
]


@pytest.mark.parametrize(("schedule", "chunks", "microbatches"), COUNTED)
def test_ticks_run_as_in_the_table_and_the_head_once_per_microbatch(
    schedule: str, chunks: int, microbatches: int
) -> None:
    """Counted at run time, four stages: the embedding runs in each tick of F and of B, the head per microbatch."""
    config = ModelConfig(vocab_size=48, d_model=16, n_layers=8, n_heads=2, d_ff=24, max_seq_len=8)
    model = Counted(config, build(config).graph, build(config).params)
    split = split_layers(model.stacks, 4, chunks)
    stages = Stages(split.layers, split.pattern, model.stacks)
    table = make_schedule(schedule, PipelineShape(4, chunks, microbatches))
    batch = packed_rows(0, microbatches * 4, 8, 48)
    batch = {name: jax.numpy.asarray(each.reshape(microbatches, 4, 8)) for name, each in batch.items()}

    def head(weights: Any, x_BLD: jax.Array, fields: dict[str, jax.Array]) -> Any:
        jax.debug.callback(lambda: model.ran.append("head"))
        loss, scored = cross_entropy(model.final_norm(weights, x_BLD), model.head(weights), fields["labels"])
        return loss, {"scored": scored}

    def run(params: Any) -> Any:
        staged = {**params, LAYERS: jax.tree.map(partial(stages.to_stages, LAYERS), params[LAYERS])}
        return Pipeline(Chunk(model, stages, staged, None), batch).gradients(table, head, 1.0)

    sums = jax.block_until_ready(jax.jit(run)(model.init(jax.random.key(0))))[1]
    jax.effects_barrier()
    assert sums["scored"] > 0
    assert Counter(model.ran) == {"embedding": table.ticks_with("F") + table.ticks_with("B"), "head": microbatches}
    if microbatches >= 4:
        assert table.ticks_with("F") == chunks * microbatches + 3


def pairs(shape: PipelineShape, in_lockstep: bool) -> list[Order]:
    """Two forwards, then their backwards."""
    groups = [range(m, min(m + 2, shape.microbatches)) for m in range(0, shape.microbatches, 2)]
    return [[Op(kind, m, 0) for group in groups for kind in "FB" for m in group]] * shape.stages


def gradients(setup: Bound) -> Any:
    params = setup.init_state()["params"]
    batch = shard_batch(packed_rows(0, rows=setup.batch_shape.global_batch), 0, setup.batch_shape, setup.batch_sharding)
    return jax.device_get(jax.jit(setup.step.gradients)(params, batch, 1.0)[0])


def test_custom_schedules_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function registered in MAKERS, and the same table with an idle tick in its middle as a file."""
    monkeypatch.setitem(MAKERS, "pairs", pairs)
    lines = write_csv(make_schedule("pairs", PipelineShape(2, 1, 4))).splitlines()
    path = tmp_path / "custom.csv"
    path.write_text("\n".join(["# an idle tick in the middle", *lines[:4], ",", *lines[4:]]) + "\n")
    want = gradients(setup_of(config_of(train={"global_batch": 8, "accumulation": 4}), devices=1))
    for schedule in ("pairs", str(path)):
        error, where = worst_relative_error(gradients(piped(schedule, 4)), want)
        assert error < 2e-5, (schedule, where)
