"""Split a backward pass into input gradients, which the previous stage waits for, and weight gradients, which can wait.

The traced backward pass is a list of equations. The equations that the input gradients depend on are the first half.
The remaining ones (for a matmul the product of its input and its output's cotangent) are the second half. The values
that the second half reads from the first are the weight-gradient residuals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

Tree = Any
# Never recomputed: their time outweighs the memory of their results.
_EXPENSIVE = (
    "dot_general", "ragged_dot", "conv_general", "scan", "while", "cond", "shard_map", "custom_call", "pallas_call",
    "gather", "scatter", "sort",
)  # fmt: skip
_CHECKPOINTS = ("remat2", "checkpoint")
"""Names of the primitive of jax.checkpoint in releases of JAX."""


@dataclass(frozen=True)
class Halves:
    """Two functions that together compute backward(inputs, cotangents) -> (input gradients, weight gradients).

    `input_half(inputs, cotangents)` returns the input gradients and a list of residuals, and
    `weight_half(inputs, residuals)` the weight gradients. Both halves have `inputs`, only the first has `cotangents`.
    """

    input_half: Callable[[Tree, Tree], tuple[Tree, list[jax.Array]]]
    weight_half: Callable[[Tree, list[jax.Array]], Tree]


def halve(backward: Callable[[Tree, Tree], tuple[Tree, Tree]], inputs: Tree, cotangents: Tree) -> Halves:
    """Split `backward`, traced for arguments with the shapes of `inputs` and `cotangents`."""
    closed, shapes = jax.make_jaxpr(backward, return_shape=True)(inputs, cotangents)
    jaxpr = _inline_checkpoints(closed.jaxpr)
    first_leaves, first_tree = jax.tree.flatten(shapes[0])
    second_tree = jax.tree.structure(shapes[1])
    firsts, seconds = jaxpr.outvars[: len(first_leaves)], jaxpr.outvars[len(first_leaves) :]
    n_inputs = len(jax.tree.leaves(inputs))
    early = _dependencies(jaxpr.eqns, [*firsts, *_cheap_seconds(jaxpr, firsts, seconds)])
    late, residual_vars = _second_half(jaxpr, early, seconds, n_inputs)
    run_early = _function(closed, early, jaxpr.invars, [*firsts, *residual_vars])
    run_late = _function(closed, late, [*jaxpr.invars[:n_inputs], *residual_vars], seconds)

    def input_half(inputs: Tree, cotangents: Tree) -> tuple[Tree, list[jax.Array]]:
        values = run_early(*jax.tree.leaves((inputs, cotangents)))
        return jax.tree.unflatten(first_tree, values[: len(firsts)]), values[len(firsts) :]

    def weight_half(inputs: Tree, residuals: list[jax.Array]) -> Tree:
        return jax.tree.unflatten(second_tree, run_late(*jax.tree.leaves(inputs), *residuals))

    return Halves(input_half, weight_half)


def _inline_checkpoints(jaxpr: Jaxpr) -> Jaxpr:
    """The trace with the bodies of jax.checkpoint in place of its calls, whose equations can then be split.

    Every inlined equation has new output variables: two calls may share one body.
    """
    values: dict[Any, Any] = {}
    equations: list[JaxprEqn] = []

    def read(v: Any) -> Any:
        return v if isinstance(v, Literal) else values.get(v, v)

    def inline(part: Sequence[JaxprEqn]) -> None:
        for equation in part:
            invars = [read(v) for v in equation.invars]
            if equation.primitive.name in _CHECKPOINTS:
                inner = equation.params["jaxpr"]
                values.update(zip(inner.invars, invars, strict=True))
                inline(inner.eqns)
                values.update(zip(equation.outvars, map(read, inner.outvars), strict=True))
            else:
                outvars = [v if isinstance(v, DropVar) else Var(v.aval) for v in equation.outvars]
                values.update(zip(equation.outvars, outvars, strict=True))
                equations.append(equation.replace(invars=invars, outvars=outvars))

    inline(jaxpr.eqns)
    return jaxpr.replace(eqns=equations, outvars=[read(v) for v in jaxpr.outvars])


def _dependencies(equations: Sequence[JaxprEqn], outputs: Sequence[Any]) -> list[JaxprEqn]:
    """The equations that the outputs depend on, in order."""
    wanted = {v for v in outputs if isinstance(v, Var)}
    found = []
    for equation in reversed(equations):
        if wanted.intersection(equation.outvars):
            found.append(equation)
            wanted.update(v for v in equation.invars if isinstance(v, Var))
    return found[::-1]


def _cheap_seconds(jaxpr: Jaxpr, firsts: Sequence[Any], seconds: Sequence[Any]) -> list[Any]:
    """Weight gradients without expensive equations (of norms and biases): cheaper to compute now than to save for."""
    done = {id(equation) for equation in _dependencies(jaxpr.eqns, firsts)}
    return [v for v in seconds if not any(_expensive(e) for e in _dependencies(jaxpr.eqns, [v]) if id(e) not in done)]


def _second_half(
    jaxpr: Jaxpr, early: Sequence[JaxprEqn], outputs: Sequence[Any], n_inputs: int
) -> tuple[list[JaxprEqn], list[Var]]:
    """Equations of the second half, and the residuals it reads, of the fewest bytes.

    Cheap equations of the first half may be recomputed: the residuals are a minimum cut between the values that cannot
    be recomputed and the values that the second half reads.
    """
    done = {id(equation) for equation in early}
    rest = [equation for equation in _dependencies(jaxpr.eqns, outputs) if id(equation) not in done]
    made = {v for equation in early for v in equation.outvars} | set(jaxpr.invars[n_inputs:])
    wanted = {v for v in (*outputs, *(v for equation in rest for v in equation.invars)) if isinstance(v, Var)} & made
    residual_vars = _minimum_cut(early, jaxpr.invars[n_inputs:], wanted)
    recomputed, missing = [], wanted - set(residual_vars)
    for equation in reversed(early):
        if missing.intersection(equation.outvars):
            recomputed.append(equation)
            missing |= {v for v in equation.invars if isinstance(v, Var)} - set(residual_vars)
    recomputed.reverse()
    return [*recomputed, *rest], residual_vars


def _minimum_cut(early: Sequence[JaxprEqn], cotangents: Sequence[Var], wanted: set[Var]) -> list[Var]:
    """The fewest bytes of values from which all wanted values follow by cheap equations."""
    made = [*cotangents, *(v for equation in early for v in equation.outvars)]
    node = {v: 2 + 2 * i for i, v in enumerate(made)}
    sizes = _bytes_of(early, made)
    unit = max(sum(sizes.values()) // 2**29, 1)
    infinite = 2**30
    edges = {(node[v], node[v] + 1): -(-size // unit) for v, size in sizes.items()}
    edges |= {(node[v] + 1, 1): infinite for v in wanted}
    edges |= {(0, node[v]): infinite for v in cotangents}
    for equation in early:
        read = [v for v in equation.invars if isinstance(v, Var) and v in node]
        for v in equation.outvars:
            edges |= (
                {(0, node[v]): infinite} if _expensive(equation) else {(node[u] + 1, node[v]): infinite for u in read}
            )
    sources, targets = zip(*edges, strict=True)
    n = 2 + 2 * len(made)
    graph = csr_array((np.array([*edges.values()], np.int32), (sources, targets)), shape=(n, n))
    unused = graph - maximum_flow(graph, 0, 1).flow
    unused.eliminate_zeros()
    reached = set(breadth_first_order(unused, 0, return_predecessors=False).tolist())
    return [v for v in made if node[v] in reached and node[v] + 1 not in reached]


def _bytes_of(equations: Sequence[JaxprEqn], variables: Sequence[Var]) -> dict[Var, int]:
    """Bytes of each variable per device; a shape is taken to be sharded as any sharding constraint on it says."""
    local: dict[tuple[int, ...], int] = {}
    for equation in equations:
        if equation.primitive.name == "sharding_constraint":
            shape = equation.outvars[0].aval.shape  # type: ignore[attr-defined]
            shard = math.prod(equation.params["sharding"].shard_shape(shape))
            local[shape] = min(shard, local.get(shape, shard))
    sizes = {}
    for v in variables:
        shape = v.aval.shape  # type: ignore[attr-defined]
        sizes[v] = max(local.get(shape, math.prod(shape)) * v.aval.dtype.itemsize, 1)  # type: ignore[attr-defined]
    return sizes


def _expensive(equation: JaxprEqn) -> bool:
    if any(name in equation.primitive.name for name in _EXPENSIVE):
        return True
    inner = (getattr(value, "jaxpr", value) for value in equation.params.values())
    return any(_expensive(one) for value in inner if isinstance(value, Jaxpr) for one in value.eqns)


def _function(
    closed: ClosedJaxpr, equations: Sequence[JaxprEqn], inputs: Sequence[Var], outputs: Sequence[Any]
) -> Callable[..., list[Any]]:
    """Some equations of a trace as a function."""
    part = Jaxpr(closed.jaxpr.constvars, inputs, outputs, equations, closed.jaxpr.effects)
    return jaxpr_as_fun(ClosedJaxpr(part, closed.consts))
