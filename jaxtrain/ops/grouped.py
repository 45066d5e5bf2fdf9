"""Matmuls of rows that lie group by group, each group with its own matrix.

R rows, G groups, I width of a row, O width of a result.
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
    """cpu, gpu or tpu: of a mesh's devices, else of those that jax finds."""
    if isinstance(mesh, Mesh):
        name = str(mesh.devices.flat[0].platform)
    else:
        name = jax.default_backend()
    return "gpu" if name in ("cuda", "rocm") else name


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul(x_RI: jax.Array, w_GIO: jax.Array, sizes_G: jax.Array, platform: str) -> jax.Array:
    """The first sizes_G[0] rows times w[0], the next sizes_G[1] times w[1], ...; rows beyond the last group are 0."""
    multiply = partial(_PRODUCTS.get(platform, _plain), platform)
    out_RO = one_by_one(multiply)(x_RI, w_GIO, sizes_G)
    return _within(out_RO, sizes_G)


def _forward(x_RI: jax.Array, w_GIO: jax.Array, sizes_G: jax.Array, platform: str) -> tuple[jax.Array, Any]:
    return grouped_matmul(x_RI, w_GIO, sizes_G, platform), (x_RI, w_GIO, sizes_G)


def _backward(platform: str, kept: tuple[jax.Array, ...], cotangent_RO: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    def pull(x_RI: jax.Array, w_GIO: jax.Array, sizes_G: jax.Array, cotangent_RO: jax.Array) -> Any:
        multiply = _PRODUCTS.get(platform, _plain)
        return jax.vjp(lambda x, w: multiply(platform, x, w, sizes_G), x_RI, w_GIO)[1](cotangent_RO)

    x_RI, w_GIO, sizes_G = kept
    dx_RI, dw_GIO = one_by_one(pull)(x_RI, w_GIO, sizes_G, _within(cotangent_RO, sizes_G))
    return _within(dx_RI, sizes_G), dw_GIO, None


grouped_matmul.defvjp(_forward, _backward)


def groups_of(sizes_G: jax.Array, rows: int) -> jax.Array:
    """Group of each row, the last one for rows beyond: int32 [R]."""
    ends_G = jnp.cumsum(sizes_G)
    return jnp.minimum(jnp.sum(jnp.arange(rows)[:, None] >= ends_G, axis=1), sizes_G.shape[0] - 1)


def _within(x_RI: jax.Array, sizes_G: jax.Array) -> jax.Array:
    # Kernels leave rows of no group as they find them: not even a number.
    inside_R = jnp.arange(x_RI.shape[0]) < jnp.sum(sizes_G)
    return jnp.where(inside_R[:, None], x_RI, 0)


def _plain(platform: str, x_RI: jax.Array, w_GIO: jax.Array, sizes_G: jax.Array) -> jax.Array:
    return lax.ragged_dot(x_RI, w_GIO, sizes_G)


def _tokamax(platform: str, x_RI: jax.Array, w_GIO: jax.Array, sizes_G: jax.Array) -> jax.Array:
    # lax.ragged_dot on GPU is a masked matmul with every group.
    try:
        import tokamax
    except ImportError:
        raise ConfigError(
            "model.moe on GPU needs tokamax' grouped matmul, which is not installed: pip install -r "
            "requirements-gpu.txt"
        ) from None
    return tokamax.ragged_dot(x_RI, w_GIO, sizes_G, implementation="mosaic")


_PRODUCTS = {"gpu": _tokamax}
"""Platform -> grouped matmul, where lax.ragged_dot is not the one."""
