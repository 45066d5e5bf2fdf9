"""The largest buffers that live at the moment of most memory, as the compiler's own live ranges say it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from jaxtrain.program.hlo import Program
from jaxtrain.program.trace import TracedValue, Tracer

_RANGE = re.compile(r"^ {4}([\w.\-]+)\{([\d,]*)\}:(\d+)-(\d+)$", re.MULTILINE)
_ALLOCATION = re.compile(r"^allocation (\d+):")
# Memory space 5 is the host's: no memory of the device.
_PLACED = re.compile(r"^ value: <\d+ ([\w.\-]+)(?:\{([\d,]*)\})?(?: \(phi\))? @(?!5>)\d+> \(size=(\d+),offset=(\d+)")


@dataclass(frozen=True)
class Buffer:
    """One value that lives at the peak: bytes a device, and the operation and source lines that made it.

    For what a loop carries, `made_by` is the operation that gives the carried value, not the loop. Source lines are
    those of `Instruction.stack`; all is '' or () for a name that does not stand in the program.
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
    """The live set where the sum over places of memory is largest; `assignment` is `*-buffer-assignment.txt`.

    The report's own line "(peak)" can miss what one loop leaves for another to read; this sum equals the size of the
    allocations. Values that share a place count once. Raises ValueError where no live range has a place.
    """
    places, allocation = {}, 0
    for line in assignment.splitlines():
        if head := _ALLOCATION.match(line):
            allocation = int(head.group(1))
        elif value := _PLACED.match(line):
            name, path, size, offset = value.groups()
            places[name, path or ""] = (allocation, int(offset)), int(size)
    ranges = [
        (int(begin), int(end), *places[name, path], name, path)
        for name, path, begin, end in _RANGE.findall(report)
        if (name, path) in places
    ]
    if not ranges:
        raise ValueError("no live range of a placed value: not a live-range report with its buffer assignment")
    most, alive = -1, []
    for moment in {begin for begin, *_ in ranges}:
        now: dict[tuple[int, int], tuple[str, str, int]] = {}
        for begin, end, place, size, name, path in ranges:
            if begin <= moment <= end and size > now.get(place, ("", "", -1))[2]:
                now[place] = name, path, size
        total = sum(size for _, _, size in now.values())
        if total > most:
            most, alive = total, list(now.values())
    return PeakMemory(most, _buffers(report, program, sorted(alive, key=lambda value: -value[2])))


def _buffers(report: str, program: Program, alive: list[tuple[str, str, int]]) -> tuple[Buffer, ...]:
    """`alive`: (name, element of its tuple as "1,0", bytes)."""
    places = {one.name: TracedValue(computation, one) for computation, one in program.instructions()}
    stand_in, tracer, buffers = _stand_ins(report, places), Tracer(program), []
    for name, path, size in alive:
        value = places.get(name) or stand_in.get(name)
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


def _stand_ins(report: str, places: dict[str, TracedValue]) -> dict[str, TracedValue]:
    """Operations wrapped in an asynchronous start do not stand in the text: the start that follows stands for them."""
    order = re.findall(r"^ +\d+:([\w.\-]+)$", report, re.MULTILINE)
    found, following = {}, None
    for name in reversed(order):
        following = places.get(name, following)
        if name not in places and following and following.instruction.phase == "start":
            found[name] = following
    return found
