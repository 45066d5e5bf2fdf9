"""Scheduled HLO text, as XLA prints it for CPU and GPU, read into frozen dataclasses; imports no jax."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from jaxtrain.program.groups import Groups, read_groups, read_pairs
from jaxtrain.program.opcodes import BITS, OPCODES


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """One array of an instruction's result: element type, dims, memory space (5 is the host)."""

    dtype: str
    dims: tuple[int, ...]
    memory: int = 0

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes without padding; 0 for tokens and for an element type that is not known (reported in `unknown`)."""
        return -(-self.elements * BITS.get(self.dtype, 0) // 8)


@dataclass(frozen=True)
class Instruction:
    """One line of a computation, in scheduled order.

    `shapes` are the leaves of the result (a tuple flattened), `operands` names in the same computation, `attributes`
    the raw text by key, `stack` the source lines that made it, "file:line", innermost first, each once.
    """

    name: str
    opcode: str
    shapes: tuple[ArrayShape, ...]
    operands: tuple[str, ...]
    attributes: Mapping[str, str] = field(default_factory=dict)
    backend: Mapping[str, Any] = field(default_factory=dict)
    op_name: str = ""
    stack: tuple[str, ...] = ()
    literal: str = ""
    is_root: bool = False

    @property
    def kind(self) -> str:
        """The opcode without -start, -done or -update."""
        return re.sub(r"-(start|done|update)$", "", self.opcode)

    @property
    def phase(self) -> str:
        """'start', 'done', 'update' or ''."""
        found = re.search(r"-(start|done|update)$", self.opcode)
        return found.group(1) if found else ""

    @property
    def bytes(self) -> int:
        """Bytes of all leaves of the result."""
        return sum(shape.bytes for shape in self.shapes)

    @property
    def source(self) -> str:
        """The innermost source line, "file:line", or ''."""
        return self.stack[0] if self.stack else ""

    @property
    def target(self) -> str:
        """The custom call's target, or ''."""
        return self.attributes.get("custom_call_target", "").strip('"')

    @property
    def runs(self) -> tuple[str, ...]:
        """Computations that this instruction executes (not scalar regions of reductions); while: body, condition."""
        keys = _RUNS.get(self.kind, ())
        return tuple(name for key in keys for name in re.findall(r"%?([\w.\-]+)", self.attributes.get(key, "")))

    @property
    def trip_count(self) -> int | None:
        """A while loop's known trip count, or None."""
        count = self.backend.get("known_trip_count", {}).get("n")
        return None if count is None else int(count)

    @property
    def is_sync(self) -> bool:
        """Whether the backend runs this collective in line with computation."""
        return bool(self.backend.get("collective_backend_config", self.backend).get("is_sync", False))

    def groups(self, partitions: int) -> Groups:
        """Replica groups as tuples of partition numbers, () if it has none; an empty list means all partitions.

        Raises ValueError for a notation that is not known.
        """
        text = self.attributes.get("replica_groups")
        return () if text is None else read_groups(text, partitions)

    @property
    def pairs(self) -> Groups:
        """Source and target partitions of a permute, () if it has none."""
        return read_pairs(self.attributes.get("source_target_pairs", ""))


# Which attributes name computations that run when an instruction of this kind does.
_RUNS = {
    "fusion": ("calls",),
    "async": ("calls",),
    "call": ("to_apply",),
    "while": ("body", "condition"),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
    "custom-call": ("called_computations", "calls"),
}


@dataclass(frozen=True)
class Computation:
    """Instructions in scheduled order."""

    name: str
    instructions: tuple[Instruction, ...]
    is_entry: bool = False

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Name -> instruction."""
        return {instruction.name: instruction for instruction in self.instructions}

    def operands(self, instruction: Instruction) -> tuple[Instruction, ...]:
        """The instructions that made this one's operands; unknown names (reported by the reader) are left out."""
        return tuple(self.by_name[name] for name in instruction.operands if name in self.by_name)

    @property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        return next((one for one in self.instructions if one.is_root), self.instructions[-1])


@dataclass(frozen=True)
class Unknown:
    """Something the reader did not understand and therefore did not count: what, and where."""

    what: str
    where: str


@dataclass(frozen=True)
class Program:
    """A compiled per-device program; `unknown` lists everything that was not understood.

    `stacks`: the source lines of each numbered stack frame, for messages that name a frame.
    """

    name: str
    computations: Mapping[str, Computation]
    entry: str
    partitions: int
    scheduled: bool
    stacks: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    unknown: tuple[Unknown, ...] = ()

    @cached_property
    def executions(self) -> dict[str, int]:
        """Computation -> times it runs in one call: trip counts multiply, a loop without one counts as 1.

        Every branch of a conditional counts as if taken.
        """
        return self.count(lambda *_: True)

    def count(self, taken: Callable[[Computation, Instruction, str], bool]) -> dict[str, int]:
        """Executions through those calls (computation, instruction, callee) that are `taken`."""
        times = dict.fromkeys(self.computations, 0)
        times[self.entry] = 1
        for name in reversed(list(self._callees_first())):
            computation = self.computations[name]
            for instruction in computation.instructions:
                for callee, factor in self.callees(instruction):
                    times[callee] += times[name] * factor * taken(computation, instruction, callee)
        return times

    def callees(self, instruction: Instruction) -> list[tuple[str, int]]:
        """(computation, times) that one execution of this instruction runs; a done or update runs nothing."""
        if instruction.phase in ("done", "update"):
            return []
        names = [name for name in instruction.runs if name in self.computations]
        if instruction.opcode != "while":
            return [(name, 1) for name in names]
        trips = 1 if instruction.trip_count is None else instruction.trip_count
        return [(name, trips + (name != names[0])) for name in names]

    def instructions(self) -> Iterator[tuple[Computation, Instruction]]:
        """Every instruction of every computation that runs, in printed order."""
        for computation in self.computations.values():
            if self.executions[computation.name]:
                for instruction in computation.instructions:
                    yield computation, instruction

    def _callees_first(self) -> Iterator[str]:
        seen: set[str] = set()

        def visit(name: str) -> Iterator[str]:
            if name not in seen:
                seen.add(name)
                for instruction in self.computations[name].instructions:
                    for callee, _ in self.callees(instruction):
                        yield from visit(callee)
                yield name

        yield from visit(self.entry)


_COMMENT = re.compile(r"/\*index=\d+\*/")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[()\[\]{},]')
_SHAPE = re.compile(r"\b([a-z][a-z0-9]*)\[([^\]]*)\](?:\{([^}]*)\})?")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+)(?: \(.*)? (?:-> .*)?\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


def read_program(text: str) -> Program:
    """Read the text of one module; what cannot be read is listed in the result's `unknown`, never dropped."""
    reader = _Reader(text)
    for line in text.splitlines():
        reader.feed(line)
    return reader.program()


class _Reader:
    """The state of reading line by line."""

    def __init__(self, text: str) -> None:
        head = re.match(r"HloModule ([^\s,]+)", text)
        if head is None:
            raise ValueError(f"not the text of a compiled module: it begins with {text[:60]!r}, not HloModule")
        header = text.partition("\n")[0]
        counts = [int(n) for n in re.findall(r"num_(?:partitions|replicas)=(\d+)", header)]
        self.name, self.partitions = head.group(1), math.prod(counts)
        self.scheduled = "is_scheduled=true" in header
        self.tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
        self.table = ""
        self.stacks: dict[int, tuple[str, ...]] = {}
        self.computations: dict[str, Computation] = {}
        self.entry = ""
        self.current: tuple[str, bool] | None = None
        self.pending: list[Instruction] = []
        self.unknown: dict[Unknown, None] = {}

    def feed(self, line: str) -> None:
        """Take one line."""
        if self.current is None:
            self._outside(line)
        elif line.startswith("}"):
            name, is_entry = self.current
            self.computations[name] = Computation(name, tuple(self.pending), is_entry)
            self.current, self.pending = None, []
        elif line.strip():
            self._inside(_COMMENT.sub("", line))

    def _outside(self, line: str) -> None:
        head = _HEAD.match(line)
        row = re.match(r"(\d+) (.*)$", line)
        if line in self.tables:
            self.table = line
        elif self.table and row:
            self.tables[self.table][int(row.group(1))] = row.group(2)
        elif head and not line.startswith("HloModule"):
            self.current = (head.group(2), head.group(1) is not None)
            self.entry = head.group(2) if head.group(1) else self.entry
        elif line.strip() and not line.startswith("HloModule"):
            self._report("line", line)

    def _inside(self, line: str) -> None:
        try:
            instruction = self._instruction(line)
        except (ValueError, IndexError):
            self._report("instruction", line)
            return
        self.pending.append(instruction)
        if instruction.opcode not in OPCODES and instruction.kind not in OPCODES:
            self._report(f"opcode {instruction.opcode}", line)
        for dtype in {shape.dtype for shape in instruction.shapes} - BITS.keys():
            self._report(f"element type {dtype}", line)
        for read in (lambda: instruction.groups(self.partitions), lambda: instruction.pairs):
            try:
                read()
            except ValueError as error:
                self._report(str(error), line)

    def _report(self, what: str, line: str) -> None:
        where = f"{self.current[0]}: " if self.current else ""
        self.unknown[Unknown(what, where + line.strip()[:160])] = None

    def _instruction(self, line: str) -> Instruction:
        head = _LINE.match(line)
        if head is None:
            raise ValueError(line)
        start = head.end()
        end = _closing(line, start) + 1 if line[start] == "(" else line.index(" ", start)
        shapes = _shapes(line[start:end])
        opcode = re.compile(r"\s*([a-z][\w\-]*)\(").match(line, end)
        if opcode is None:
            raise ValueError(line)
        close = _closing(line, opcode.end() - 1)
        literal = line[opcode.end() : close]
        attributes = _attributes(line[close + 1 :])
        metadata = attributes.pop("metadata", "")
        op_name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', metadata)
        return Instruction(
            name=head.group(2),
            opcode=opcode.group(1),
            shapes=shapes,
            operands=_operands(opcode.group(1), literal),
            attributes=attributes,
            backend=_backend(attributes.get("backend_config", "")),
            op_name=re.sub(r"\\(.)", r"\1", op_name.group(1)) if op_name else "",
            stack=self._stack(metadata),
            literal=literal,
            is_root=head.group(1) is not None,
        )

    def _stack(self, metadata: str) -> tuple[str, ...]:
        frame = re.search(r"stack_frame_id=(\d+)", metadata)
        if frame:
            return self._frames(int(frame.group(1)))
        location = re.search(r'source_file="([^"]*)"(?:.*?source_line=(\d+))?', metadata)
        return (f"{location.group(1)}:{location.group(2) or '?'}",) if location else ()

    def _frames(self, frame: int) -> tuple[str, ...]:
        if frame in self.stacks:
            return self.stacks[frame]
        numbers = _numbers(self.tables["StackFrames"].get(frame, ""))
        location = _numbers(self.tables["FileLocations"].get(numbers.get("file_location_id", -1), ""))
        name = self.tables["FileNames"].get(location.get("file_name_id", -1), "?").strip('"')
        # The printed parent is one more than the number of the parent's frame; a frame without parent prints its own.
        parent = numbers.get("parent_frame_id", 1) - 1
        rest = self._frames(parent) if 0 < parent < frame else ()
        # An inlined loop body repeats the frames of its loop: keep each line once.
        self.stacks[frame] = tuple(dict.fromkeys((f"{name}:{location.get('line', '?')}", *rest))) if numbers else ()
        return self.stacks[frame]

    def program(self) -> Program:
        """What was read; raises ValueError when there is no entry computation."""
        if self.entry not in self.computations:
            raise ValueError("the text has no ENTRY computation, or ends inside it")
        partitions = self.partitions if self.partitions > 1 else _widest(self.computations)
        stacks = {frame: self._frames(frame) for frame in self.tables["StackFrames"]}
        program = Program(self.name, self.computations, self.entry, partitions, self.scheduled, stacks)
        for computation, instruction in program.instructions():
            where = f"{computation.name}: {instruction.name}"
            if instruction.opcode == "while" and instruction.trip_count is None:
                self.unknown[Unknown("while loop without a known trip count, counted once", where)] = None
            for name in instruction.runs:
                if name not in self.computations:
                    self.unknown[Unknown(f"computation {name} is not in the text", where)] = None
            for name in instruction.operands:
                if name not in computation.by_name:
                    self.unknown[Unknown(f"operand {name} is not in the computation", where)] = None
        return replace(program, unknown=tuple(self.unknown))


def _widest(computations: Mapping[str, Computation]) -> int:
    """The number of partitions if the header has none: one more than the highest in any group."""
    found = [
        member
        for computation in computations.values()
        for one in computation.instructions
        if "replica_groups" in one.attributes or "source_target_pairs" in one.attributes
        for group in (*_known_groups(one), *one.pairs)
        for member in group
    ]
    return max(found, default=0) + 1


def _known_groups(instruction: Instruction) -> Groups:
    try:
        return instruction.groups(0)
    except ValueError:
        return ()


def _closing(text: str, start: int) -> int:
    """Index of the bracket that closes the one at `start`; quoted text is skipped."""
    depth = 0
    for token in _TOKEN.finditer(text, start):
        depth += (token.group() in "([{") - (token.group() in ")]}")
        if depth == 0 and token.group() in ")]}":
            return token.start()
    raise ValueError(f"no closing bracket: {text[start : start + 80]}")


def _split(text: str) -> list[str]:
    """Parts between top-level commas."""
    parts, depth, begin = [], 0, 0
    for token in _TOKEN.finditer(text):
        mark = token.group()
        depth += (mark in "([{") - (mark in ")]}")
        if mark == "," and depth == 0:
            parts.append(text[begin : token.start()])
            begin = token.end()
    return [part.strip() for part in (*parts, text[begin:]) if part.strip()]


def _attributes(text: str) -> dict[str, str]:
    pairs = (part.partition("=")[::2] for part in _split(text))
    attributes = {key.strip(): value.strip() for key, value in pairs}
    # A mesh with its own device order prints as two parts: replica_groups=mesh[...], device_ids=(...) {...}
    if attributes.get("replica_groups", "").startswith("mesh[") and "device_ids" in attributes:
        attributes["replica_groups"] += ", device_ids=" + attributes.pop("device_ids")
    return attributes


def _operands(opcode: str, literal: str) -> tuple[str, ...]:
    if opcode in ("parameter", "constant", "iota"):
        return ()
    found = (re.search(r"([\w.\-]+)$", part) for part in _split(literal))
    return tuple(match.group(1) for match in found if match)


def _shapes(text: str) -> tuple[ArrayShape, ...]:
    return tuple(
        ArrayShape(dtype, tuple(int(n) for n in re.findall(r"\d+", dims)), _memory(layout))
        for dtype, dims, layout in _SHAPE.findall(text)
    )


def _memory(layout: str) -> int:
    found = re.search(r"S\((\d+)\)", layout)
    return int(found.group(1)) if found else 0


def _backend(text: str) -> Mapping[str, Any]:
    for decode in (json.loads, lambda value: json.loads(json.loads(value))):
        try:
            value = decode(text)
        except (ValueError, TypeError):
            continue
        if isinstance(value, dict):
            return value
    return {}


def _numbers(text: str) -> dict[str, int]:
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", text)}
