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
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var, jaxpr_as_fun
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

Tree = Any
# Never computed twice: what they cost outweighs the memory of what they give.
_DEAR = (
    "dot_general", "ragged_dot", "conv_general", "scan", "while", "cond", "shard_map", "custom_call", "pallas_call",
    "gather", "scatter", "sort",
)  # fmt: skip


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
    n_known = len(jax.tree.leaves(known))
    early = _needed(jaxpr.eqns, [*firsts, *_soon(jaxpr, firsts, seconds)])
    late, carried = _late(jaxpr, early, seconds, n_known)
    run_early = _function(closed, early, jaxpr.invars, [*firsts, *carried])
    run_late = _function(closed, late, [*jaxpr.invars[:n_known], *carried], seconds)

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


def _soon(jaxpr: Jaxpr, firsts: Sequence[Any], seconds: Sequence[Any]) -> list[Any]:
    """Those of the second results that cost nothing dear (gradients of norms and biases): not worth their inputs."""
    done = {id(equation) for equation in _needed(jaxpr.eqns, firsts)}
    return [v for v in seconds if not any(_dear(e) for e in _needed(jaxpr.eqns, [v]) if id(e) not in done)]


def _late(
    jaxpr: Jaxpr, early: Sequence[JaxprEqn], outputs: Sequence[Any], n_known: int
) -> tuple[list[JaxprEqn], list[Var]]:
    """Operations of the second half, and the fewest bytes of the first that it can do with.

    Cheap operations of the first half may be done again: a minimum cut between what cannot and what is wanted.
    """
    done = {id(equation) for equation in early}
    rest = [equation for equation in _needed(jaxpr.eqns, outputs) if id(equation) not in done]
    made = {v for equation in early for v in equation.outvars} | set(jaxpr.invars[n_known:])
    wanted = {v for v in (*outputs, *(v for equation in rest for v in equation.invars)) if isinstance(v, Var)} & made
    carried = _cut(early, jaxpr.invars[n_known:], wanted)
    again, left = [], wanted - set(carried)
    for equation in reversed(early):
        if left.intersection(equation.outvars):
            again.append(equation)
            left |= {v for v in equation.invars if isinstance(v, Var)} - set(carried)
    again.reverse()
    return [*again, *rest], carried


def _cut(early: Sequence[JaxprEqn], fresh: Sequence[Var], wanted: set[Var]) -> list[Var]:
    """The cheapest values to keep so that all wanted ones follow from them by cheap operations."""
    made = [*fresh, *(v for equation in early for v in equation.outvars)]
    node = {v: 2 + 2 * i for i, v in enumerate(made)}
    sizes = _bytes_of(early, made)
    unit = max(sum(sizes.values()) // 2**29, 1)
    endless = 2**30
    edges = {(node[v], node[v] + 1): -(-size // unit) for v, size in sizes.items()}
    edges |= {(node[v] + 1, 1): endless for v in wanted}
    edges |= {(0, node[v]): endless for v in fresh}
    for equation in early:
        read = [v for v in equation.invars if isinstance(v, Var) and v in node]
        for v in equation.outvars:
            edges |= {(0, node[v]): endless} if _dear(equation) else {(node[u] + 1, node[v]): endless for u in read}
    rows, columns = zip(*edges, strict=True)
    n = 2 + 2 * len(made)
    graph = csr_array((np.array([*edges.values()], np.int32), (rows, columns)), shape=(n, n))
    left = graph - maximum_flow(graph, 0, 1).flow
    left.eliminate_zeros()
    reached = set(breadth_first_order(left, 0, return_predecessors=False).tolist())
    return [v for v in made if node[v] in reached and node[v] + 1 not in reached]


def _bytes_of(equations: Sequence[JaxprEqn], variables: Sequence[Var]) -> dict[Var, int]:
    """Bytes of each on one device, values of a shape lying alike wherever an operation says how one of them lies."""
    local: dict[tuple[int, ...], int] = {}
    for equation in equations:
        if equation.primitive.name == "sharding_constraint":
            shape = equation.outvars[0].aval.shape  # type: ignore[attr-defined]
            there = math.prod(equation.params["sharding"].shard_shape(shape))
            local[shape] = min(there, local.get(shape, there))
    sizes = {}
    for v in variables:
        shape = v.aval.shape  # type: ignore[attr-defined]
        sizes[v] = max(local.get(shape, math.prod(shape)) * v.aval.dtype.itemsize, 1)  # type: ignore[attr-defined]
    return sizes


def _dear(equation: JaxprEqn) -> bool:
    if any(name in equation.primitive.name for name in _DEAR):
        return True
    inner = (getattr(value, "jaxpr", value) for value in equation.params.values())
    return any(_dear(one) for value in inner if isinstance(value, Jaxpr) for one in value.eqns)


def _function(
    closed: ClosedJaxpr, equations: Sequence[JaxprEqn], inputs: Sequence[Var], outputs: Sequence[Any]
) -> Callable[..., list[Any]]:
    """Some operations of a trace as a function."""
    part = Jaxpr(closed.jaxpr.constvars, inputs, outputs, equations, closed.jaxpr.effects)
    return jaxpr_as_fun(ClosedJaxpr(part, closed.consts))
