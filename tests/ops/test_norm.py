"""Normalisation against its definition in float64."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.ops.norm import layer_norm, rms_norm


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 4), st.integers(2, 33), st.floats(0.01, 100), st.integers(0, 99))
def test_definition(rows, width, size, seed):
    rng = np.random.default_rng(seed)
    x = size * rng.standard_normal((rows, width)) + size
    scale, bias = rng.standard_normal(width), rng.standard_normal(width)
    rms = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale
    layer = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * scale + bias
    f32 = [jnp.asarray(a, jnp.float32) for a in (x, scale, bias)]
    np.testing.assert_allclose(rms_norm(f32[0], f32[1], 1e-5), rms, rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(layer_norm(*f32, 1e-5), layer, rtol=2e-3, atol=2e-4)


def test_low_precision_is_computed_in_float32():
    x = jnp.full((1, 4096), 300.0, jnp.float16)  # 300**2 summed overflows float16
    out = rms_norm(x, jnp.ones(4096, jnp.float16), 1e-6)
    assert out.dtype == jnp.float16
    np.testing.assert_allclose(out, 1.0, rtol=1e-3)
