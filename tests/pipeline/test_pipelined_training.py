"""Pipelines against one device: gradients, losses, skipped steps and clipping under every schedule."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import LENGTH, ROWS, config_of, packed_rows, setup_of, train_on, worst_relative_error

from jaxtrain.checkpoint.order import CheckpointOrder
from jaxtrain.config import ConfigError
from jaxtrain.ops.loss import IGNORE
from jaxtrain.pipeline.stages import Stages
from jaxtrain.train.batch import shard_batch
from jaxtrain.train.resolve import Bound

BATCHES = [packed_rows(seed) for seed in range(3)]
Sections = dict[str, dict[str, Any]]
PROVE = pytest.mark.prove


def pipe(stages: int, microbatches: int, schedule: str = "1f1b", **sections: Any) -> Sections:
    pipeline = {"schedule": schedule, **sections.pop("pipeline", {})}
    sections.setdefault("train", {})["accumulation"] = microbatches
    return {**sections, "mesh": {"pipe": stages, **sections.pop("mesh", {})}, "pipeline": pipeline}


# Each case differs in schedule, chunks, empty slots, sharding of weights, tied weights or saved values.
LAYOUTS: dict[str, Sections] = {
    "pipe=4 x data=2, 1f1b, M=8": pipe(4, 8),
    "pipe=2 x data=2 x tensor=2, interleaved, zero2": pipe(
        2, 4, "interleaved", mesh={"tensor": 2}, rules={"preset": ["zero2", "tensor"]}
    ),
}
PROVEN: dict[str, Sections] = {
    "pipe=4, gpipe, M=4, sequence parallelism": pipe(
        4, 4, "gpipe", mesh={"tensor": 2}, rules={"preset": ["tensor_sequence"]}
    ),
    "pipe=2 x data=4, zero bubble, fsdp, remat of 2 layers": pipe(
        2, 4, "zero_bubble", rules={"preset": ["fsdp"]}, remat={"policy": "full", "every": 2}
    ),
    **{f"pipe=2, {s}, M={m}": pipe(2, m, s) for s in ("gpipe", "1f1b", "zero_bubble") for m in (2, 8)},
    **{f"pipe=4, {s}, M={m}": pipe(4, m, s) for s in ("gpipe", "1f1b", "zero_bubble") for m in (4, 16)},
    **{f"pipe=2, interleaved, M={m}": pipe(2, m, "interleaved") for m in (2, 4, 8)},
    "pipe=2, M=1: fewer microbatches than stages": pipe(2, 1),
    "pipe=4, zero1, tensor": pipe(4, 8, mesh={"tensor": 2}, rules={"preset": ["zero1", "tensor"]}),
    "pipe=2, fsdp, tensor": pipe(2, 4, mesh={"tensor": 2}, rules={"preset": ["fsdp", "tensor_sequence"]}),
    "pipe=2, stages 3 + 1": pipe(2, 4, pipeline={"stages": [3, 1]}),
    "pipe=2, zero bubble, stages 1 + 3": pipe(2, 4, "zero_bubble", pipeline={"stages": [1, 3]}),
    "pipe=2, vocabulary whole": pipe(2, 4, rules={"vocab": None}),
    "pipe=2, inputs in host memory": pipe(
        2,
        4,
        "interleaved",
        remat={"policy": "offload"},
        mesh={"tensor": 2},
        rules={"preset": ["zero2", "tensor_sequence"]},
    ),
    "pipe=2, zero bubble, inputs of two layers in host memory": pipe(
        2, 4, "zero_bubble", remat={"policy": "offload", "every": 2}, rules={"preset": ["fsdp"]}
    ),
    "pipe=2, dots": pipe(2, 4, remat={"policy": "dots"}),
    "pipe=2, interleaved, attention's output saved": pipe(
        2, 4, "interleaved", remat={"policy": "names", "names": ["attention_residual", "attention_out"]}
    ),
    "pipe=2 x seq=2, zero bubble, the ring's output saved": pipe(
        2, 4, "zero_bubble", mesh={"seq": 2}, remat={"policy": "names", "names": ["attention_out"]}
    ),
    "pipe=2, zero bubble, dots": pipe(2, 4, "zero_bubble", remat={"policy": "dots"}),
    "pipe=2, zero bubble, names, remat of 2 layers, tensor": pipe(
        2,
        4,
        "zero_bubble",
        remat={"policy": "names", "names": ["qkv", "mlp_hidden"], "every": 2},
        mesh={"tensor": 2},
        rules={"preset": ["zero1", "tensor_sequence"]},
    ),
}


@pytest.fixture(scope="module")
def gradients() -> Callable[[str], Any]:
    """Gradients on one device, of a model with a separate or a tied head."""
    found: dict[str, Any] = {}

    def of(kind: str) -> Any:
        if kind not in found:
            found[kind] = gradients_of(setup_of(config_of(model=MODELS[kind]), devices=1))
        return found[kind]

    return of


MODELS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied, windows, learned positions": {
        "tied_head": True, "windows": [None, 4], "positions": "learned", "norm": "layernorm", "activation": "gelu",
        "mlp_bias": True, "out_bias": True, "n_layers": 5,
    },
}  # fmt: skip


def gradients_of(setup: Bound, fields: Any = BATCHES[0]) -> tuple[Any, dict[str, Any]]:
    """Gradients of 3 x the loss in the model's order of layers, and sums."""
    params = setup.init_state()["params"]
    batch = shard_batch(fields, 0, setup.batch_shape, setup.batch_sharding)
    gradients, sums = jax.device_get(jax.jit(setup.step.gradients)(params, batch, 3.0))
    stages = getattr(setup.model, "stages", None)
    if stages is not None:
        for stack, occupied in stages.occupied.items():
            for leaf in jax.tree.leaves(gradients[stack]):
                assert not leaf[~occupied.ravel()].any(), "an empty slot has a gradient"
            ordered = jax.tree.map(partial(stages.to_model, stack), gradients[stack])
            gradients = {**gradients, stack: jax.device_get(ordered)}
    return gradients, sums


def check(sections: Sections, want: tuple[Any, dict[str, Any]], fields: Any = BATCHES[0]) -> None:
    mesh = sections["mesh"]
    replicas = mesh.get("data", ROWS // sections["train"]["accumulation"])  # at most one sequence per replica
    devices = min(8, mesh["pipe"] * mesh.get("tensor", 1) * mesh.get("seq", 1) * replicas)
    got, sums = gradients_of(setup_of(config_of(**sections), devices), fields)
    error, path = worst_relative_error(got, want[0])
    assert error < 2e-5, path
    assert sums["scored"] == want[1]["scored"]
    assert sums["loss"] == pytest.approx(want[1]["loss"], rel=1e-6)


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_are_those_of_one_device(name: str, gradients: Any) -> None:
    check(LAYOUTS[name], gradients("untied"))


@pytest.mark.prove
@pytest.mark.parametrize("name", PROVEN)
def test_gradients_are_those_of_one_device_everywhere(name: str, gradients: Any) -> None:
    check(PROVEN[name], gradients("untied"))


def test_residuals_of_idle_slots_give_no_nan() -> None:
    """In a padding sequence all keys are masked; an idle slot would use its saved denominator with visible keys."""
    fields = {name: field.copy() for name, field in BATCHES[0].items()}
    for name, field in fields.items():
        field[-2:] = IGNORE if name == "labels" else 0
    remat = {"policy": "names", "names": ["attention_out"]}
    want = gradients_of(setup_of(config_of(), devices=1), fields)
    check(pipe(2, 4, mesh={"data": 1, "seq": 2}, remat=remat), want, fields)


MIXED = {
    "n_layers": 6, "windows": [None, 8],
    "moe": {"experts": 4, "top_k": 2, "d_ff": 16, "first_dense": 2, "balance_weight": 0.02, "z_weight": 0.01},
}  # fmt: skip
TWO_AND_TWO = {**MIXED, "n_layers": 9, "moe": {**MIXED["moe"], "first_dense": 1, "every": 2}}


@pytest.mark.parametrize(
    ("model", "sections"),
    [
        pytest.param(MIXED, pipe(2, 2, mesh={"data": 1}), id="dense layers first"),
        pytest.param(MIXED, pipe(2, 4, mesh={"expert": 2}), id="dense layers first, experts apart", marks=PROVE),
        pytest.param(TWO_AND_TWO, pipe(2, 4, "zero_bubble"), id="every other one", marks=PROVE),
        pytest.param(TWO_AND_TWO, pipe(2, 2, "interleaved"), id="every other one, chunks", marks=PROVE),
        pytest.param(MIXED, pipe(2, 4, remat={"policy": "full", "every": 2}), id="segments of two", marks=PROVE),
        pytest.param(MIXED, pipe(2, 4, "gpipe", remat={"policy": "dots"}), id="dots", marks=PROVE),
        pytest.param(MIXED, pipe(2, 4, pipeline={"stages": [1, 5]}), id="a dense layer on each side", marks=PROVE),
    ],
)
def test_layers_of_two_kinds_on_any_stage(model: dict[str, Any], sections: Sections) -> None:
    want = gradients_of(setup_of(config_of(model=model), devices=1))
    check({**sections, "model": model}, want)


def test_stacks_of_two_kinds_survive_the_order_of_checkpoints() -> None:
    """Parameters and moments of both stacks are restored from stage order, bit for bit."""
    setup = setup_of(config_of(**pipe(4, 4, model=TWO_AND_TWO)), 4)
    state = setup.init_state()
    checkpoint = CheckpointOrder(setup).to_checkpoint(state)
    params = checkpoint["params"]
    rows = {stack: {leaf.shape[0] for leaf in jax.tree.leaves(params[stack])} for stack in setup.model.stacks}
    assert rows == {"dense_layers": {5}, "layers": {4}}
    for got, want in zip(
        jax.tree.leaves(CheckpointOrder(setup).from_checkpoint(checkpoint)), jax.tree.leaves(state), strict=True
    ):
        np.testing.assert_array_equal(got, want)


@pytest.mark.prove
def test_tied_head_windows_and_empty_slots(gradients: Any) -> None:
    kind = "tied, windows, learned positions"
    check(pipe(4, 4, model=MODELS[kind]), gradients(kind))


@pytest.mark.prove
def test_tied_head_and_chunks(gradients: Any) -> None:
    kind = "tied, windows, learned positions"
    check(pipe(2, 4, "interleaved", model=MODELS[kind]), gradients(kind))


@pytest.mark.parametrize("sections", [{}, pipe(2, 4, mesh={"data": 1})], ids=["layers in a loop", "stages"])
def test_offload_saves_layer_inputs_in_host_memory(sections: Sections) -> None:
    """Saved inputs are in host memory in the traced program; CPU devices have no second memory to compile for."""
    setups = [setup_of(config_of(**sections, remat={"policy": p}), 2 if sections else 1) for p in ("full", "offload")]
    texts = [str(jax.make_jaxpr(s.step.gradients)(s.abstract["params"], s.abstract_batch, 1.0)) for s in setups]
    sequences = ROWS // 4 if sections else ROWS
    assert f"f32<host>[{sequences},{LENGTH},64]" in texts[1] and "<host>" not in texts[0]


def test_clipped_steps_and_held_out_loss() -> None:
    clipped = {"optimizer": {"clip_norm": 0.1}}
    alone, piped = (
        setup_of(config_of(**sections), devices)
        for sections, devices in ((clipped, 1), (pipe(2, 4, "interleaved", **clipped), 8))
    )
    want, state, _ = train_on(alone, BATCHES)
    got, moved, _ = train_on(piped, BATCHES)
    for one, other in zip(got, want, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
        assert other["grad_norm"] > 0.1, "nothing was clipped"
    error, path = worst_relative_error(CheckpointOrder(piped).to_model_order(moved)["params"], state["params"])
    assert error < 1e-4, path
    sums = [
        jax.device_get(
            jax.jit(setup.step.evaluate)(params, shard_batch(BATCHES[1], 0, setup.batch_shape, setup.batch_sharding))
        )
        for setup, params in ((alone, state["params"]), (piped, moved["params"]))
    ]
    assert sums[1][0] == pytest.approx(sums[0][0], rel=1e-5) and sums[0][1] == sums[1][1] > 0


def test_logits_for_sampling_are_computed_by_the_stages() -> None:
    alone, piped = (
        setup_of(config_of(model={"n_layers": 5}, **sections), devices)
        for sections, devices in (({}, 1), (pipe(4, 4), 8))
    )
    ids = np.arange(7)[None] * 5
    positions, segments = np.arange(7)[None], np.ones((1, 7), np.int32)
    want, got = (
        jax.device_get(jax.jit(setup.model.logits)(setup.init_state()["params"], ids, positions, segments))
        for setup in (alone, piped)
    )
    assert worst_relative_error(got, want)[0] < 1e-5


@pytest.mark.prove
def test_an_overflow_skips_the_step_on_every_stage() -> None:
    half = {"precision": {"compute": "float16", "scale_init": 2.0**24}}
    want, _, _ = train_on(setup_of(config_of(**half), 1), BATCHES)
    setup = setup_of(config_of(**pipe(2, 4, **half)))
    got, _, _ = train_on(setup, BATCHES)
    assert [m["applied"] for m in got] == [m["applied"] for m in want]
    assert [m["loss_scale"] for m in got] == [m["loss_scale"] for m in want]
    assert not want[0]["applied"], "nothing overflowed"
    for one, other in zip(got, want, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=2e-3)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_stage_order_is_a_permutation(data: st.DataObject) -> None:
    stages, chunks, slots = (data.draw(st.integers(1, 4)) for _ in range(3))
    n = data.draw(st.integers(1, stages * chunks * slots))
    flat = np.full(stages * chunks * slots, -1)
    where = data.draw(st.permutations(range(flat.size)))[:n]
    flat[np.array(where)] = np.arange(n)
    order = Stages(flat.reshape(stages, chunks, slots).astype(np.int32), ("layers",) * slots, ("layers",) * n)
    leaf = np.random.default_rng(n).normal(size=(n, 3)).astype(np.float32)
    staged = order.to_stages("layers", jax.numpy.asarray(leaf))
    assert not np.asarray(staged)[flat < 0].any()
    np.testing.assert_array_equal(order.to_model("layers", staged), leaf)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (pipe(4, 4, model={"n_layers": 3}), ["mesh.pipe 4", "model.n_layers is 3"]),
        (pipe(2, 4, remat={"policy": "full", "every": 4}), ["remat.every 4", "2 x layers", "2 layer slots"]),
        (pipe(2, 4, pipeline={"microbatches": 8}), ["pipeline.microbatches 8", "train.accumulation 4"]),
        (pipe(2, 4, "1f2b"), ["pipeline.schedule '1f2b'", "1f1b"]),
        (pipe(2, 4, model={"vocab_size": 129}), ["vocab", "pipe", "129"]),
    ],
)
def test_impossible_pipelines_are_refused_with_a_fix(sections: Sections, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        setup_of(config_of(**sections))
    assert all(word in str(error.value) for word in words), str(error.value)
