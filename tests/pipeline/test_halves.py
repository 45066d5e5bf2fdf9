"""A split backward: gradients equal to the whole backward's, no matmul computed twice or in the wrong half."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from runs import config_of, worst_relative_error

from jaxtrain.nn.model import build
from jaxtrain.pipeline.halves import halve

MODELS: dict[str, dict[str, Any]] = {
    "base": {},
    "norms of queries, softcap, windows": {"qk_norm": True, "attention_softcap": 20.0, "windows": [8]},
    "gpt": {
        "norm": "layernorm", "activation": "gelu", "positions": "learned", "out_bias": True,
        "mlp_bias": True,
    },
}  # fmt: skip
SEQUENCES, LENGTH = 2, 16


def backward_of(model: dict[str, Any]) -> tuple[Callable[[Any, Any], tuple[Any, Any]], Any, jax.Array]:
    """One block's backward, its inputs (weights, x, ...) that both halves have, and the cotangent."""
    described = build(config_of(model=config_of().model.model_dump() | model).model)
    params = jax.jit(described.init)(jax.random.key(0))
    weights = jax.tree.map(lambda stack: stack[0], params["layers"])
    keys = jax.random.split(jax.random.key(1))
    x_BLD, dy_BLD = (jax.random.normal(key, (SEQUENCES, LENGTH, described.config.d_model)) for key in keys)
    positions_BL = jnp.broadcast_to(jnp.arange(LENGTH, dtype=jnp.int32), (SEQUENCES, LENGTH))
    segments_BL = jnp.ones((SEQUENCES, LENGTH), jnp.int32).at[:, 10:].set(2)
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf)[0], described.data()["layers"])

    def backward(inputs: Any, dy_BLD: jax.Array) -> tuple[Any, Any]:
        weights, x_BLD, positions_BL, segments_BL = inputs
        context = described.context(params, positions_BL, segments_BL)
        block = described.block(params, "layers")
        _, pull = jax.vjp(lambda weights, x_BLD: block(weights, x_BLD, context, data)[0], weights, x_BLD)
        of_weights, of_input = pull(dy_BLD)
        return of_input, of_weights

    return backward, (weights, x_BLD, positions_BL, segments_BL), dy_BLD


def flops(function: Callable[..., Any], *args: Any) -> float:
    return jax.jit(function).lower(*args).compile().cost_analysis()["flops"]


@pytest.mark.parametrize("name", MODELS)
def test_halves_equal_the_whole(name: str) -> None:
    backward, inputs, dy_BLD = backward_of(MODELS[name])
    halves = halve(backward, inputs, dy_BLD)
    of_input, residuals = jax.jit(halves.input_half)(inputs, dy_BLD)
    of_weights = jax.jit(halves.weight_half)(inputs, residuals)
    want = jax.jit(backward)(inputs, dy_BLD)
    error, path = worst_relative_error((of_input, of_weights), want)
    assert error < 2e-6, path


def test_no_work_is_done_twice() -> None:
    """The second half is the seven products input x cotangent: 2 FLOPs per weight and position."""
    backward, inputs, dy_BLD = backward_of({})
    halves = halve(backward, inputs, dy_BLD)
    residuals = jax.eval_shape(halves.input_half, inputs, dy_BLD)[1]
    first, second = flops(halves.input_half, inputs, dy_BLD), flops(halves.weight_half, inputs, residuals)
    matrices = sum(w.size for w in jax.tree.leaves(inputs[0]) if w.ndim > 1)
    assert second == pytest.approx(2 * matrices * SEQUENCES * LENGTH, rel=0.1)
    assert first + second == pytest.approx(flops(backward, inputs, dy_BLD), rel=0.03)


def test_halves_under_vmap() -> None:
    backward, inputs, dy_BLD = backward_of({})
    two = jax.tree.map(lambda a: jnp.stack([a, a]), (inputs, dy_BLD))

    def both_halves(inputs: Any, dy_BLD: jax.Array) -> Any:
        halves = halve(backward, inputs, dy_BLD)
        of_input, residuals = halves.input_half(inputs, dy_BLD)
        return of_input, halves.weight_half(inputs, residuals)

    got = jax.jit(jax.vmap(both_halves))(*two)
    want = jax.jit(jax.vmap(backward))(*two)
    error, path = worst_relative_error(got, want)
    assert error < 2e-6, path
