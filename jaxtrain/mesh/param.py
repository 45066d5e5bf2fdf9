"""Parameters before they exist: shape and the logical name of each dimension; helpers for PartitionSpecs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from jaxtrain.config import Axis

DEPTHS = "depths"
"""First dimension of the blocks of multi-token prediction: they belong to no stage, and no rule shards it."""
STACKS = ("layers", DEPTHS)
"""Logical names of a first dimension that stacks modules: each index is a parameter of one module."""


@dataclass(frozen=True)
class Param:
    """A parameter before it exists: global shape and one logical name a dimension (a leaf in trees)."""

    shape: tuple[int, ...]
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.names):
            raise ValueError(f"{len(self.names)} names {self.names} for {len(self.shape)} dimensions {self.shape}")

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def make_spec(dims: Iterable[tuple[Axis, ...]]) -> PartitionSpec:
    """PartitionSpec with one entry a dimension: None, an axis, or a tuple of axes."""
    return PartitionSpec(*(None if not axes else axes[0] if len(axes) == 1 else axes for axes in dims))


def spec_axes(spec: PartitionSpec, ndim: int) -> list[tuple[Axis, ...]]:
    """The inverse of `make_spec`: a tuple of axes for each of `ndim` dimensions."""
    dims = [() if d is None else (d,) if isinstance(d, str) else tuple(d) for d in spec]
    return dims + [()] * (ndim - len(dims))


def show_axes(axes: Iterable[str]) -> str:
    """'data x tensor', or 'null'."""
    return " x ".join(axes) or "null"
