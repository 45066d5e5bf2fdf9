"""Registered losses and metrics: equal on one device and on a mesh, and refused by name before anything runs."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import config_of, packed_rows, setup_of

from jaxtrain.api import LOSSES, METRICS, ConfigError, HeadInputs
from jaxtrain.data import IGNORE
from jaxtrain.train.batch import shard_batch
from jaxtrain.train.step import compile_step


@pytest.fixture
def registered() -> Iterator[None]:
    @LOSSES.register("half")
    def half(inputs: HeadInputs) -> tuple[jax.Array, dict[str, jax.Array]]:
        loss, sums = LOSSES["cross_entropy"](inputs)
        return loss / 2, sums

    @METRICS.register("label_mean")
    def label_mean(inputs: HeadInputs) -> jax.Array:
        return jnp.sum(jnp.where(inputs.scored, inputs.batch["labels"], 0).astype(jnp.float32))

    yield
    LOSSES.unregister("half")
    METRICS.unregister("label_mean")


@pytest.mark.usefixtures("registered")
def test_a_registered_loss_and_metric_do_not_depend_on_the_mesh() -> None:
    batch = packed_rows(3)
    seen = []
    for loss, devices, sections in (
        ("half", 1, {}),
        ("half", 4, {"mesh": {"data": 2, "tensor": 2}, "rules": {"preset": ["zero2", "tensor"]}}),
        ("cross_entropy", 1, {}),
    ):
        setup = setup_of(
            config_of(train={"loss": loss, "metrics": ["label_mean"], "accumulation": 2}, **sections), devices
        )
        step = compile_step(setup.step, setup.abstract, setup.abstract_batch)
        _, metrics = step(setup.init_state(), shard_batch(batch, 0, setup.batch_shape, setup.batch_sharding))
        seen.append(jax.device_get({name: metrics[name] for name in ("loss", "grad_norm", "label_mean")}))
    labels = batch["labels"]
    assert seen[0]["label_mean"] == pytest.approx(labels[labels != IGNORE].mean(), rel=1e-6)
    for name, value in seen[0].items():
        np.testing.assert_allclose(seen[1][name], value, rtol=2e-5)
    assert seen[0]["loss"] == pytest.approx(seen[2]["loss"], rel=1e-6), "sums are reported as they are"
    assert 2 * seen[0]["grad_norm"] == pytest.approx(seen[2]["grad_norm"], rel=1e-5)


def test_unknown_names_are_refused_by_resolve() -> None:
    with pytest.raises(ConfigError, match=r"train.loss is 'cross_entrop'.*did you mean cross_entropy"):
        setup_of(config_of(train={"loss": "cross_entrop"}), 1)
    with pytest.raises(ConfigError, match=r"train.metrics is 'accuracy', which is not registered"):
        setup_of(config_of(train={"metrics": ["accuracy"]}), 1)
