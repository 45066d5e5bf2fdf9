"""Functions that know no batch dim, under vmap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.custom_batching import custom_vmap


def one_by_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of arrays with a vmap of its own: a batch of one is squeezed, a larger one taken in turns.

    A manual region under the vmap of deferred axes sees a batch of one (mesh/shard_map.py).
    """
    wrapped = custom_vmap(function)

    @wrapped.def_vmap
    def rule(size: int, batched: Any, *args: Any) -> tuple[Any, Any]:
        leaves, tree = jax.tree.flatten(args)
        along = jax.tree.leaves(batched)

        def call(*moving: jax.Array) -> Any:
            taken = iter(moving)
            return wrapped(
                *jax.tree.unflatten(tree, [next(taken) if b else leaf for leaf, b in zip(leaves, along, strict=True)])
            )

        moving = [leaf for leaf, b in zip(leaves, along, strict=True) if b]
        if size == 1:
            out = jax.tree.map(lambda a: a[None], call(*(a[0] for a in moving)))
        else:
            out = lax.map(lambda each: call(*each), tuple(moving))
        return out, jax.tree.map(lambda _: True, out)

    return wrapped
