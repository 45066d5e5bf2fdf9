"""FP8 with scales from the current operands (Micikevicius et al. 2022, arXiv:2209.05433), on Hopper and later.

`float8` has one scale a tensor. `float8_rowwise` has one for each row of the left operand and each column of the right
one, so that an outlier coarsens its own row only.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxtrain.ops.recipes.recipe import Quantized, Recipe, product, product_of_scaled, scaled


def by_tensor(x: jax.Array, dims: tuple[int, ...], dtype: jnp.dtype) -> Quantized:
    """One scale for the tensor."""
    return scaled(x, tuple(range(x.ndim)), dtype)


FLOAT8 = Recipe(
    name="float8",
    title="FP8, a scale for each tensor",
    quantize=by_tensor,
    matmul=product_of_scaled,
    one_scale=True,
    forward=jnp.dtype(jnp.float8_e4m3fn),
    backward=jnp.dtype(jnp.float8_e5m2),
    capability=(8, 9),
    multiple=1,
    # The compiler's own kernels multiply wider values.
    xla={"xla_gpu_enable_triton_gemm": False},
    kernels=r"__cublas\$lt\$matmul\$f8",
)
FLOAT8_ROWWISE = dataclasses.replace(
    FLOAT8,
    name="float8_rowwise",
    title="FP8, a scale for each row",
    quantize=scaled,
    matmul=product,
    one_scale=False,
)
