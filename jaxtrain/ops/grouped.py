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
    """The first sizes_G[0] rows times w[0], the next sizes_G[1] times w[1], ...; rows past the last group give 0."""
    multiply = partial(_PRODUCTS.get(platform, _ragged_dot), platform)
    out_RO = one_by_one(multiply)(x_RI, w_GIO, sizes_G)
    return _zero_past_end(out_RO, sizes_G)


def _forward(x_RI: jax.Array, w_GIO: jax.Array, sizes_G: jax.Array, platform: str) -> tuple[jax.Array, Any]:
    return grouped_matmul(x_RI, w_GIO, sizes_G, platform), (x_RI, w_GIO, sizes_G)


def _backward(
    platform: str, residuals: tuple[jax.Array, ...], cotangent_RO: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    def gradients(x_RI: jax.Array, w_GIO: jax.Array, sizes_G: jax.Array, cotangent_RO: jax.Array) -> Any:
        multiply = _PRODUCTS.get(platform, _ragged_dot)
        return jax.vjp(lambda x, w: multiply(platform, x, w, sizes_G), x_RI, w_GIO)[1](cotangent_RO)

    x_RI, w_GIO, sizes_G = residuals
    dx_RI, dw_GIO = one_by_one(gradients)(x_RI, w_GIO, sizes_G, _zero_past_end(cotangent_RO, sizes_G))
    return _zero_past_end(dx_RI, sizes_G), dw_GIO, None


grouped_matmul.defvjp(_forward, _backward)


def groups_of(sizes_G: jax.Array, rows: int) -> jax.Array:
    """Group of each row, int32 [R]; the last group for rows past the end."""
    ends_G = jnp.cumsum(sizes_G)
    return jnp.minimum(jnp.sum(jnp.arange(rows)[:, None] >= ends_G, axis=1), sizes_G.shape[0] - 1)


def _zero_past_end(x_RI: jax.Array, sizes_G: jax.Array) -> jax.Array:
    # Kernels leave the rows of no group uninitialised.
    inside_R = jnp.arange(x_RI.shape[0]) < jnp.sum(sizes_G)
    return jnp.where(inside_R[:, None], x_RI, 0)


def _ragged_dot(platform: str, x_RI: jax.Array, w_GIO: jax.Array, sizes_G: jax.Array) -> jax.Array:
    return lax.ragged_dot(x_RI, w_GIO, sizes_G)


def _tokamax(platform: str, x_RI: jax.Array, w_GIO: jax.Array, sizes_G: jax.Array) -> jax.Array:
    # On GPUs lax.ragged_dot is a masked matmul of all rows with every group.
    try:
        import tokamax
    except ImportError:
        raise ConfigError(
            "model.moe on GPUs needs the package tokamax, which is not installed: pip install -r requirements-gpu.txt"
        ) from None
    return tokamax.ragged_dot(x_RI, w_GIO, sizes_G, implementation="mosaic")


_PRODUCTS = {"gpu": _tokamax}
"""Platform -> grouped matmul; other platforms use lax.ragged_dot."""
