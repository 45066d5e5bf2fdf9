"""Timeline of one iteration of a loop of the program: matmuls at peak, transfers at the links' speed.

It shows the schedule and is no forecast: kernels reach less than the peak, and other operations take no time here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jaxtrain.program.collectives import Collective, Links
from jaxtrain.program.flops import computation_flops, instruction_flops
from jaxtrain.program.hlo import Computation, Instruction, Program


@dataclass(frozen=True)
class TimelineSpan:
    """A matmul or transfer, in seconds from the begin of the iteration; lane is 'matmul', 'fast' or 'network'."""

    lane: str
    begin: float
    end: float
    label: str


@dataclass(frozen=True)
class LayerTimeline:
    """One iteration of a loop that runs `times` in a step; `matmul` and `total` in seconds."""

    title: str
    computation: str
    times: int
    matmul: float
    total: float
    spans: tuple[TimelineSpan, ...]


def layer_timelines(
    program: Program, collectives: Iterable[Collective], links: Links, count: int = 2
) -> tuple[LayerTimeline, ...]:
    """The innermost loops with the most matmul work: a layer's forward and backward pass, in program order."""
    work = {
        name: times * computation_flops(program, name)
        for name, times in program.executions.items()
        if times > 1 and computation_flops(program, name) and name in _bodies(program)
        and not any(_holds_loop(program, one) for one in program.computations[name].instructions)
    }  # fmt: skip
    chosen = sorted(work, key=lambda name: -work[name])[:count]
    found = list(collectives)
    lines = [_timeline(program, name, found, links) for name in program.computations if name in chosen]
    return tuple(sorted(lines, key=lambda line: "backward" in line.title))


def _bodies(program: Program) -> set[str]:
    return {one.runs[0] for _, one in program.instructions() if one.opcode == "while" and one.runs}


def _holds_loop(program: Program, one: Instruction) -> bool:
    return one.opcode == "while" and _loop_flops(program, one) > 0


def _loop_flops(program: Program, one: Instruction) -> int:
    """Matmul FLOPs of one iteration of a loop."""
    return max((computation_flops(program, name) for name in one.runs if name in program.computations), default=0)


def _timeline(program: Program, name: str, collectives: list[Collective], links: Links) -> LayerTimeline:
    computation = program.computations[name]
    started: dict[str, list[Collective]] = {}
    for one in collectives:
        if one.computation == name:
            started.setdefault(one.name, []).append(one)
    now, matmul, spans = 0.0, 0.0, []
    free: dict[str, float] = {"fast": 0.0, "network": 0.0}
    arrival: dict[str, float] = {}
    for instruction in computation.instructions:
        if instruction.name in started:
            for one in started[instruction.name]:
                begin = max(now, free[one.link])
                free[one.link] = end = begin + one.seconds
                spans.append(TimelineSpan(one.link, begin, end, _label(one)))
                if one.asynchronous:
                    arrival[instruction.name] = max(end, arrival.get(instruction.name, 0.0))
                else:
                    now = end
        elif instruction.phase in ("done", "update"):
            ends = [arrival[operand] for operand in instruction.operands if operand in arrival]
            if ends and instruction.phase == "update":
                arrival[instruction.name] = max(ends)
            elif ends:
                now = max(now, *ends)
        elif flops := instruction_flops(program, computation, instruction):
            end = now + flops / links.peak
            spans.append(TimelineSpan("matmul", now, end, _matmul_label(instruction)))
            matmul += end - now
            now = end
    return LayerTimeline(_title(computation), name, program.executions[name], matmul, now, tuple(spans))


def _label(one: Collective) -> str:
    return f"{one.kind} over {one.axes_label}, {one.payload / 2**20:.1f} MiB, {one.source}"


def _matmul_label(instruction: Instruction) -> str:
    return f"{instruction.op_name.rsplit('/', 1)[-1]} {instruction.source}".strip() or instruction.name


def _title(computation: Computation) -> str:
    names = [one.op_name for one in computation.instructions if one.op_name]
    backward = sum("transpose(" in name for name in names)
    return "backward pass of a layer" if 2 * backward > len(names) else "forward pass of a layer"
