"""Sharding constraints of activations while tracing: the rule table applied on a mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jaxtrain.config import Axis, ConfigError
from jaxtrain.mesh.param import make_spec, show_axes
from jaxtrain.mesh.rules import FALLBACKS, STRICT, Finding, Rules, raise_findings


@dataclass(frozen=True)
class MeshContext:
    """What constraints need to know while tracing.

    without: axes of an enclosing vmap. replicated: axes whose devices hold and compute the same (mesh/shard_map.py).
    """

    rules: Rules
    mesh: Mesh | AbstractMesh
    without: frozenset[str]
    replicated: tuple[Axis, ...] = ()


REPLICAS = "replicas"
"""Name of the vmapped axis over replicas, whose mesh axes are those in `without`."""
CONTEXT: ContextVar[MeshContext | None] = ContextVar("jaxtrain_rules", default=None)


@contextmanager
def use_rules(rules: Rules, mesh: Mesh | AbstractMesh, without: Iterable[str] = ()) -> Iterator[None]:
    """Apply `rules` on `mesh` while tracing; axes in `without` belong to an enclosing vmap and are left out."""
    token = CONTEXT.set(MeshContext(rules, mesh, frozenset(without)))
    try:
        yield
    finally:
        CONTEXT.reset(token)


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Constrain an activation by one logical name (None: whole) a dimension; the identity outside `use_rules`.

    A dimension that its axes do not divide stays whole where its name's fallback says so (kv_heads) or rules.allow has
    `indivisible:NAME`. Raises ConfigError for any other such dimension, an axis used twice, an unknown name.
    """
    return constrain_to(x, sharding_of(x.shape, *names))


def constrain_to(x: jax.Array, sharding: NamedSharding | None) -> jax.Array:
    """Constrain to what `sharding_of` gave."""
    return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)


def over_replicas(reduce: Callable[[jax.Array, str], jax.Array], x: jax.Array) -> jax.Array:
    """Reduce over the replicas of an enclosing vmap; the identity where there are none."""
    context = CONTEXT.get()
    if context is None or math.prod(context.mesh.shape[axis] for axis in context.without) == 1:
        return x
    return reduce(x, REPLICAS)


def sharding_of(shape: tuple[int, ...], *names: str | None) -> NamedSharding | None:
    """The sharding that `constrain` gives an activation of this shape, for a backward pass; None outside `use_rules`.

    Raises ConfigError as `constrain` does.
    """
    context = CONTEXT.get()
    if context is None:
        return None
    if len(names) != len(shape):
        raise AssertionError(f"constrain: {len(names)} names {names} for shape {shape}")
    sizes, dims = context.mesh.shape, []
    for dim, (size, name) in enumerate(zip(shape, names, strict=True)):
        axes = active_axes(name) if name else ()
        extent = math.prod(sizes[axis] for axis in axes)
        if size % extent and not FALLBACKS.get(str(name), STRICT).replicate_indivisible:
            text = (
                f"activation {names} of shape {shape}: dimension {dim} ({name}, {size}) is not divisible by "
                f"{show_axes(axes)} = {extent} ({context.rules.explain(str(name))}): change the size or rules.{name}"
            )
            raise_findings([Finding("indivisible", str(name), text)], context.rules)
        dims.append(axes if size % extent == 0 else ())
    flat = [axis for axes in dims for axis in axes]
    if len(set(flat)) < len(flat):
        raise ConfigError(f"activation {names}: one mesh axis twice in {make_spec(dims)}; change rules of these names")
    return NamedSharding(context.mesh, make_spec(dims))


def active_axes(name: str) -> tuple[Axis, ...]:
    """Mesh axes of more than one device that shard activations named `name` here; () outside `use_rules`.

    Axes that belong to an enclosing vmap are left out.
    """
    context = CONTEXT.get()
    if context is None:
        return ()
    sizes = context.mesh.shape
    return tuple(axis for axis in context.rules.axes(name) if sizes[axis] > 1 and axis not in context.without)


def dividing_axes(name: str, size: int) -> tuple[Axis, ...]:
    """`active_axes` of a dimension of this size: () where they do not divide it, as `constrain` leaves it whole."""
    axes, mesh = active_axes(name), active_mesh()
    return axes if mesh is not None and size % math.prod(mesh.shape[axis] for axis in axes) == 0 else ()


def active_mesh() -> Mesh | AbstractMesh | None:
    """The mesh of `use_rules`, None outside of it."""
    context = CONTEXT.get()
    return None if context is None else context.mesh
