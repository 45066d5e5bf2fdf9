"""Dynamic loss scaling: growth, overflow, counts, and a gradient that it saves."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.config import ConfigError, PrecisionConfig, validate
from jaxtrain.numerics import scaling


def run(config, finites):
    """States after each step."""
    step = jax.jit(lambda state, finite: scaling.next_state(config, state, finite))
    states = [scaling.init(config)]
    for finite in finites:
        states.append(step(states[-1], jnp.bool_(finite)))
    return [{name: value.item() for name, value in state.items()} for state in states]


def test_worked_float16_run():
    config = PrecisionConfig(compute="float16", scale_init=4, scale_growth_every=2, scale_max=8)
    states = run(config, [True, True, True, True, False, True, False, False, False, False, True])
    assert [s["scale"] for s in states] == [4, 4, 8, 8, 8, 4, 4, 2, 1, 1, 1, 1]
    assert [s["good"] for s in states] == [0, 1, 0, 1, 0, 0, 1, 0, 0, 0, 0, 1]
    assert [s["skipped"] for s in states] == [0, 0, 0, 0, 0, 1, 0, 1, 2, 3, 4, 0]
    assert states[-1]["total_skipped"] == 5


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_other_dtypes_count_skipped_steps_at_scale_one(compute):
    states = run(PrecisionConfig(compute=compute, scale_growth_every=1), [True, False, False, True])
    assert [s["scale"] for s in states] == [1] * 5
    assert [s["skipped"] for s in states] == [0, 0, 1, 2, 0]
    assert states[-1]["total_skipped"] == 2


@settings(deadline=None, max_examples=40)
@given(st.lists(st.booleans(), max_size=40), st.integers(1, 5))
def test_scale_follows_a_python_model(finites, every):
    config = PrecisionConfig(compute="float16", scale_init=2.0**6, scale_growth_every=every, scale_max=2.0**8)
    scale, good = 2.0**6, 0
    for finite, state in zip(finites, run(config, finites)[1:], strict=True):
        if not finite:
            scale, good = max(scale / 2, 1.0), 0
        elif (good := good + 1) == every:
            scale, good = min(scale * 2, 2.0**8), 0
        assert (state["scale"], state["good"]) == (scale, good)


def test_scaling_saves_a_gradient_that_float16_flushes_to_zero():
    """2^-30 is below float16's smallest number 2^-24; scaled by 2^15 it survives."""

    def gradient(scale):
        loss = lambda w: (w * jnp.float16(2**-15)).astype(jnp.float32) * (2.0**-15 * scale)  # noqa: E731
        return jax.grad(loss)(jnp.float16(1)).astype(jnp.float32) / scale

    state = scaling.init(PrecisionConfig(compute="float16", scale_init=2.0**15))
    assert gradient(jnp.float32(1)) == 0
    assert gradient(state["scale"]) == 2.0**-30


def test_first_scale_above_the_largest_is_an_error():
    with pytest.raises(ConfigError, match=r"precision.scale_init 100.*precision.scale_max 50"):
        validate({"precision": {"scale_init": 100.0, "scale_max": 50.0}})
