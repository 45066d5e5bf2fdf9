"""Registered optimizers, schedules, activations and norms: equal results on any mesh; unknown names are errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain.api import (
    ACTIVATIONS,
    LEARNING_RATES,
    NORMS,
    OPTIMIZERS,
    Activation,
    ConfigError,
    DecayShape,
    NormKind,
    bind,
)  # fmt: skip
from jaxtrain.config import ModelConfig, OptimizerConfig, validate
from jaxtrain.nn.model import build
from jaxtrain.numerics.remat import names_of
from jaxtrain.observe.flops import count_parameters
from jaxtrain.optim import learning_rate

MODEL = {"vocab_size": 16, "d_model": 8, "n_layers": 2, "n_heads": 2, "d_ff": 16, "max_seq_len": 8}
NAMED = {"activation": "relu2_glu", "norm": "shifted_rms"}


def shifted_rms(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """RMSNorm with a bias."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * scale + bias


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    ACTIVATIONS.register("relu2_glu")(Activation(lambda gate, up: jnp.square(jax.nn.relu(gate)) * up, gated=True))
    NORMS.register("shifted_rms")(NormKind(shifted_rms, bias=True))
    LEARNING_RATES.register("square")(DecayShape(jnp.square))

    @OPTIMIZERS.register("momentum")
    def momentum(config: OptimizerConfig, params: Any) -> optax.GradientTransformation:
        return optax.trace(config.beta1)

    yield
    for registry, name in (
        (ACTIVATIONS, "relu2_glu"), (NORMS, "shifted_rms"), (LEARNING_RATES, "square"), (OPTIMIZERS, "momentum"),
    ):  # fmt: skip
        registry.unregister(name)


def trained(devices: int, sections: dict[str, Any]) -> tuple[Any, Any]:
    """(setup, parameters) after two steps, as NumPy arrays."""
    config = validate({
        "model": MODEL | NAMED, "data": {"seq_len": 8, "tokenizer": {"vocab_size": 16}},
        "train": {"global_batch": 4, "steps": 4},
        "optimizer": {"name": "momentum", "schedule": "square", "learning_rate": 0.1}, **sections,
    })  # fmt: skip
    bound = bind(config, jax.devices()[:devices])
    tokens = np.random.default_rng(0).integers(0, 16, (1, 4, 8)).astype(np.int32)
    positions = np.broadcast_to(np.arange(8, dtype=np.int32), tokens.shape)
    fields = {"tokens": tokens, "labels": np.roll(tokens, -1, 2), "positions": positions, "segments": tokens * 0 + 1}
    step, state = jax.jit(bound.step.train_step), bound.init_state()
    for _ in range(2):
        state, _ = step(state, jax.device_put(fields, bound.batch_sharding))
    return bound, jax.device_get(state["params"])


def test_registered_choices_train_the_same_on_a_mesh() -> None:
    bound, params = trained(1, {})
    assert bound.model.params["layers"]["mlp"]["gate"]["weight"].shape == (2, 8, 16)
    assert bound.model.params["norm"]["bias"].shape == (8,)
    assert count_parameters(bound.config.model) == bound.model.count()
    mesh = {"mesh": {"data": 2, "tensor": 2}, "rules": {"preset": ["zero2", "tensor"]}}
    sharded, same = trained(4, mesh)
    moment = sharded.abstract["opt"][0].trace["layers"]["mlp"]["up"]["weight"]
    assert "data" in str(moment.sharding.spec), "ZeRO shards the state of a registered optimizer"
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), same, params)


def test_properties_of_entries_are_read_instead_of_names() -> None:
    config = ModelConfig.model_validate(MODEL | NAMED)
    assert "mlp_gate" in names_of(config, ACTIVATIONS["relu2_glu"].gated)
    rates = [learning_rate(OptimizerConfig(schedule="square", final_ratio=0.0), 10, s, 0) for s in (0, 5, 10)]
    np.testing.assert_allclose(rates, np.array([1, 0.75, 0]) * OptimizerConfig().learning_rate, atol=1e-9)


@pytest.mark.parametrize(
    ("section", "name", "known"),
    [("model", "activation", "swiglu"), ("model", "norm", "rmsnorm"), ("optimizer", "name", "adamw"),
     ("optimizer", "schedule", "cosine")],
)  # fmt: skip
def test_unknown_names_are_errors_before_anything_runs(section: str, name: str, known: str) -> None:
    with pytest.raises(ConfigError, match=rf"{section}\.{name} is '{known}x'.*did you mean {known}"):
        trained(1, {section: {**(MODEL if section == "model" else {}), name: known + "x"}})


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ConfigError, match=r"model\.activation 'gelu' is already registered"):
        ACTIVATIONS.register("gelu")
    assert build(ModelConfig.model_validate(MODEL)).params["layers"]["mlp"]["gate"]
