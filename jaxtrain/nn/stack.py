"""The layer stack: the one place that decides how stacked layers run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from jaxtrain.config import RematConfig
from jaxtrain.numerics.remat import checkpointed

Block = Callable[[Any, jax.Array, Any], tuple[jax.Array, Any]]
"""(params of a layer, x, data of a layer) -> (x, what the layer reports)."""


def run_layers(block: Block, params: Any, x_BLD: jax.Array, data: Any, remat: RematConfig) -> tuple[jax.Array, Any]:
    """x, report = block(params of a layer, x, data of a layer) for each layer in turn; reports come stacked.

    `params` and `data` are trees whose leaves have the layers as first dim; `remat.every` layers make one checkpointed
    segment.
    """

    def layer(x_BLD: jax.Array, slices: tuple[Any, Any]) -> tuple[jax.Array, Any]:
        return block(slices[0], x_BLD, slices[1])

    def segment(x_BLD: jax.Array, slices: tuple[Any, Any]) -> tuple[jax.Array, Any]:
        return lax.scan(layer, x_BLD, slices)

    if remat.every == 1:
        return lax.scan(checkpointed(layer, remat), x_BLD, (params, data))
    layers = (params, data)
    grouped = jax.tree.map(lambda a: a.reshape(a.shape[0] // remat.every, remat.every, *a.shape[1:]), layers)
    x_BLD, reports = lax.scan(checkpointed(segment, remat), x_BLD, grouped)
    return x_BLD, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), reports)
