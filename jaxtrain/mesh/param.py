"""What the mesh needs to know of a parameter: its shape and the logical name of each dimension."""

from __future__ import annotations

import math
from dataclasses import dataclass

DEPTHS = "depths"
"""The first dim of the blocks that predict further tokens: they belong to no stage, so that no rule shards it."""
STACKS = ("layers", DEPTHS)
"""Logical names of a first dim that stacks modules: each row is a parameter of its own."""


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
