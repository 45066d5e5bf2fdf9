"""Which dtype computes, which sums, and whether master weights live apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.config import PrecisionConfig

KEPT = {"router"}
"""Parts of a tree that compute in float32 always: a rounded router sends tokens elsewhere."""


@dataclass(frozen=True)
class Precision:
    """Dtype policy of a run: matmul inputs in `compute`, masters and accumulation always float32."""

    config: PrecisionConfig

    @property
    def compute(self) -> jnp.dtype:
        """Dtype of matmul inputs and activations."""
        return jnp.dtype(self.config.compute)

    @property
    def reduce(self) -> jnp.dtype:
        """Dtype of gradients between replicas."""
        return jnp.dtype(self.config.reduce)

    @property
    def separate_master_params(self) -> bool:
        """Whether float32 master weights exist beside the weights that compute.

        An 8-bit significand swallows any update below 2^-9 of the weight; the master keeps it.
        """
        return self.compute != jnp.float32

    def cast(self, tree: Any) -> Any:
        """The tree with every floating leaf in the compute dtype; integers, keys and what KEPT names stay."""

        def one(path: Any, leaf: Any) -> Any:
            kept = any(getattr(key, "key", None) in KEPT for key in path)
            return leaf if kept or not jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.astype(self.compute)

        return jax.tree_util.tree_map_with_path(one, tree)
