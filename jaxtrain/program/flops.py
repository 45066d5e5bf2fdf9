"""Matmul FLOPs that a compiled program executes: 2 x output elements x contracted length, times trip counts."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxtrain.program.hlo import Computation, Instruction, Program

# Custom calls without a matmul: sorting, memory placement, random bits, host callbacks.
_NO_MATMUL = re.compile(
    r"TopK|__cub\$.*|__gpu\$TopK|Sharding|SPMD.*|annotate_device_placement|LayoutConstraint|MoveTo(Host|Device)|Pin|Unpin"
    r"|AllocateBuffer|CreateBuffer|SliceToDynamic|PadToStatic|AssumeGatherIndicesInBound|.*callback.*|.*threefry.*"
    r"|shape_assertion|.*\$norm"
)
_MATMUL = re.compile(r"\$gemm|matmul|\$groupedgemm|__triton_gemm|\$blockScaledDot", re.IGNORECASE)


@dataclass(frozen=True)
class ProgramFlops:
    """Executed matmul FLOPs of one call on one device, by the source line that asked for them.

    `opaque` are kernels whose work is not in the text: (custom call target, calls), counted as 0.
    A conditional counts its most expensive branch.
    """

    total: int
    by_source: Mapping[str, int]
    opaque: tuple[tuple[str, int], ...]


def count_flops(program: Program) -> ProgramFlops:
    """Executed matmul FLOPs of the whole program, trip counts included."""
    by_source: Counter[str] = Counter()
    opaque: Counter[str] = Counter()
    times = _taken(program)
    for computation, instruction in program.instructions():
        count = times[computation.name]
        flops = direct_flops(computation, instruction)
        if flops:
            by_source[instruction.source or instruction.op_name] += count * flops
        elif flops is None:
            opaque[instruction.target] += count
    return ProgramFlops(sum(by_source.values()), dict(by_source.most_common()), tuple(opaque.most_common()))


def instruction_flops(program: Program, computation: Computation, instruction: Instruction) -> int:
    """Matmul FLOPs of one execution of this instruction and of everything it runs."""
    direct = direct_flops(computation, instruction) or 0
    inner = [times * computation_flops(program, name) for name, times in program.callees(instruction)]
    return direct + (max(inner, default=0) if instruction.opcode == "conditional" else sum(inner))


def computation_flops(program: Program, name: str) -> int:
    """Matmul FLOPs of one execution of a computation and of everything it runs."""
    known: dict[str, int] = program.__dict__.setdefault("_flops", {})
    if name not in known:
        computation = program.computations[name]
        known[name] = sum(instruction_flops(program, computation, one) for one in computation.instructions)
    return known[name]


def direct_flops(computation: Computation, instruction: Instruction) -> int | None:
    """Matmul FLOPs of this instruction alone, 0 if it is no matmul, None for an opaque kernel."""
    if instruction.phase in ("done", "update"):
        return 0
    match instruction.kind:
        case "dot" | "scaled-dot" | "ragged-dot":
            return _dot(computation, instruction)
        case "convolution":
            return _convolution(computation, instruction)
        case "custom-call":
            return _custom_call(computation, instruction)
    return 0


def _taken(program: Program) -> dict[str, int]:
    """Executions with one branch of each conditional, the most expensive, instead of all."""
    idle = set()
    for computation in program.computations.values():
        for one in computation.instructions:
            if one.opcode == "conditional":
                names = [name for name, _ in program.callees(one)]
                best = max(names, key=lambda name: computation_flops(program, name), default=None)
                idle |= {(computation.name, one.name, name) for name in names if name != best}
    return program.count(lambda computation, one, callee: (computation.name, one.name, callee) not in idle)


def _dot(computation: Computation, one: Instruction) -> int:
    left = computation.operands(one)[0]
    dims = _ints(one.attributes.get("lhs_contracting_dims", ""))
    flops = 2 * one.shapes[0].elements * math.prod(left.shapes[0].dims[i] for i in dims)
    ragged = _ints(one.attributes.get("lhs_ragged_dims", ""))
    if ragged and set(ragged) <= set(_ints(one.attributes.get("lhs_batch_dims", ""))):
        return flops
    # The groups of a ragged contraction share its length: together they have the FLOPs of one product.
    return flops // one.shapes[0].dims[0] if ragged and set(ragged) <= set(dims) else flops


def _convolution(computation: Computation, one: Instruction) -> int:
    """Padding counts as work."""
    kernel = computation.operands(one)[1].shapes[0].dims
    labels = one.attributes["dim_labels"].partition("_")[2].partition("->")[0]
    return 2 * one.shapes[0].elements * math.prod(kernel) // kernel[labels.index("o")]


def _custom_call(computation: Computation, one: Instruction) -> int | None:
    target = one.target
    if "fmha" in target:
        return _attention(computation, one)
    if "$conv" in target:
        return _cudnn_convolution(computation, one)
    if _MATMUL.search(target):
        return _gemm(computation, one)
    return 0 if _NO_MATMUL.fullmatch(target) else None


def _gemm(computation: Computation, one: Instruction) -> int | None:
    numbers = _find(one.backend, "dot_dimension_numbers")
    if numbers is None:
        return _library_matmul(computation, one)
    left = computation.operands(one)[0].shapes[0].dims
    return 2 * one.shapes[0].elements * math.prod(left[int(i)] for i in numbers["lhs_contracting_dimensions"])


def _library_matmul(computation: Computation, one: Instruction) -> int | None:
    """A library matmul without dimension numbers: [.., M, K] x [.., K, N], each possibly transposed."""
    operands = computation.operands(one)
    if len(operands) < 2:
        return None
    left, right, out = operands[0].shapes[0].elements, operands[1].shapes[0].elements, one.shapes[0].elements
    batch = math.prod(one.shapes[0].dims[:-2])
    squared = left * right // max(out * batch, 1)
    length = math.isqrt(squared)
    return 2 * out * length if length * length == squared else None


def _attention(computation: Computation, one: Instruction) -> int | None:
    """Full scores, masked ones included: 2 products forward, 5 backward."""
    scores = _find(one.backend, "intermediate_tensor_shape")
    if scores is None:
        return None
    width = computation.operands(one)[0].shapes[0].dims[-1]
    products = 5 if "ackward" in one.target else 2
    return products * 2 * math.prod(int(n) for n in scores["dimensions"]) * width


def _cudnn_convolution(computation: Computation, one: Instruction) -> int | None:
    if "dim_labels" not in one.attributes or "Forward" not in one.target:
        return None
    return _convolution(computation, one)


def _find(tree: Any, key: str) -> Any:
    """The first value under this key, at any depth."""
    if not isinstance(tree, Mapping):
        return None
    if key in tree:
        return tree[key]
    return next((found for value in tree.values() if (found := _find(value, key)) is not None), None)


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))
