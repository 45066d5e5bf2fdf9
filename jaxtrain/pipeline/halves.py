"""A backward pass cut in two: what the stage before waits for, and what can wait.

A backward traced once is a list of operations. Those that the input's cotangent needs are the first half; the rest
(for a matmul the product of its input and its slope) is the second, and the values that go over are kept between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, jaxpr_as_fun

Tree = Any
# Never computed twice: what they cost outweighs the memory of what they give.
_DEAR = ("dot", "conv", "scan", "while", "cond", "shard_map", "custom_call", "pallas_call", "gather", "scatter", "sort")


@dataclass(frozen=True)
class Halves:
    """Two functions that together are backward(known, fresh) -> (of inputs, of weights).

    `inputs(known, fresh)` gives the first result and a list of arrays, `weights(known, arrays)` the second from them.
    `known` is there in both halves, `fresh` in the first alone.
    """

    inputs: Callable[[Tree, Tree], tuple[Tree, list[jax.Array]]]
    weights: Callable[[Tree, list[jax.Array]], Tree]


def halve(backward: Callable[[Tree, Tree], tuple[Tree, Tree]], known: Tree, fresh: Tree) -> Halves:
    """Cut `backward`, which is traced for arguments of the shapes of `known` and `fresh`."""
    closed, shapes = jax.make_jaxpr(backward, return_shape=True)(known, fresh)
    jaxpr = closed.jaxpr
    first_leaves, first_tree = jax.tree.flatten(shapes[0])
    second_tree = jax.tree.structure(shapes[1])
    firsts, seconds = jaxpr.outvars[: len(first_leaves)], jaxpr.outvars[len(first_leaves) :]
    free = set(jaxpr.constvars) | set(jaxpr.invars[: len(jax.tree.leaves(known))])
    early = _needed(jaxpr.eqns, firsts)
    late, carried = _late(jaxpr, early, seconds, free)

    run_early = _function(closed, early, jaxpr.invars, [*firsts, *carried])
    run_late = _function(closed, late, [*jaxpr.invars[: len(jax.tree.leaves(known))], *carried], seconds)

    def inputs(known: Tree, fresh: Tree) -> tuple[Tree, list[jax.Array]]:
        values = run_early(*jax.tree.leaves((known, fresh)))
        return jax.tree.unflatten(first_tree, values[: len(firsts)]), values[len(firsts) :]

    def weights(known: Tree, arrays: list[jax.Array]) -> Tree:
        return jax.tree.unflatten(second_tree, run_late(*jax.tree.leaves(known), *arrays))

    return Halves(inputs, weights)


def _needed(equations: Sequence[JaxprEqn], outputs: Sequence[Any]) -> list[JaxprEqn]:
    """The operations without which the outputs cannot be had, in order."""
    wanted = {v for v in outputs if isinstance(v, Var)}
    found = []
    for equation in reversed(equations):
        if wanted.intersection(equation.outvars):
            found.append(equation)
            wanted.update(v for v in equation.invars if isinstance(v, Var))
    return found[::-1]


def _late(
    jaxpr: Jaxpr, early: Sequence[JaxprEqn], outputs: Sequence[Any], free: set[Var]
) -> tuple[list[JaxprEqn], list[Var]]:
    """Operations of the second half, and values of the first that it takes over.

    Cheap operations of the first half are done again where what they read is no larger than what they give.
    """
    done = {id(equation) for equation in early}
    wanted = {v for v in outputs if isinstance(v, Var)}
    given = {v for equation in early for v in equation.outvars} | (set(jaxpr.invars) - free)
    late, carried = [], []
    for equation in reversed(jaxpr.eqns):
        here = wanted.intersection(equation.outvars)
        if not here:
            continue
        read = {v for v in equation.invars if isinstance(v, Var)}
        if id(equation) in done and (_dear(equation) or _bytes(read - free - wanted) > _bytes(here)):
            carried += [v for v in equation.outvars if v in here]
            continue
        late.append(equation)
        wanted |= read
    carried += [v for v in jaxpr.invars if v in wanted and v in given]
    return late[::-1], carried


def _dear(equation: JaxprEqn) -> bool:
    if any(name in equation.primitive.name for name in _DEAR):
        return True
    inner = (getattr(value, "jaxpr", value) for value in equation.params.values())
    return any(_dear(one) for value in inner if isinstance(value, Jaxpr) for one in value.eqns)


def _bytes(variables: set[Var]) -> int:
    return sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in variables)  # type: ignore[attr-defined]


def _function(
    closed: ClosedJaxpr, equations: Sequence[JaxprEqn], inputs: Sequence[Var], outputs: Sequence[Any]
) -> Callable[..., list[Any]]:
    """Some operations of a trace as a function."""
    part = Jaxpr(closed.jaxpr.constvars, inputs, outputs, equations, closed.jaxpr.effects)
    return jaxpr_as_fun(ClosedJaxpr(part, closed.consts))
