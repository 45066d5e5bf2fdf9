"""The largest buffers that are alive at the peak, from the live ranges that the compiler reports."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from jaxtrain.program.hlo import Program
from jaxtrain.program.trace import TracedValue, Tracer

_RANGE = re.compile(r"^ {4}([\w.\-]+)\{([\d,]*)\}:(\d+)-(\d+)$", re.MULTILINE)
_ALLOCATION = re.compile(r"^allocation (\d+):")
# Memory space 5 is host memory.
_ADDRESS = re.compile(r"^ value: <\d+ ([\w.\-]+)(?:\{([\d,]*)\})?(?: \(phi\))? @(?!5>)\d+> \(size=(\d+),offset=(\d+)")


@dataclass(frozen=True)
class Buffer:
    """A value that is alive at the peak: bytes on a device, and the operation and source lines that made it.

    For a value that a loop carries, `made_by` is the operation that computes it, not the loop. Source lines are those
    of `Instruction.stack`; the fields are '' or () for a name that is not in the program.
    """

    name: str
    bytes: int
    shape: str
    op_name: str
    stack: tuple[str, ...]
    made_by: str

    @property
    def source(self) -> str:
        """The innermost source line, "file:line", or ''."""
        return self.stack[0] if self.stack else ""


@dataclass(frozen=True)
class PeakMemory:
    """The live set at the peak: bytes of all values, the largest first."""

    bytes: int
    buffers: tuple[Buffer, ...]


def find_peak(report: str, assignment: str, program: Program) -> PeakMemory:
    """The live set with the most bytes; `report`: `*-live-range.txt`, `assignment`: `*-buffer-assignment.txt`.

    The line "(peak)" of the report can miss values that one loop leaves for another; this sum equals the size of the
    allocations. Values that share an address count once. Raises ValueError if no live range has an address.
    """
    addresses, allocation = {}, 0
    for line in assignment.splitlines():
        if head := _ALLOCATION.match(line):
            allocation = int(head.group(1))
        elif value := _ADDRESS.match(line):
            name, path, size, offset = value.groups()
            addresses[name, path or ""] = (allocation, int(offset)), int(size)
    ranges = [
        (int(begin), int(end), *addresses[name, path], name, path)
        for name, path, begin, end in _RANGE.findall(report)
        if (name, path) in addresses
    ]
    if not ranges:
        raise ValueError("no live range with an address: not a live-range report with its buffer assignment")
    most, alive = -1, []
    for moment in {begin for begin, *_ in ranges}:
        now: dict[tuple[int, int], tuple[str, str, int]] = {}
        for begin, end, address, size, name, path in ranges:
            if begin <= moment <= end and size > now.get(address, ("", "", -1))[2]:
                now[address] = name, path, size
        total = sum(size for _, _, size in now.values())
        if total > most:
            most, alive = total, list(now.values())
    return PeakMemory(most, _buffers(report, program, sorted(alive, key=lambda value: -value[2])))


def _buffers(report: str, program: Program, alive: list[tuple[str, str, int]]) -> tuple[Buffer, ...]:
    """`alive`: (name, element of its tuple as "1,0", bytes)."""
    values = {one.name: TracedValue(computation, one) for computation, one in program.instructions()}
    wrapped, tracer, buffers = _wrapped_operations(report, values), Tracer(program), []
    for name, path, size in alive:
        value = values.get(name) or wrapped.get(name)
        index = tuple(int(n) for n in path.split(",") if n)
        buffers.append(_buffer(tracer, name, value and replace(value, path=index), size))
    return tuple(buffers)


def _buffer(tracer: Tracer, name: str, value: TracedValue | None, size: int) -> Buffer:
    if value is None:
        return Buffer(name, size, "", "", (), "")
    label = name + "".join(f"{{{i}}}" for i in value.path)
    shapes = value.instruction.shapes
    index = value.path[0] if len(value.path) == 1 and value.path[0] < len(shapes) else 0
    fits = [shape for shape in (shapes[index], *reversed(shapes)) if shape.bytes == size]
    shown = f"{fits[0].dtype}[{','.join(map(str, fits[0].dims))}]" if fits else ""
    one = tracer.maker(value).instruction
    return Buffer(label, size, shown, one.op_name, one.stack, one.name)


def _wrapped_operations(report: str, values: dict[str, TracedValue]) -> dict[str, TracedValue]:
    """Operations wrapped in an asynchronous start are not in the text: use the start that follows them."""
    order = re.findall(r"^ +\d+:([\w.\-]+)$", report, re.MULTILINE)
    found, following = {}, None
    for name in reversed(order):
        following = values.get(name, following)
        if name not in values and following and following.instruction.phase == "start":
            found[name] = following
    return found
