"""The largest buffers that live at the moment of most memory, as the compiler's own live ranges say it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from jaxtrain.plan.hlo import Program
from jaxtrain.plan.trace import Tracer, Value

_PEAK = re.compile(r"^ *Live ranges at \d+ \(peak\):$", re.MULTILINE)
_LINE = re.compile(r"^ +([\w.\-]+)\{([\d,]*)\}: (\d+) bytes \(cumulative: (\d+) bytes\)$")


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
class Peak:
    """The live set at the peak: bytes of all values, the largest first."""

    bytes: int
    buffers: tuple[Buffer, ...]


def read_peak(report: str, program: Program) -> Peak:
    """Read the file `*-live-range.txt` that `xla_dump_to` writes beside the program.

    Raises ValueError where the report has no live set at the peak.
    """
    head = _PEAK.search(report)
    if head is None:
        raise ValueError("no line 'Live ranges at N (peak):': not a live-range report")
    places = {one.name: Value(computation, one) for computation, one in program.instructions()}
    stand_in = _stand_ins(report, places)
    tracer, buffers, total = Tracer(program), [], 0
    for line in report[head.end() :].lstrip("\n").splitlines():
        found = _LINE.match(line)
        if found is None:
            break
        name, path = found.group(1), tuple(int(n) for n in found.group(2).split(",") if n)
        size, total = int(found.group(3)), int(found.group(4))
        value = places.get(name) or stand_in.get(name)
        buffers.append(_buffer(tracer, name, value and replace(value, path=path), size))
    return Peak(total, tuple(buffers))


def _buffer(tracer: Tracer, name: str, value: Value | None, size: int) -> Buffer:
    if value is None:
        return Buffer(name, size, "", "", (), "")
    label = name + "".join(f"{{{i}}}" for i in value.path)
    shapes = value.instruction.shapes
    index = value.path[0] if len(value.path) == 1 and value.path[0] < len(shapes) else 0
    fits = [shape for shape in (shapes[index], *reversed(shapes)) if shape.bytes == size]
    shown = f"{fits[0].dtype}[{','.join(map(str, fits[0].dims))}]" if fits else ""
    one = tracer.maker(value).instruction
    return Buffer(label, size, shown, one.op_name, one.stack, one.name)


def _stand_ins(report: str, places: dict[str, Value]) -> dict[str, Value]:
    """Operations wrapped in an asynchronous start do not stand in the text: the start that follows stands for them."""
    order = re.findall(r"^ +\d+:([\w.\-]+)$", report, re.MULTILINE)
    found, following = {}, None
    for name in reversed(order):
        following = places.get(name, following)
        if name not in places and following and following.instruction.phase == "start":
            found[name] = following
    return found
