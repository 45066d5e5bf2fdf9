"""Dtypes of compute and reduction, and whether separate float32 master parameters exist."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.config import PrecisionConfig

FLOAT32_KEYS = {"router"}
"""Subtrees of parameters that always compute in float32: rounding a router changes the experts of tokens."""


@dataclass(frozen=True)
class Precision:
    """Dtype policy of a run: matmul inputs in `compute`, master parameters and accumulation in float32."""

    config: PrecisionConfig

    @property
    def compute(self) -> jnp.dtype:
        """Dtype of matmul inputs and activations."""
        return jnp.dtype(self.config.compute)

    @property
    def reduce(self) -> jnp.dtype:
        """Dtype of the reduction of gradients over replicas."""
        return jnp.dtype(self.config.reduce)

    @property
    def separate_master_params(self) -> bool:
        """Whether float32 master parameters exist in addition to the weights in the compute dtype.

        With an 8-bit significand a change below 2^-9 of a weight is lost; the master parameter accumulates it.
        """
        return self.compute != jnp.float32

    @property
    def wide_gradients(self) -> bool:
        """Whether gradients of 16-bit weights are float32 from the first sum on (numerics/wide.py)."""
        return self.separate_master_params and self.reduce == jnp.float32

    def cast(self, tree: Any) -> Any:
        """Cast floating leaves to the compute dtype, except those under FLOAT32_KEYS."""

        def one(path: Any, leaf: Any) -> Any:
            float32 = any(getattr(key, "key", None) in FLOAT32_KEYS for key in path)
            return leaf if float32 or not jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.astype(self.compute)

        return jax.tree_util.tree_map_with_path(one, tree)
