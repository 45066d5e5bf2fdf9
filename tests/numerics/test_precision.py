"""Dtype formats, small changes that bfloat16 loses, the counter beyond int32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.config import PrecisionConfig
from jaxtrain.numerics.counter import counter_add, counter_float, counter_int, counter_zero
from jaxtrain.numerics.precision import Precision


@pytest.mark.parametrize(
    ("name", "exponent", "mantissa", "size", "largest"),
    [
        ("float32", 8, 23, 4, 3.4028235e38),
        ("float16", 5, 10, 2, 65504.0),
        ("bfloat16", 8, 7, 2, 3.3895314e38),
    ],
)
def test_formats(name, exponent, mantissa, size, largest):
    compute = Precision(PrecisionConfig(compute=name)).compute
    info = jnp.finfo(compute)
    assert (info.nexp, info.nmant, compute.itemsize) == (exponent, mantissa, size)
    assert abs(float(info.max) / largest - 1) < 1e-6


def test_master_params_accumulate_changes_that_bfloat16_loses():
    """Near 1 the spacing of bfloat16 is 2^-7: changes of 2^-10 are lost, eight of them are one spacing."""
    precision = Precision(PrecisionConfig(compute="bfloat16"))
    assert precision.separate_master_params
    master = {"w": jnp.ones(3, jnp.float32)}
    alone = precision.cast(master)
    for _ in range(8):
        alone = jax.tree.map(lambda w: w + jnp.bfloat16(2**-10), alone)
        master = jax.tree.map(lambda w: w + jnp.float32(2**-10), master)
    np.testing.assert_array_equal(alone["w"], np.ones(3))
    np.testing.assert_array_equal(precision.cast(master)["w"], np.full(3, 1 + 2**-7))


def test_float32_has_no_separate_master_params():
    precision = Precision(PrecisionConfig())
    assert not precision.separate_master_params
    assert precision.cast({"w": jnp.ones(2)})["w"].dtype == jnp.float32


def test_cast_leaves_integers_and_keys_unchanged():
    tree = {"w": jnp.ones(2), "n": jnp.arange(3), "key": jax.random.key(0)}
    cast = jax.eval_shape(Precision(PrecisionConfig(compute="float16")).cast, tree)
    assert [cast[name].dtype for name in ("w", "n")] == [jnp.float16, jnp.int32]
    assert cast["key"].dtype == tree["key"].dtype


def test_reduce_is_a_dtype():
    assert Precision(PrecisionConfig(reduce="bfloat16")).reduce == jnp.bfloat16


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 2**30 - 1), max_size=20))
def test_counter_is_exact_beyond_int32(steps):
    add, counter = jax.jit(counter_add), counter_zero()
    for n in steps:
        counter = add(counter, n)
    assert counter.dtype == jnp.int32 and counter.shape == (2,)
    assert counter_int(counter) == sum(steps)
    assert abs(float(counter_float(counter)) - sum(steps)) <= 1.2e-7 * sum(steps)


def test_counter_holds_trillions():
    counter = jnp.array([20_000_000_000_000 >> 30, 20_000_000_000_000 % 2**30], jnp.int32)
    assert counter_int(counter_add(counter, 1)) == 20_000_000_000_001
