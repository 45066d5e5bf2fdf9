"""Further tokens are learned the same on any layout: in rows that devices share, beside the stages of a pipeline."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from runs import config_of, packed_rows, setup_of, train_on, worst_relative_error

from jaxtrain.checkpoint import Checkpoints, digest
from jaxtrain.checkpoint.order import CheckpointOrder
from jaxtrain.config import ConfigError
from jaxtrain.mesh.layout import bytes_per_device, flatten_paths
from jaxtrain.nn.mtp import mtp_labels
from jaxtrain.optim import build_optimizer, decay_mask
from jaxtrain.train.batch import shard_batch
from jaxtrain.train.resolve import Bound

Sections = dict[str, dict[str, Any]]
SIZES = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "d_model": 32, "d_ff": 48, "vocab_size": 128, "max_seq_len": 32}
MOE = {
    "experts": 8, "top_k": 2, "d_ff": 24, "shared": 1, "router": "sigmoid_chosen", "bias_rate": 0.01,
    "balance_weight": 0.02, "z_weight": 0.01,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    # Like DeepSeek-V3: latent attention, a dense layer first, balanced over each row.
    "deep": {
        **SIZES, "n_layers": 3, "n_kv_heads": None, "mtp": 2,
        "mla": {"kv_rank": 16, "q_rank": 8, "rope_dim": 4, "v_dim": 12},
        "moe": {**MOE, "first_dense": 1, "groups": 4, "top_groups": 2, "balance": "sequence"},
    },
    # Balanced over the global batch: loads are counted before the first microbatch, those of further blocks too.
    "mixtures": {**SIZES, "n_layers": 3, "mtp": 2, "init_std": 0.2, "moe": MOE},
    "one depth": {**SIZES, "n_layers": 2, "mtp": 1, "moe": MOE},
    # Layers whose windows differ, a table of positions, one table for embedding and head.
    "dense": {
        **SIZES, "n_layers": 4, "mtp": 2, "init_std": 0.2, "tied_head": True, "windows": [None, 5],
        "positions": "learned", "norm": "layernorm", "activation": "gelu", "mlp_bias": True, "out_bias": True,
    },
}  # fmt: skip


def pipe(stages: int, microbatches: int, schedule: str = "1f1b", **sections: Any) -> Sections:
    pipeline, train = {"schedule": schedule, **sections.pop("pipeline", {})}, {"accumulation": microbatches}
    return {**sections, "mesh": {"pipe": stages, **sections.pop("mesh", {})}, "pipeline": pipeline, "train": train}


# name -> model, devices, layout
LAYOUTS: dict[str, tuple[str, int, Sections]] = {
    "seq=2": ("dense", 2, {"mesh": {"seq": 2}}),
    "pipe=2 x expert=2": ("one depth", 4, pipe(2, 2, mesh={"expert": 2})),
}
PROVEN: dict[str, tuple[str, int, Sections]] = {
    "expert=2 x tensor=2 x data=2, fsdp, 2 microbatches, remat": (
        "deep", 8,
        {"mesh": {"expert": 2, "tensor": 2}, "rules": {"preset": ["fsdp", "tensor"]}, "train": {"accumulation": 2},
         "remat": {"policy": "full"}},
    ),
    "seq=2 x expert=2 x data=2": ("deep", 8, {"mesh": {"seq": 2, "expert": 2}}),
    "seq=2 x expert=2": ("one depth", 4, {"mesh": {"seq": 2, "expert": 2}}),
    "seq=4 x data=2, all_gather": ("dense", 8, {"mesh": {"seq": 4}, "attention": {"context_parallel": "all_gather"}}),
    "seq=2, ulysses": ("deep", 2, {"mesh": {"seq": 2}, "attention": {"context_parallel": "ulysses"}}),
    "seq=2 x expert=2 x data=2, loads counted first": (
        "mixtures", 8, {"mesh": {"seq": 2, "expert": 2}, "train": {"accumulation": 2}},
    ),
    "seq=2 x tensor=2 x data=2, fsdp, sequence parallelism, remat": (
        "deep", 8,
        {"mesh": {"seq": 2, "tensor": 2}, "rules": {"preset": ["fsdp", "tensor_sequence"]},
         "train": {"accumulation": 2}, "remat": {"policy": "full"}},
    ),
    "pipe=2": ("one depth", 2, pipe(2, 4)),
    "pipe=2 x expert=2 x data=2, stages 2 + 1": (
        "mixtures", 8, pipe(2, 2, mesh={"expert": 2}, pipeline={"stages": [2, 1]}),
    ),
    "pipe=2 x expert=2 x data=2, a dense layer first": ("deep", 8, pipe(2, 4, mesh={"expert": 2})),
    "pipe=2, gpipe": ("mixtures", 2, pipe(2, 4, "gpipe")),
    "pipe=2, interleaved": ("dense", 2, pipe(2, 4, "interleaved")),
    "pipe=4 x data=2, zero2": ("dense", 8, pipe(4, 8, rules={"preset": ["zero2"]})),
    "pipe=2 x expert=2 x data=2, zero bubble": ("one depth", 8, pipe(2, 4, "zero_bubble", mesh={"expert": 2})),
    "pipe=2 x expert=2 x tensor=2, fsdp, sequence parallelism, remat": (
        "mixtures", 8,
        pipe(2, 4, mesh={"expert": 2, "tensor": 2}, rules={"preset": ["fsdp", "tensor_sequence"]},
             remat={"policy": "full"}),
    ),
    "pipe=2 x seq=2 x data=2": ("mixtures", 8, pipe(2, 4, mesh={"seq": 2})),
    "pipe=2 x seq=2 x expert=2, ulysses": (
        "one depth", 8, pipe(2, 4, mesh={"seq": 2, "expert": 2}, attention={"context_parallel": "ulysses"}),
    ),
    "pipe=2 x seq=2, interleaved": ("dense", 4, pipe(2, 2, "interleaved", mesh={"seq": 2})),
}  # fmt: skip
BATCHES = [packed_rows(seed) for seed in range(4)]


def on(kind: str, devices: int = 1, laid: Sections | None = None) -> Bound:
    """A model under a layout, every loss switched on."""
    laid = laid or {}
    return setup_of(
        config_of(model=MODELS[kind], **{**laid, "train": {"z_loss": 0.01, **laid.get("train", {})}}), devices
    )


def gradients_of(setup: Bound) -> tuple[Any, dict[str, Any]]:
    """Gradients of 3 x the loss in the model's order of layers, and sums."""
    batch = shard_batch(BATCHES[0], 0, setup.batch_shape, setup.batch_sharding)
    gradients, sums = jax.device_get(jax.jit(setup.step.gradients)(setup.init_state()["params"], batch, 3.0))
    ordered = {k: jax.tree.map(partial(setup.model.from_stack, k), part) for k, part in gradients.items()}
    return jax.device_get(ordered), sums


@cache
def alone(kind: str) -> tuple[Any, dict[str, Any]]:
    """Gradients and sums on one device, in one microbatch."""
    return gradients_of(on(kind))


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.prove) for name in PROVEN)])
def test_gradients_and_sums_are_those_of_one_device(name: str) -> None:
    kind, devices, laid = (LAYOUTS | PROVEN)[name]
    got, sums = gradients_of(on(kind, devices, laid))
    want, known = alone(kind)
    error, path = worst_relative_error(got, want)
    assert error < 2e-5, path
    assert {*sums} == {*known} and np.abs(want["mtp"]["project"]["weight"]).max() > 0
    for key in {"scored", "mtp_scored", "load", "dropped"} & {*known}:
        np.testing.assert_array_equal(sums[key], known[key])
    for key in {"loss", "z_loss", "mtp_loss", "balance", "router_z", "objective"} & {*known}:
        np.testing.assert_allclose(sums[key], known[key], rtol=1e-5)


@pytest.fixture(scope="module")
def reference() -> Any:
    return train_on(on("deep"), BATCHES)


@pytest.mark.prove
@pytest.mark.parametrize("name", [
    "seq=2 x expert=2 x data=2", "expert=2 x tensor=2 x data=2, fsdp, 2 microbatches, remat",
])  # fmt: skip
def test_same_losses_and_parameters(name: str, reference: Any) -> None:
    _, devices, laid = (LAYOUTS | PROVEN)[name]
    metrics, state, _ = train_on(on("deep", devices, laid), BATCHES)
    _same(metrics, state["params"], reference)


@pytest.mark.prove
@pytest.mark.parametrize("name", ["pipe=2 x expert=2 x data=2, stages 2 + 1", "pipe=2 x seq=2 x data=2"])
def test_same_losses_and_parameters_beside_stages(name: str) -> None:
    """Correction biases of layers in stage order and of blocks that are in no stage each follow their own loads."""
    kind, devices, laid = (LAYOUTS | PROVEN)[name]
    want, setup = train_on(on(kind), BATCHES), on(kind, devices, laid)
    metrics, state, _ = train_on(setup, BATCHES)
    _same(metrics, CheckpointOrder(setup).to_model_order(state)["params"], want)


def _same(metrics: list[dict[str, Any]], params: Any, reference: Any) -> None:
    for got, want in zip(metrics, reference[0], strict=True):
        for key in ("loss", "mtp_loss", "grad_norm", "balance_loss"):
            assert got[key] == pytest.approx(want[key], rel=2e-5), key
        assert got["expert_load"] == want["expert_load"]
    error, path = worst_relative_error(params, reference[1]["params"])
    assert error < 1e-4, path


@pytest.mark.parametrize(("devices", "laid"), [(2, pipe(2, 2)), pytest.param(1, {}, marks=pytest.mark.prove)])
def test_held_out_loss_runs_no_further_block(devices: int, laid: Sections) -> None:
    """The same matmuls as without further tokens; counting the loads of experts has those of their blocks."""
    counts = []
    for depths in (0, 1):
        setup = setup_of(config_of(model={**MODELS["one depth"], "mtp": depths}, **laid), devices)
        step, params, batch = setup.step, setup.abstract["params"], setup.abstract_batch
        loads = jax.jit(lambda p, b, step=step: step._forward(p, b, step.totals(b), "load"))
        counts.append([f.lower(params, batch).as_text().count("dot_general") for f in (jax.jit(step.evaluate), loads)])
    (held_out, load), (further_held_out, further_load) = counts
    assert further_held_out == held_out > 0 and further_load > load > 0


def test_blocks_of_further_tokens_belong_to_no_stage() -> None:
    """Experts and widths are cut as those of layers, depths over nothing; each depth has moments of its own."""
    rules = {"preset": ["fsdp", "tensor"]}
    setup = on("mixtures", 8, pipe(2, 2, mesh={"expert": 2, "tensor": 2}, rules=rules))
    layers, further = (flatten_paths(setup.layout.weights[name]) for name in ("layers", "mtp"))
    for path, spec in layers.items():
        assert spec[0] == "pipe" and further[f"block/{path}"] == jax.sharding.PartitionSpec(None, *spec[1:]), path
    held = bytes_per_device(setup.model.params["mtp"], setup.layout.weights["mtp"], setup.topology.sizes, 4)
    assert any("model.mtp 2 belong to no stage" in note and f"{held / 1e9:.3g} GB" in note for note in setup.notes)
    params = setup.model.params
    assert {param.names[0] for param in jax.tree.leaves(params["mtp"])} == {"depths"}
    decays = decay_mask(params)["mtp"]
    assert decays["project"]["weight"] and not decays["norm"]["scale"] and not decays["block"]["mlp_norm"]["scale"]
    optimizer = build_optimizer(setup.config.optimizer.model_copy(update={"name": "adafactor"}), params)
    born = jax.tree.map(lambda param: jax.ShapeDtypeStruct(param.shape, np.float32), params)
    moments = flatten_paths(jax.eval_shape(optimizer.init, born))
    counts = [leaf.shape for path, leaf in moments.items() if path.startswith("0/") and path.endswith("/count")]
    assert (2,) in counts, "no count of updates a depth"


@pytest.mark.parametrize("optimizer", ["adafactor", pytest.param("adamw", marks=pytest.mark.prove)])
def test_checkpoints_of_a_pipeline_restore_on_one_device(tmp_path: Path, optimizer: str) -> None:
    rule = {"model": MODELS["mixtures"], "optimizer": {"name": optimizer}}
    piped = setup_of(config_of(**rule, **pipe(2, 2, pipeline={"stages": [1, 2]})), 2)
    single = setup_of(config_of(**rule), 1)
    rng = np.random.default_rng(0)
    leaves, tree = jax.tree.flatten(CheckpointOrder(piped).checkpoint_layout)
    values = [jax.device_put(rng.integers(1, 99, leaf.shape).astype(leaf.dtype), leaf.sharding) for leaf in leaves]
    state = CheckpointOrder(piped).from_checkpoint(jax.tree.unflatten(tree, values))
    checkpoints = Checkpoints(tmp_path / "checkpoints", piped.config.checkpoint)
    checkpoints.save(1, CheckpointOrder(piped).to_checkpoint(state), {}, {})
    found = checkpoints.restore(CheckpointOrder(single).checkpoint_layout)
    checkpoints.close()
    assert found is not None and digest(found.state) == digest(CheckpointOrder(piped).to_checkpoint(state))
    there, here = (
        jax.tree.leaves(each["params"]["mtp"]) for each in (CheckpointOrder(single).from_checkpoint(found.state), state)
    )
    for got, want in zip(there, here, strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_loads_of_each_depth_count_what_has_a_further_token(reference: Any) -> None:
    """Tokens with a further one at depth k visit two experts each; each stack's correction follows its own loads."""
    metrics, state, _ = reference
    segments = BATCHES[0]["segments"]
    for depth, load in zip((0, 0, 1, 2), metrics[0]["expert_load"], strict=True):
        here, further = segments[:, : 32 - depth], segments[:, depth:]
        inside = int(np.sum((here == further) & (here > 0)))
        assert sum(load) == 2 * inside
    loads = np.array([update["expert_load"] for update in metrics])
    moved = 0.01 * np.sign(loads.mean(axis=-1, keepdims=True) - loads).sum(axis=0)
    stacks = (state["params"]["layers"]["mlp"], state["params"]["mtp"]["block"]["mlp"])
    corrections = np.concatenate([stack["router"]["correction"] for stack in stacks])
    np.testing.assert_allclose(corrections, moved, atol=1e-6)
    assert np.abs(moved).max() > 0.01


def test_mean_is_over_the_labels_of_each_depth(reference: Any) -> None:
    """Born near zero, every depth predicts all tokens alike: log of the vocabulary, whatever share is scored."""
    assert reference[0][0]["mtp_loss"] == pytest.approx(np.log(128), rel=5e-3)
    labels = mtp_labels(BATCHES[0]["labels"], BATCHES[0]["segments"], 2)
    assert (labels[0] >= 0).sum() > (labels[1] >= 0).sum() > 0


def test_segments_of_remat_are_refused_before_anything_is_built() -> None:
    model = {**MODELS["deep"], "n_layers": 4}
    with pytest.raises(ConfigError, match=r"remat\.every 2.*use remat\.every 1"):
        setup_of(config_of(model=model, remat={"policy": "full", "every": 2}))
