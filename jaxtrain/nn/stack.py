"""Scans over stacked layers, with rematerialisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from jaxtrain.config import RematConfig
from jaxtrain.numerics.remat import checkpointed

LayerFunction = Callable[[Any, jax.Array, Any], tuple[jax.Array, Any]]
"""(params of a layer, x, data of a layer) -> (x, stats)."""


def run_layers(
    blocks: Sequence[LayerFunction], params: Sequence[Any], x_BLD: jax.Array, data: Sequence[Any], remat: RematConfig
) -> tuple[jax.Array, tuple[Any, ...]]:
    """Scan over periods of layers; each period applies x, stats = blocks[i](params[i], x, data[i]) for each i in turn.

    `params` and `data` have one tree per block, whose leaves have the periods as first dim; so have the returned stats.
    `remat.every` layers (a whole number of periods, or one layer) make a checkpointed segment.
    """
    slices = (tuple(params), tuple(data))
    periods, looped = jax.tree.leaves(slices)[0].shape[0], jax.tree.leaves(slices)[0].shape[0] > 1
    if remat.every == 1:
        blocks = [checkpointed(block, remat, looped) for block in blocks]

    def period(x_BLD: jax.Array, slices: tuple[Any, Any]) -> tuple[jax.Array, tuple[Any, ...]]:
        reports = []
        for block, weights, layer_data in zip(blocks, *slices, strict=True):
            x_BLD, report = block(weights, x_BLD, layer_data)
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
