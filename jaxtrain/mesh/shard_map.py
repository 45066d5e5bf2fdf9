"""shard_map over the whole mesh of `use_rules`, and axes along which devices compute the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.config import Axis
from jaxtrain.mesh.constraints import CONTEXT, MeshContext


@contextmanager
def replicated_over(*axes: Axis) -> Iterator[None]:
    """Declare that the devices along `axes` hold and compute the same: `shard_mapped` sums no gradients over them."""
    context = CONTEXT.get()
    if context is None:
        raise AssertionError("replicated_over: outside use_rules")
    token = CONTEXT.set(replace(context, replicated=tuple(axis for axis in axes if context.mesh.shape[axis] > 1)))
    try:
        yield
    finally:
        CONTEXT.reset(token)


def shard_mapped(function: Callable[..., Any], inputs: Any, outputs: Any) -> Callable[..., Any]:
    """`function` of each device's shards: a shard_map that is manual over the whole mesh of `use_rules`.

    `inputs` (a tuple, one entry an argument) and `outputs` are trees of PartitionSpec. They leave out the axes of an
    enclosing vmap, which its spmd_axis_name adds, and those of `replicated_over`. Differentiate through the result, not
    inside `function`.
    """
    context = CONTEXT.get()
    if context is None:
        raise AssertionError("shard_mapped: outside use_rules")
    run = jax.shard_map(function, mesh=context.mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
    if not context.replicated:
        return run
    # shard_map sums the gradient of an unsharded input over every axis. A leading dimension of copies, sharded over the
    # replicated axes, prevents that sum and moves no data.
    each = jax.vmap(run, spmd_axis_name=context.replicated)

    def replicated(*args: Any) -> Any:
        copies = _map_specs(partial(_to_copies, context), inputs, args)
        return _map_specs(partial(_from_copies, context), outputs, each(*copies))

    return replicated


def _map_specs(function: Callable[[PartitionSpec, Any], Any], specs: Any, tree: Any) -> Any:
    """`function` of each spec and the arrays of `tree` under it."""

    def below(spec: PartitionSpec, part: Any) -> Any:
        return jax.tree.map(partial(function, spec), part)

    return jax.tree.map(below, specs, tree, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _to_copies(context: MeshContext, spec: PartitionSpec, x: jax.Array) -> jax.Array:
    """Copies of x along a new first dimension, sharded over the replicated axes: each device holds its copy already."""
    copies = math.prod(context.mesh.shape[axis] for axis in context.replicated)
    sharding = NamedSharding(context.mesh, PartitionSpec(context.replicated, *spec))
    return jax.lax.with_sharding_constraint(jnp.broadcast_to(x, (copies, *x.shape)), sharding)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _from_copies(context: MeshContext, spec: PartitionSpec, x: jax.Array) -> jax.Array:
    """The inverse of `_to_copies`."""
    copies = PartitionSpec(context.replicated, *spec)
    return jax.shard_map(lambda x: x[0], mesh=context.mesh, in_specs=copies, out_specs=spec, check_vma=False)(x)


def _forward(function: Callable[..., jax.Array], context: MeshContext, spec: PartitionSpec, x: jax.Array) -> Any:
    return function(context, spec, x), None


def _backward(
    function: Callable[..., jax.Array], context: MeshContext, spec: PartitionSpec, _: None, cotangent: jax.Array
) -> Any:
    return (function(context, spec, cotangent),)


_to_copies.defvjp(partial(_forward, _to_copies), partial(_backward, _from_copies))
_from_copies.defvjp(partial(_forward, _from_copies), partial(_backward, _to_copies))
