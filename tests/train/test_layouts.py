"""The layout never changes the answer: losses, gradients, parameters and argument bytes under every layout."""

from __future__ import annotations

import math
from typing import Any

import jax
import pytest
from runs import config_of, packed_rows, setup_of, train_on, worst_relative_error

from jaxtrain.train.batch import shard_batch
from jaxtrain.train.step import compile_step

LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "ddp": {},
    "ddp, 2 microbatches": {"train": {"accumulation": 2}},
    "zero1": {"rules": {"preset": ["zero1"]}},
    "zero2": {"rules": {"preset": ["zero2"]}},
    "fsdp": {"rules": {"preset": ["fsdp"]}},
    "tensor=4": {"mesh": {"tensor": 4}, "rules": {"preset": ["tensor"]}},
    "tensor=8, kv heads replicated": {"mesh": {"tensor": 8}, "rules": {"preset": ["tensor"]}},
    "tensor=4, sequence parallelism": {"mesh": {"tensor": 4}, "rules": {"preset": ["tensor_sequence"]}},
    "data=2 x tensor=2, fsdp, 4 microbatches, remat full": {
        "mesh": {"data": 2, "tensor": 2}, "rules": {"preset": ["fsdp", "tensor"]}, "train": {"accumulation": 4},
        "remat": {"policy": "full"},
    },
    "hybrid fsdp": {"mesh": {"data": 2, "tensor": 4}, "rules": {"preset": ["hybrid_fsdp"]}},
    "zero2, tensor=2, 4 microbatches, remat dots of 2 blocks": {
        "mesh": {"tensor": 2}, "rules": {"preset": ["zero2", "tensor_sequence"]}, "train": {"accumulation": 4},
        "remat": {"policy": "dots", "every": 2},
    },
}  # fmt: skip
DEVICES = {"data=2 x tensor=2, fsdp, 4 microbatches, remat full": 4}
BATCHES = [packed_rows(seed) for seed in range(10)]


@pytest.fixture(scope="module")
def reference() -> Any:
    return train_on(setup_of(config_of(), devices=1), BATCHES)


@pytest.mark.parametrize("name", LAYOUTS)
def test_same_losses_and_parameters(name: str, reference: Any) -> None:
    setup = setup_of(config_of(**LAYOUTS[name]), DEVICES.get(name))
    metrics, state, _ = train_on(setup, BATCHES)
    for got, want in zip(metrics, reference[0], strict=True):
        assert got["scored_tokens"] == want["scored_tokens"]
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-5)
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)
        assert got["learning_rate"] == pytest.approx(want["learning_rate"], rel=1e-6)
    error, path = worst_relative_error(state["params"], reference[1]["params"])
    assert error < 1e-4, path


@pytest.fixture(scope="module")
def gradients() -> Any:
    return _gradients(setup_of(config_of(), devices=1))


@pytest.mark.parametrize("name", LAYOUTS)
def test_same_gradient_of_every_leaf(name: str, gradients: Any) -> None:
    error, path = worst_relative_error(_gradients(setup_of(config_of(**LAYOUTS[name]), DEVICES.get(name))), gradients)
    assert error < 2e-5, path


def _gradients(setup: Any, scale: float = 3.0) -> Any:
    params = setup.init_state()["params"]
    batch = shard_batch(BATCHES[0], 0, setup.batch_shape, setup.batch_sharding)
    return jax.device_get(jax.jit(lambda p, b: setup.step.gradients(p, b, scale)[0])(params, batch))


# Requirements section 3 in float32: weight 4 (it is its own master), moments 8; the gradient is no argument.
FORMULAS = {
    "ddp": lambda p, n: 12 * p,
    "zero1": lambda p, n: 4 * p + 8 * p / n,
    "zero2": lambda p, n: 4 * p + 8 * p / n,
    "fsdp": lambda p, n: 12 * p / n,
}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_argument_bytes_match_the_formulas(name: str, compute: str) -> None:
    setup = setup_of(config_of(rules={"preset": [name]}, precision={"compute": compute}))
    p, n = setup.model.count(), 8
    expected = FORMULAS[name](p, n)
    if compute == "bfloat16" and name in ("zero1", "zero2"):
        # The float32 master is optimizer state and sharded as such; the bfloat16 weight lives inside the step.
        expected = 12 * p / n
    step = compile_step(setup.step, setup.abstract, setup.abstract_batch)
    batch = sum(math.prod(field.sharding.shard_shape(field.shape)) * 4 for field in setup.abstract_batch.values())
    assert step.memory_analysis().argument_size_in_bytes - batch == pytest.approx(expected, rel=0.002)


def test_gradients_of_zero2_leave_the_step_sharded() -> None:
    setup = setup_of(config_of(rules={"preset": ["zero2"]}))
    gradients = jax.jit(lambda p, b: setup.step.gradients(p, b, 1.0)[0]).lower(
        setup.abstract["params"], setup.abstract_batch
    )
    for leaf, sharding in zip(
        jax.tree.leaves(setup.model.params), jax.tree.leaves(gradients.compile().output_shardings), strict=True
    ):
        assert math.prod(sharding.shard_shape(leaf.shape)) == leaf.size // 8
