"""The layer stack: the one place that decides how stacked layers run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from jaxtrain.config import RematConfig
from jaxtrain.numerics.remat import checkpointed

LayerFunction = Callable[[Any, jax.Array, Any], tuple[jax.Array, Any]]
"""(params of a layer, x, data of a layer) -> (x, what the layer reports)."""


def run_layers(
    blocks: Sequence[LayerFunction], params: Sequence[Any], x_BLD: jax.Array, data: Sequence[Any], remat: RematConfig
) -> tuple[jax.Array, tuple[Any, ...]]:
    """x through periods of layers: in each, x, report = blocks[i](params[i] of the period, x, data[i]) for each i.

    `params` and `data` are trees, one a block, whose leaves have the periods as first dim; reports come so too, one a
    block. `remat.every` layers, a whole number of periods or a single layer, make one checkpointed segment.
    """
    slices = (tuple(params), tuple(data))
    periods, looped = jax.tree.leaves(slices)[0].shape[0], jax.tree.leaves(slices)[0].shape[0] > 1
    if remat.every == 1:
        blocks = [checkpointed(block, remat, looped) for block in blocks]

    def period(x_BLD: jax.Array, slices: tuple[Any, Any]) -> tuple[jax.Array, tuple[Any, ...]]:
        reports = []
        for block, own, known in zip(blocks, *slices, strict=True):
            x_BLD, report = block(own, x_BLD, known)
            reports.append(report)
        return x_BLD, tuple(reports)

    def segment(x_BLD: jax.Array, slices: tuple[Any, Any]) -> tuple[jax.Array, tuple[Any, ...]]:
        return lax.scan(period, x_BLD, slices)

    if remat.every == 1:
        return lax.scan(period, x_BLD, slices)
    each = remat.every // len(blocks)
    grouped = jax.tree.map(lambda a: a.reshape(periods // each, each, *a.shape[1:]), slices)
    x_BLD, reports = lax.scan(checkpointed(segment, remat, periods > each), x_BLD, grouped)
    return x_BLD, jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), reports)
