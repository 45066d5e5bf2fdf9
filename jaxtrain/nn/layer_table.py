"""The order of the layers: which stack, row, window and totals each layer of a model has.

The decoder's scans, multi-token prediction and the stages of a pipeline all read this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxtrain.config import ConfigError, ModelConfig, RematConfig
from jaxtrain.nn.layers import NO_TOTALS, BatchTotals

MTP_STACK = "mtp"
"""Stack of the blocks of multi-token prediction."""

UNLIMITED = np.iinfo(np.int32).max
"""Window of a layer without a sliding window, where windows are scanned as data."""


@dataclass(frozen=True)
class LayerRun:
    """Consecutive layers that one scan runs: a pattern of layers that repeats.

    An entry of `pattern` is one layer of a period: its stack, and its rows of that stack over all periods.
    """

    pattern: tuple[tuple[str, slice], ...]
    periods: int

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.pattern) * self.periods


def layer_runs(config: ModelConfig) -> tuple[LayerRun, ...]:
    """The layers in order. A dense model has the stack "layers"; else it holds mixtures, "dense_layers" the others.

    Raises ConfigError where moe.first_dense and moe.every do not make the last layer a mixture.
    """
    moe, n = config.moe, config.n_layers
    if not moe.experts:
        return (LayerRun((("layers", slice(None)),), n),)
    mixed, dense = n - moe.first_dense, moe.every - 1
    if mixed < 1 or mixed % moe.every:
        raise ConfigError(
            f"model.moe.first_dense {moe.first_dense} and model.moe.every {moe.every} leave the last of model.n_layers "
            f"{n} layers dense: choose n_layers as first_dense plus a multiple of every"
        )
    head = (LayerRun((("dense_layers", slice(moe.first_dense)),), moe.first_dense),) if moe.first_dense else ()
    among = tuple(("dense_layers", slice(moe.first_dense + i, None, dense)) for i in range(dense))
    return *head, LayerRun((*among, ("layers", slice(None))), mixed // moe.every)


def split_ends(config: ModelConfig, first: int, last: int) -> list[tuple[LayerRun, bool]]:
    """`layer_runs`, cut so that the `first` and `last` layers are runs of their own; each with whether it is no end.

    Raises ConfigError where a border would cut a pattern of layers.
    """
    parts, begin = [], 0
    for run in layer_runs(config):
        each = len(run.pattern)
        borders = {0, run.periods}
        for border in (first, config.n_layers - last):
            if begin < border < begin + run.layers:
                if (border - begin) % each:
                    raise ConfigError(
                        f"precision.recipe_skip_first {first} and recipe_skip_last {last} of model.n_layers "
                        f"{config.n_layers}: layer {border + 1} is inside a pattern of {each} layers that repeats from "
                        f"layer {begin + 1} on: choose multiples of {each}"
                    )
                borders.add((border - begin) // each)
        if len(borders) == 2:
            parts.append((run, first <= begin and begin + run.layers <= config.n_layers - last))
            begin += run.layers
            continue
        for lo, hi in pairwise(sorted(borders)):
            rows = tuple((stack, _part(range(layers_of(config, stack))[rows], lo, hi)) for stack, rows in run.pattern)
            inside = first <= begin + lo * each and begin + hi * each <= config.n_layers - last
            parts.append((LayerRun(rows, hi - lo), inside))
        begin += run.layers
    return parts


def _part(rows: range, lo: int, hi: int) -> slice:
    """Rows number lo..hi of these rows."""
    part = rows[lo:hi]
    return slice(part.start, part.stop, part.step)


@dataclass(frozen=True)
class LayerSlot:
    """Where a layer is stored, and what it reads."""

    stack: str
    row: int
    """Its row of the stack."""
    window: int | None
    """Visible tokens; None is all."""
    mixture: int | None
    """Its row of the mixtures' stats and totals; None for a dense layer."""


class LayerData(NamedTuple):
    """What a layer reads beside its parameters and the inputs that all layers share; leaves may be stacked."""

    window: Any = None
    """Visible tokens, an int or an int32 array; None is the static window of the block."""
    totals: BatchTotals = NO_TOTALS
    """Totals of this layer."""


def layer_table(config: ModelConfig) -> tuple[LayerSlot, ...]:
    """Every layer in the order of the model, then the blocks of multi-token prediction, which repeat the last layer."""
    stacks = [stack for run in layer_runs(config) for _ in range(run.periods) for stack, _ in run.pattern]
    windows = [config.windows[i % len(config.windows)] for i in range(config.n_layers)]
    stacks, windows = stacks + [MTP_STACK] * config.mtp, windows + windows[-1:] * config.mtp
    slots: list[LayerSlot] = []
    rows: dict[str, int] = {}
    mixtures = 0
    for stack, window in zip(stacks, windows, strict=True):
        mixture = bool(config.moe.experts) and stack != "dense_layers"
        slots.append(LayerSlot(stack, rows.get(stack, 0), window, mixtures if mixture else None))
        rows[stack] = rows.get(stack, 0) + 1
        mixtures += mixture
    return tuple(slots)


def stack_slots(config: ModelConfig, stack: str) -> tuple[LayerSlot, ...]:
    """The layers of a stack, by row."""
    return tuple(slot for slot in layer_table(config) if slot.stack == stack)


def layers_of(config: ModelConfig, stack: str) -> int:
    """Number of layers in a stack."""
    return len(stack_slots(config, stack))


def layer_data(config: ModelConfig, stack: str, totals: BatchTotals = NO_TOTALS) -> LayerData:
    """Data of a stack's layers, stacked; windows are data where layers of the model differ, and static otherwise."""
    slots = stack_slots(config, stack)
    windows = None
    if stack != MTP_STACK and len(set(config.windows)) > 1:
        windows = np.array([slot.window or UNLIMITED for slot in slots], np.int32)
    if slots[0].mixture is None:
        return LayerData(windows)
    first = slots[0].mixture
    return LayerData(windows, jax.tree.map(lambda a: a[first : first + len(slots)], totals.get("mixtures", {})))


def mixture_layers(config: ModelConfig) -> dict[tuple[str, ...], int]:
    """Path of each stack of mixtures in the parameters -> number of layers, in the order of `Stats`."""
    paths = {"layers": ("layers", "mlp"), MTP_STACK: (MTP_STACK, "block", "mlp")}
    stacks = [slot.stack for slot in layer_table(config) if slot.mixture is not None]
    return {paths[stack]: stacks.count(stack) for stack in dict.fromkeys(stacks)}


def check_segments(remat: RematConfig, config: ModelConfig) -> None:
    """Raise ConfigError where remat.every does not divide every run of layers into whole segments."""
    for run in layer_runs(config):
        if remat.every > 1 and (remat.every % len(run.pattern) or run.layers % remat.every):
            raise ConfigError(
                f"remat.every {remat.every} does not cut a run of {run.layers} layers, periods of {len(run.pattern)}: "
                "these follow from model.moe.first_dense and model.moe.every; use remat.every 1"
            )
