"""Follows a value of a compiled program back to the operation that makes it, through tuples, loops and calls."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtrain.program.hlo import Computation, Instruction, Program


@dataclass(frozen=True)
class TracedValue:
    """The result of an instruction, or one element of it: `path` holds tuple indices, the outermost first."""

    computation: Computation
    instruction: Instruction
    path: tuple[int, ...] = ()

    def operand(self, number: int, path: tuple[int, ...]) -> TracedValue | None:
        """The value of an operand; None where the instruction has fewer."""
        operands = self.computation.operands(self.instruction)
        return TracedValue(self.computation, operands[number], path) if number < len(operands) else None


class Tracer:
    """Traces through one program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.callers: dict[str, tuple[Computation, Instruction]] = {}
        for computation, instruction in program.instructions():
            for name, _ in program.callees(instruction):
                self.callers.setdefault(name, (computation, instruction))

    def maker(self, value: TracedValue) -> TracedValue:
        """The operation that computes the value, or the argument of the program."""
        seen = set()
        while (key := (value.computation.name, value.instruction.name, value.path)) not in seen:
            seen.add(key)
            value = self._back(value) or value
        return value

    def _back(self, value: TracedValue) -> TracedValue | None:
        """The same value under the name one step back, or None."""
        one, path = value.instruction, value.path
        if one.opcode == "get-tuple-element":
            return value.operand(0, (int(one.attributes["index"]), *path))
        if one.opcode == "tuple" and path:
            return value.operand(path[0], path[1:])
        if one.phase == "done" or one.kind in ("bitcast", "copy", "opt-barrier", "optimization-barrier"):
            return value.operand(0, path)
        if one.opcode == "parameter" and value.computation.name in self.callers:
            return self._argument(value)
        if one.opcode == "while" and path:
            return self._loop(value, path)
        return self.root(one, path) if one.kind in ("call", "async") else None

    def root(self, one: Instruction, path: tuple[int, ...]) -> TracedValue | None:
        """The result of the computation that this instruction runs."""
        inner = self.program.computations.get(one.runs[0]) if one.runs else None
        return TracedValue(inner, inner.root, path) if inner else None

    def _argument(self, value: TracedValue) -> TracedValue | None:
        caller, one = self.callers[value.computation.name]
        outside = TracedValue(caller, one)
        if one.opcode == "while" and value.path:
            return self._loop(outside, value.path)
        return outside.operand(int(value.instruction.literal), value.path) if one.kind != "conditional" else None

    def _loop(self, loop: TracedValue, path: tuple[int, ...]) -> TracedValue | None:
        """The value that enters the loop if iterations pass it on unchanged, else the value of an iteration."""
        made = self.root(loop.instruction, path)
        inside = made.operand(path[0], path[1:]) if made and made.instruction.opcode == "tuple" else None
        while inside and inside.instruction.opcode in ("copy", "bitcast"):
            inside = inside.operand(0, inside.path)
        unchanged = inside and inside.instruction.opcode == "get-tuple-element" and not inside.path
        if inside and unchanged and inside.instruction.attributes["index"] == str(path[0]):
            return loop.operand(0, path)
        return made
