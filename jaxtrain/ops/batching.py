"""vmap of functions without a batching rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.custom_batching import custom_vmap


def one_by_one(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of arrays with a rule for vmap: a batch of one is squeezed, a larger one runs in a loop.

    A shard_map region under the vmap of deferred axes sees a batch of one (mesh/shard_map.py).
    """
    wrapped = custom_vmap(function)

    @wrapped.def_vmap
    def rule(size: int, batched: Any, *args: Any) -> tuple[Any, Any]:
        leaves, tree = jax.tree.flatten(args)
        mapped = jax.tree.leaves(batched)

        def call(*elements: jax.Array) -> Any:
            rest = iter(elements)
            return wrapped(
                *jax.tree.unflatten(tree, [next(rest) if b else leaf for leaf, b in zip(leaves, mapped, strict=True)])
            )

        batches = [leaf for leaf, b in zip(leaves, mapped, strict=True) if b]
        if size == 1:
            out = jax.tree.map(lambda a: a[None], call(*(a[0] for a in batches)))
        else:
            out = lax.map(lambda each: call(*each), tuple(batches))
        return out, jax.tree.map(lambda _: True, out)

    return wrapped
