"""Experts never change the answer: gradients, loads and biases of mixtures under every layout, all losses on."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
from runs import BASE, config_of, packed_rows, setup_of, train_on, worst_relative_error

from jaxtrain.ops.reference import use_reference
from jaxtrain.train.batch import shard_batch

MOE: dict[str, Any] = {
    "experts": 8, "top_k": 2, "d_ff": 24, "shared": 1, "balance_weight": 0.05, "z_weight": 0.01, "bias_rate": 0.01,
    "router": "sigmoid_chosen", "scale": 1.5,
}  # fmt: skip
MODEL = {**BASE["model"], "d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_ff": 32}
BATCHES = [packed_rows(seed) for seed in range(3)]

LAYOUTS: dict[str, tuple[int, str, dict[str, dict[str, Any]]]] = {
    "expert=8": (8, "batch", {"mesh": {"expert": 8}}),
    "expert=4 x data=2, 2 microbatches": (8, "batch", {"mesh": {"expert": 4}, "train": {"accumulation": 2}}),
    "expert=2 x tensor=2 x data=2, sequence parallelism, zero2": (
        8, "sequence", {"mesh": {"expert": 2, "tensor": 2}, "rules": {"preset": ["zero2", "tensor_sequence"]}},
    ),
}  # fmt: skip
MORE: dict[str, tuple[int, str, dict[str, dict[str, Any]]]] = {
    "expert=2": (2, "batch", {"mesh": {"expert": 2}}),
    "expert=4, 4 microbatches": (4, "batch", {"mesh": {"expert": 4}, "train": {"accumulation": 4}}),
    "expert=4 x data=2, fsdp, 2 microbatches, remat": (
        8,
        "batch",
        {"mesh": {"expert": 4, "data": 2}, "rules": {"preset": ["fsdp"]}, "train": {"accumulation": 2},
         "remat": {"policy": "full"}},
    ),
    "expert=2 x tensor=2 x data=2, named values kept": (
        8,
        "batch",
        {"mesh": {"expert": 2, "tensor": 2}, "rules": {"preset": ["tensor"]},
         "remat": {"policy": "names", "names": ["router_logits", "experts_out"]}},
    ),
    "experts over expert=2 x tensor=2": (
        4,
        "sequence",
        {"mesh": {"expert": 2, "tensor": 2}, "rules": {"preset": ["tensor"], "experts": ["expert", "tensor"]}},
    ),
    "data=4, experts whole": (4, "batch", {"mesh": {"data": 4}}),
    "one device": (1, "batch", {}),
    "expert=4 x data=2, capacity": (8, "capacity", {"mesh": {"expert": 4}, "train": {"accumulation": 2}}),
    "expert=2 x tensor=2, capacity": (4, "capacity", {"mesh": {"expert": 2, "tensor": 2}}),
}  # fmt: skip
PLANS = {"batch": {}, "sequence": {"balance": "sequence"}, "capacity": {"capacity": 0.6}}


def mixture_of(plan: str = "batch", **sections: dict[str, Any]) -> Any:
    """config_of with a mixture in every layer, balanced in one of three ways."""
    return config_of(**{**sections, "model": {**MODEL, "moe": {**MOE, **PLANS[plan]}}})


def gradients_of(setup: Any, scale: float = 3.0) -> Any:
    params = setup.init_state()["params"]
    batch = shard_batch(BATCHES[0], 0, setup.batch_shape, setup.batch_sharding)
    return jax.device_get(jax.jit(lambda p, b: setup.step.gradients(p, b, scale))(params, batch))


@pytest.fixture(scope="module")
def reference() -> Any:
    """Gradients and sums of a loop over the experts on one device, by plan."""

    @functools.cache
    def of(plan_name: str) -> Any:
        with use_reference():
            return gradients_of(setup_of(mixture_of(plan_name), 1))

    return of


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.prove) for name in MORE)])
def test_same_gradients_losses_and_loads(name: str, reference: Any) -> None:
    devices, plan_name, sections = (LAYOUTS | MORE)[name]
    gradients, sums = gradients_of(setup_of(mixture_of(plan_name, **sections), devices))
    want, known = reference(plan_name)
    error, path = worst_relative_error(gradients, want)
    assert error < 2e-5, path
    for key in ("load", "dropped", "overflowed"):
        np.testing.assert_array_equal(sums[key], known[key])
    assert (sums["dropped"].sum() > 0) == (plan_name == "capacity")
    for key in {"loss", "balance", "mass", "router_z", "objective"} & known.keys():
        np.testing.assert_allclose(sums[key].sum(), known[key].sum(), rtol=1e-5)


@pytest.mark.parametrize(
    ("devices", "sections"),
    [(1, {"train": {"accumulation": 4}}), (8, {"mesh": {"seq": 4, "data": 2}})],
    ids=["4 microbatches", "sequences padded for 4 devices"],
)
def test_metrics_are_those_of_the_global_batch(devices: int, sections: dict[str, dict[str, Any]]) -> None:
    """A length that 2 x 4 devices do not divide is padded; a balance loss of weight 0 has no counting forward pass."""
    moe = {**MOE, "balance_weight": 0.0, "capacity": 0.7}

    def metrics(devices: int, **sections: dict[str, Any]) -> dict[str, Any]:
        tree = {**sections, "model": {**MODEL, "moe": moe}, "data": {**BASE["data"], "seq_len": 26}}
        batch = {name: field[:, :26] for name, field in BATCHES[0].items()}
        return train_on(setup_of(config_of(**tree), devices), [batch])[0][0]

    want, got = metrics(1), metrics(devices, **sections)
    assert want["dropped"] > 0 and got["expert_load"] == want["expert_load"]
    for name in ("dropped", "scored_tokens", "fill", "loss", "imbalance", "balance_loss", "router_z_loss"):
        assert got[name] == pytest.approx(want[name], rel=1e-5), name


@pytest.mark.prove
@pytest.mark.parametrize("sections", [
    {"mesh": {"expert": 8}}, {"mesh": {"expert": 2, "tensor": 2}, "train": {"accumulation": 2}},
])  # fmt: skip
def test_training_moves_the_same_biases_by_the_same_loads(sections: dict[str, dict[str, Any]]) -> None:
    want, known, _ = train_on(setup_of(mixture_of(), 1), BATCHES)
    metrics, state, _ = train_on(setup_of(mixture_of(**sections)), BATCHES)
    for got, row in zip(metrics, want, strict=True):
        assert got["expert_load"] == row["expert_load"]
        assert got["loss"] == pytest.approx(row["loss"], rel=1e-5)
    biases = [s["params"]["layers"]["mlp"]["router"]["correction"] for s in (state, known)]
    np.testing.assert_array_equal(*biases)
    # Three updates of the rate, up or down, or none where an expert had exactly the mean.
    assert set(np.unique(np.round(np.abs(biases[0]) / MOE["bias_rate"]))) <= {0, 1, 2, 3} and biases[0].any()
