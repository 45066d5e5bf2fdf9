"""Matmul of rows sorted by group with one matrix per group.

R rows, G groups, I input width, O output width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh

from jaxtrain.config import ConfigError
from jaxtrain.ops.batching import one_by_one


def platform_of(mesh: Mesh | AbstractMesh | None) -> str:
    """Platform of a mesh's devices (without a mesh, of the default backend): cpu, gpu or tpu."""
    if isinstance(mesh, Mesh):
        name = str(mesh.devices.flat[0].platform)
    else:
        name = jax.default_backend()
    return "gpu" if name in ("cuda", "rocm") else name


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul(x_RI: jax.Array, w_GIO: jax.Array, sizes_G: jax.Array, platform: str) -> jax.Array:
    """The first sizes_G[0] rows times w[0], the next sizes_G[1] times w[1], ...; rows past the last group give 0.

    The product is in x's dtype. w may be wider than x, as its gradient is then (numerics/wide.py).
    """
    multiply = partial(_PRODUCTS.get(platform, _ragged_dot), _ROWS, x_RI.dtype)
    out_RO = one_by_one(multiply)(x_RI, w_GIO.astype(x_RI.dtype), sizes_G)
    return _zero_past_end(out_RO, sizes_G)


def _forward(x_RI: jax.Array, w_GIO: jax.Array, sizes_G: jax.Array, platform: str) -> tuple[jax.Array, Any]:
    return grouped_matmul(x_RI, w_GIO, sizes_G, platform), (x_RI, w_GIO, sizes_G)


def _backward(
    platform: str, residuals: tuple[jax.Array, ...], cotangent_RO: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    x_RI, w_GIO, sizes_G = residuals
    multiply, cotangent_RO = _PRODUCTS.get(platform, _ragged_dot), _zero_past_end(cotangent_RO, sizes_G)
    w_GOI = w_GIO.astype(x_RI.dtype).swapaxes(1, 2)
    dx_RI = one_by_one(partial(multiply, _ROWS, x_RI.dtype))(cotangent_RO, w_GOI, sizes_G)
    dw_GIO = one_by_one(partial(multiply, _GROUPS, w_GIO.dtype))(x_RI, cotangent_RO, sizes_G)
    return _zero_past_end(dx_RI, sizes_G), dw_GIO, None


grouped_matmul.defvjp(_forward, _backward)


def groups_of(sizes_G: jax.Array, rows: int) -> jax.Array:
    """Group of each row, int32 [R]; the last group for rows past the end."""
    ends_G = jnp.cumsum(sizes_G)
    return jnp.minimum(jnp.sum(jnp.arange(rows)[:, None] >= ends_G, axis=1), sizes_G.shape[0] - 1)


@jax.custom_vjp
def add_group_bias(y_RO: jax.Array, bias_GO: jax.Array, group_R: jax.Array) -> jax.Array:
    """Each row plus the bias of its group, in y's dtype; the gradient of the biases is summed in float32."""
    return y_RO + bias_GO[group_R].astype(y_RO.dtype)


def _add_bias_forward(y_RO: jax.Array, bias_GO: jax.Array, group_R: jax.Array) -> tuple[jax.Array, Any]:
    return add_group_bias(y_RO, bias_GO, group_R), (bias_GO, group_R)


def _add_bias_backward(residuals: tuple[jax.Array, jax.Array], cotangent_RO: jax.Array) -> Any:
    bias_GO, group_R = residuals
    # A matmul instead of a scatter: float32 sums in a fixed order.
    member_RG = (group_R[:, None] == jnp.arange(bias_GO.shape[0])).astype(cotangent_RO.dtype)
    dbias_GO = jnp.einsum("rg,ro->go", member_RG, cotangent_RO, preferred_element_type=jnp.float32)
    return cotangent_RO, dbias_GO.astype(bias_GO.dtype), None


add_group_bias.defvjp(_add_bias_forward, _add_bias_backward)


def _zero_past_end(x_RI: jax.Array, sizes_G: jax.Array) -> jax.Array:
    # Kernels leave the rows of no group uninitialised.
    inside_R = jnp.arange(x_RI.shape[0]) < jnp.sum(sizes_G)
    return jnp.where(inside_R[:, None], x_RI, 0)


_Dims = lax.RaggedDotDimensionNumbers
_ROWS = _Dims((((1,), (1,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0])
"""Rows times the matrix of their group."""
_GROUPS = _Dims((((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[])
"""For each group, the transposed rows on the left times the rows on the right."""


def _ragged_dot(dims: _Dims, dtype: Any, left: jax.Array, right: jax.Array, sizes_G: jax.Array) -> jax.Array:
    return lax.ragged_dot_general(left, right, sizes_G, dims, preferred_element_type=dtype)


def _tokamax(dims: _Dims, dtype: Any, left: jax.Array, right: jax.Array, sizes_G: jax.Array) -> jax.Array:
    # On GPUs lax.ragged_dot is a masked matmul of all rows with every group.
    try:
        import tokamax
    except ImportError:
        raise ConfigError(
            "model.moe on GPUs needs the package tokamax, which is not installed: pip install -r requirements-gpu.txt"
        ) from None
    return tokamax.ragged_dot_general(left, right, sizes_G, dims, preferred_element_type=dtype, implementation="mosaic")


_PRODUCTS = {"gpu": _tokamax}
"""Platform -> grouped matmul; other platforms use lax.ragged_dot."""
