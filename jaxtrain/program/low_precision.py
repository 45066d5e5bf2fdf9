"""Which matmuls of a compiled program run in the 8 bits that precision.recipe asks for."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtrain.config import ConfigError
from jaxtrain.program.flops import direct_flops
from jaxtrain.program.hlo import Computation, Instruction, Program

PASSES = ("forward", "dgrad", "wgrad")
MERGED = "merged into a neighbour's"


@dataclass(frozen=True)
class LowPrecisionMatmul:
    """A matmul of the recipe: the weight's path, one of PASSES, its calls in a step, those in 8 bits, and the kernels.

    No call and the kernel MERGED: the compiler joined it with a product of the same operand.
    """

    path: str
    step: str
    calls: int
    low: int
    kernels: tuple[str, ...]


def low_precision_matmuls(program: Program, recipe: Mapping[str, Any] | None) -> tuple[LowPrecisionMatmul, ...]:
    """The matmuls of a recipe by weight and pass; forward ones include recomputation. Empty without a recipe.

    `recipe`: what the worker says of it (program/worker.py): name, kernels, multiple, xla.
    """
    if recipe is None:
        return ()
    named = re.compile(rf"{recipe['name']}:([\w.]+):({'|'.join(PASSES)})")
    calls: Counter[tuple[str, str]] = Counter()
    low: Counter[tuple[str, str]] = Counter()
    kernels: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for computation, one in program.instructions():
        found = named.search(one.op_name)
        if not found or direct_flops(computation, one) == 0:
            continue
        key, times = (found[1], found[2]), program.executions[computation.name]
        calls[key] += times
        low[key] += times * _is_low(computation, one, recipe["kernels"])
        kernels[key].add(one.target or one.kind)
    return tuple(
        LowPrecisionMatmul(
            path, step, calls[path, step], low[path, step], tuple(sorted(kernels[path, step])) or (MERGED,)
        )
        for path in sorted({path for path, _ in calls})
        for step in PASSES
    )


def check_low_precision(matmuls: Sequence[LowPrecisionMatmul], recipe: Mapping[str, Any] | None, compute: str) -> None:
    """Raise ConfigError for a matmul of the recipe that the GPU's program computes in more than 8 bits."""
    if recipe is None:
        return
    if not matmuls:
        raise ConfigError(
            f"precision.recipe {recipe['name']}: the compiled program has no matmul of precision.recipe_kinds: choose "
            "kinds that the model has, or set precision.recipe: null"
        )
    wide = [one for one in matmuls if one.low < one.calls]
    if wide:
        named = "; ".join(
            f"{one.path} {one.step} ({one.calls - one.low} of {one.calls} calls, {', '.join(one.kernels)})"
            for one in wide
        )
        options = "".join(f"xla.{name}: {str(value).lower()}, and " for name, value in recipe["xla"].items())
        raise ConfigError(
            f"precision.recipe {recipe['name']}: the compiled program computes matmuls in {compute}: {named}. The "
            f"recipe needs {options}contracted dims that are a multiple of {recipe['multiple']} on each device: change "
            "these, or leave their kind out of precision.recipe_kinds"
        )


def _is_low(computation: Computation, one: Instruction, kernels: str) -> bool:
    """Whether a library kernel of the recipe computes it, or a product of 8-bit operands."""
    if one.target:
        return re.fullmatch(kernels, one.target) is not None
    return all(operand.shapes[0].dtype.startswith("f8") for operand in computation.operands(one)[:2])
