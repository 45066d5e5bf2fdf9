"""Resharding that the partitioner inserted and the program does not ask for, and full rematerializations."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from jaxtrain.program.collectives import Collective
from jaxtrain.program.hlo import Instruction, Program
from jaxtrain.program.trace import TracedValue, Tracer

RESHARDING = ("all-gather", "all-to-all", "collective-permute", "collective-broadcast")
# Primitives that move data between devices by definition.
_ASKED = re.compile(
    r"(sharding_constraint|all_gather\w*|ppermute|all_to_all|ragged_all_to_all|psum\w*|pmax|pmin|pbroadcast"
    r"|reduce_scatter|pgather)$"
)
# Operations that return the same values in another layout, memory or type.
_SAME = ("all-gather", "bitcast", "convert", "copy", "dynamic-slice", "pad", "reduce-precision", "reshape", "slice",
         "transpose")  # fmt: skip
# Operations of a choice between an old and a new value.
_CHOICE = frozenset(
    {*_SAME, "and", "broadcast", "compare", "constant", "get-tuple-element", "parameter", "select", "tuple"}
)
# More than the length of any chain of these operations.
_MAX_CHAIN = 1000


@dataclass(frozen=True)
class Rematerialization:
    """A tensor that is replicated and sharded again because the partitioner found no direct resharding."""

    instruction: str
    shape: str
    op_name: str
    source: str
    before: str
    after: str


def inserted_resharding(program: Program, collectives: Iterable[Collective]) -> tuple[Collective, ...]:
    """Gathers, permutes and all-to-alls that are neither asked for nor the gathering of stored state.

    Asked for: the operation is a constraint or a hand-written collective. Stored state: the values are an argument of
    the program (cast, sliced or with another layout), such as sharded weights that are gathered, or they are its
    result, such as new weights (at most after a choice between old and new).
    """
    tracer = Tracer(program)
    return tuple(
        one
        for one in collectives
        if one.kind in RESHARDING
        and one.groups
        and not (_asked(one.op_name) or _is_state(tracer, one) or _is_result(program, one))
    )


def read_rematerializations(stderr: str, program: Program | None = None) -> tuple[Rematerialization, ...]:
    """The partitioner's lines "Involuntary full rematerialization", each once; `program` resolves source lines."""
    lines = (line for line in stderr.splitlines() if "nvoluntary full rematerialization" in line)
    return tuple(dict.fromkeys(_rematerialization(line, program) for line in lines))


_SHARDINGS = re.compile(r"from sharding (.*?) to (\{.*?\})(?: efficiently| without|\.)")
_OPERATION = re.compile(r"for HLO operation:? %?([\w.\-]+) = (\(.*?\)|\S+) ")


def _rematerialization(line: str, program: Program | None) -> Rematerialization:
    shardings, operation = _SHARDINGS.search(line), _OPERATION.search(line)
    op_name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', line)
    location = re.search(r'source_file="([^"]*)"(?: source_line=(\d+))?', line)
    frame = re.search(r"stack_frame_id=(\d+)", line)
    stack = program.stacks.get(int(frame.group(1)), ()) if program and frame else ()
    source = f"{location.group(1)}:{location.group(2) or '?'}" if location else "".join(stack[:1])
    return Rematerialization(
        instruction=operation.group(1) if operation else "",
        shape=re.sub(r"\{[\d,]*\}", "", operation.group(2)) if operation else "",
        op_name=op_name.group(1) if op_name else "",
        source=source,
        before=shardings.group(1) if shardings else "",
        after=shardings.group(2) if shardings else "",
    )


def _asked(op_name: str) -> bool:
    """Merged operations print as (a:b:c): one that asks for resharding is enough."""
    return any(_ASKED.search(part) for part in op_name.strip("()").split(":"))


def _is_state(tracer: Tracer, one: Collective) -> bool:
    """Whether every operand is, in another form, an argument of the whole program."""
    computation = tracer.program.computations[one.computation]
    operands = computation.operands(computation.by_name[one.name])
    return bool(operands) and all(_from_argument(tracer, TracedValue(computation, operand)) for operand in operands)


def _from_argument(tracer: Tracer, value: TracedValue | None) -> bool:
    for _ in range(_MAX_CHAIN):
        if value is None:
            return False
        value = tracer.maker(value)
        one = value.instruction
        if one.opcode == "parameter":
            return value.computation.is_entry
        if one.kind == "fusion":
            value = tracer.root(one, value.path)
        elif one.kind in _SAME:
            value = value.operand(0, value.path)
        elif one.kind == "dynamic-update-slice":  # a loop stacks it for another loop
            value = value.operand(1, value.path)
        else:
            return False
    return False


def _is_result(program: Program, one: Collective) -> bool:
    """Whether the values are only used as the result of the program, at most after a choice."""
    entry = program.computations[program.entry]
    if one.kind != "all-gather" or one.computation != entry.name:
        return False
    users: dict[str, list[Instruction]] = {}
    for user in entry.instructions:
        for name in user.operands:
            users.setdefault(name, []).append(user)
    open_names, seen = [one.name], {one.name}
    while open_names:
        for user in users.get(open_names.pop(), []):
            if not (user.phase == "done" or _chooses(program, user)):
                return False
            if user.name not in seen:
                seen.add(user.name)
                open_names.append(user.name)
    return True


def _chooses(program: Program, one: Instruction) -> bool:
    if one.opcode != "fusion":
        return one.opcode in _CHOICE
    return all(inner.opcode in _CHOICE for name in one.runs for inner in program.computations[name].instructions)
