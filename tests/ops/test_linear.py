"""Hand-written gradients of a matmul against JAX's rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.ops.linear import contract

CASES = {
    "BLD,DF->BLF": ((2, 3, 5), (5, 4)),
    "BLD,DHE->BLHE": ((2, 3, 5), (5, 2, 4)),
    "BLHE,HED->BLD": ((2, 3, 2, 4), (2, 4, 5)),
}


@pytest.mark.parametrize("equation", CASES)
def test_value_and_gradients(equation):
    x, w = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(CASES[equation]))

    def total(product):
        return lambda x, w: jnp.sum(jnp.sin(product(x, w)))

    actual = jax.value_and_grad(total(lambda x, w: contract(equation, x, w)), (0, 1))(x, w)
    expected = jax.value_and_grad(total(lambda x, w: jnp.einsum(equation, x, w)), (0, 1))(x, w)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), actual, expected)


def test_gradients_keep_the_dtypes_of_their_arguments():
    x, w = jnp.ones((2, 3, 5), jnp.float32), jnp.ones((5, 4), jnp.bfloat16)
    dx, dw = jax.grad(lambda x, w: contract("BLD,DF->BLF", x, w).sum(), (0, 1))(x, w)
    assert (dx.dtype, dw.dtype) == (jnp.float32, jnp.bfloat16)
