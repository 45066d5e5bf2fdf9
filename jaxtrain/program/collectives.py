"""Every collective of a compiled program: bytes, calls, mesh axes, and the work that overlaps with it.

Bytes are those of one device. *Payload* is the full buffer of one call by the convention of NCCL: the result of an
all-gather, the operand of every other kind; an async pair counts once. *Bytes sent* are what each device sends over
the link that limits the call, by the ring formulas: all-reduce 2 S (n-1)/n, reduce-scatter, all-gather and all-to-all
S (n-1)/n, permute and broadcast S. In a group over d domains a ring passes each border once, and the p
members of a domain share it: the network carries S (d-1)/d / p for each device. An all-to-all sends the (d-1)/d of its
tokens that go to another domain.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxtrain.program.flops import instruction_flops
from jaxtrain.program.groups import Groups
from jaxtrain.program.hlo import Computation, Instruction, Program, Unknown
from jaxtrain.program.opcodes import COLLECTIVES

AXES = ("data", "pipe", "tensor", "seq", "expert")
TIGHT = ("tensor", "expert")
# A reduction of fewer elements is one of metrics or norms, not of a gradient.
MIN_GRADIENT_SIZE = 65
# A name is searched so many operations back.
_NEAR = 4

Link = Literal["fast", "network"]


@dataclass(frozen=True)
class Links:
    """Bytes/s that a device sends inside its fast domain and across domains, and its matmul FLOP/s."""

    fast: float
    network: float
    peak: float


@dataclass(frozen=True)
class Collective:
    """One collective instruction: `calls` in a step; everything else is of one call on one device.

    `axes` are the mesh axes along which a group's members differ; `exact` says that each group is all devices along
    them with the other coordinates fixed. `domains` is the largest number of domains of one group. `flops_between` are
    the matmul FLOPs scheduled between start and done (0 for a synchronous one), `seconds` the transfer time on `link`.
    """

    name: str
    kind: str
    computation: str
    op_name: str
    stack: tuple[str, ...]
    dtypes: tuple[str, ...]
    elements: int
    payload: int
    bytes_sent: int
    calls: int
    groups: Groups
    axes: tuple[str, ...]
    exact: bool
    domains: int
    asynchronous: bool
    flops_between: int
    seconds: float
    hidden_seconds: float
    conditional: bool
    reduction: str
    spmd: bool

    @property
    def link(self) -> Link:
        """The link that limits it."""
        return "network" if self.crosses else "fast"

    @property
    def crosses(self) -> bool:
        """Whether a group spans more than one domain."""
        return self.domains > 1

    @property
    def covered(self) -> float:
        """The share of the transfer time for which matmul work is scheduled between start and done, 0 to 1.

        Work that overlaps with several transfers counts for each. Kernels with unknown FLOPs count for none.
        """
        return min(1.0, self.hidden_seconds / self.seconds) if self.seconds > 0 else 1.0

    @property
    def source(self) -> str:
        """The innermost source line, "file:line", or ''."""
        return self.stack[0] if self.stack else ""

    @property
    def axes_label(self) -> str:
        """'data', 'data+tensor', 'part of data+tensor' where no combination of axes fits exactly, or 'no axis'."""
        label = "+".join(self.axes) or "no axis"
        return label if self.exact else f"part of {label}"


@dataclass(frozen=True)
class Reductions:
    """Gradient-like reductions: calls and payload bytes in a step."""

    calls: int
    bytes: int
    found: tuple[Collective, ...]


@dataclass(frozen=True)
class DomainProof:
    """Whether tensor x expert traffic stays inside a domain; guilty: (collective, its groups that span domains).

    `mixed` are larger collectives whose groups run along tensor or expert *and* another axis and span domains: their
    tensor x expert parts stay inside a domain, their bytes do not.
    """

    holds: bool
    guilty: tuple[tuple[Collective, Groups], ...]
    mixed: tuple[Collective, ...]


def read_collectives(program: Program, domain: np.ndarray, links: Links) -> tuple[Collective, ...]:
    """All collectives that run; `domain`: int [data, pipe, tensor, seq, expert], the domain of each device in order.

    Raises ValueError when the program has more partitions than the mesh has devices.
    """
    if program.partitions > domain.size:
        raise ValueError(f"the program runs on {program.partitions} devices, the mesh has {domain.size}")
    mesh, branches = _MeshCoordinates(domain), _branches(program)
    return tuple(_collective(program, found, mesh, links, branches) for found in _find(program))


def unread_collectives(program: Program) -> tuple[Unknown, ...]:
    """Asynchronous collectives whose end is not in the same computation: their overlap is unknown."""
    return tuple(
        Unknown("an asynchronous collective ends outside its computation", f"{one.computation.name}: {one.start.name}")
        for one in _find(program)
        if one.start.phase == "start" and not one.between_known
    )


def gradient_reductions(
    collectives: Iterable[Collective], batch_axes: Sequence[str], least: int = MIN_GRADIENT_SIZE
) -> Reductions:
    """All-reduces and reduce-scatters that add floats over a batch axis, of `least` elements or more."""
    found = tuple(
        one
        for one in collectives
        if one.kind in ("all-reduce", "reduce-scatter")
        and set(one.axes) & set(batch_axes)
        and one.reduction == "add"
        and one.elements >= least
        and all(dtype.startswith(("f", "bf")) for dtype in one.dtypes)
    )
    return Reductions(sum(one.calls for one in found), sum(one.calls * one.payload for one in found), found)


def prove_tight(
    collectives: Iterable[Collective], domain: np.ndarray, tight: Sequence[str] = TIGHT, least: int = MIN_GRADIENT_SIZE
) -> DomainProof:
    """Check for each group that members which differ only along `tight` axes share a domain."""
    mesh = _MeshCoordinates(domain)
    guilty, mixed = [], []
    for one in collectives:
        if not set(one.axes) & set(tight):
            continue
        spanning = tuple(group for group in one.groups if mesh.spans_domains(group, tight))
        if spanning:
            guilty.append((one, spanning))
        elif one.crosses and one.elements >= least:
            mixed.append(one)
    return DomainProof(not guilty, tuple(guilty), tuple(mixed))


def coverage(collectives: Iterable[Collective]) -> dict[Link, float]:
    """Link -> share of the transfer time that matmul work covers; a link without traffic is left out."""
    total: dict[Link, float] = {}
    hidden: dict[Link, float] = {}
    for one in collectives:
        seconds = one.calls * one.seconds
        total[one.link] = total.get(one.link, 0.0) + seconds
        hidden[one.link] = hidden.get(one.link, 0.0) + seconds * one.covered
    return {link: hidden[link] / seconds for link, seconds in total.items() if seconds > 0}


class _MeshCoordinates:
    """Mesh coordinates and domain of each partition."""

    def __init__(self, domain: np.ndarray) -> None:
        self.sizes = domain.shape
        self.domain = domain.ravel()
        self.coordinates = np.stack(np.unravel_index(np.arange(domain.size), domain.shape), axis=1)

    def axes(self, groups: Groups) -> tuple[str, ...]:
        """Axes along which the members of some group differ."""
        moves = np.zeros(len(self.sizes), dtype=bool)
        for group in groups:
            members = self.coordinates[list(group)]
            moves |= (members != members[0]).any(axis=0)
        return tuple(axis for axis, moved in zip(AXES, moves, strict=True) if moved)

    def exact(self, groups: Groups, axes: tuple[str, ...]) -> bool:
        """Whether each group is every device along `axes` with the other coordinates fixed."""
        size = int(np.prod([self.sizes[AXES.index(axis)] for axis in axes], dtype=int))
        return all(len(set(group)) == size and set(self.axes((group,))) <= set(axes) for group in groups)

    def spread(self, group: Sequence[int]) -> tuple[int, int]:
        """(number of domains of a group, fewest members in one of them)."""
        _, members = np.unique(self.domain[list(group)], return_counts=True)
        return len(members), int(members.min())

    def spans_domains(self, group: Sequence[int], tight: Sequence[str]) -> bool:
        """Whether members that differ only along `tight` are in several domains."""
        loose = [i for i, axis in enumerate(AXES) if axis not in tight]
        seen: dict[tuple[int, ...], int] = {}
        for member in group:
            home = tuple(int(n) for n in self.coordinates[member, loose])
            if seen.setdefault(home, int(self.domain[member])) != self.domain[member]:
                return True
        return False


@dataclass(frozen=True)
class _Found:
    """A collective in the program: the scheduled instruction, the one with the groups, and the work before its end."""

    computation: Computation
    start: Instruction
    inner_computation: Computation
    inner: Instruction
    between: tuple[Instruction, ...]
    between_known: bool


def _find(program: Program) -> Iterator[_Found]:
    """Every collective once: in line, as a start and done pair, or wrapped in a fusion or an async computation."""
    wrapped = {name for _, one in program.instructions() if _wraps(one) for name in one.runs}
    for computation in program.computations.values():
        if not program.executions[computation.name] or computation.name in wrapped:
            continue
        for i, one in enumerate(computation.instructions):
            if one.phase in ("done", "update"):
                continue
            if one.kind in COLLECTIVES:
                yield _Found(computation, one, computation, one, *_between(computation, i))
            elif _wraps(one):
                for inner_computation, inner in _inside(program, one):
                    yield _Found(computation, one, inner_computation, inner, *_between(computation, i))


def _wraps(one: Instruction) -> bool:
    return one.kind in ("fusion", "async")


def _inside(program: Program, one: Instruction) -> Iterator[tuple[Computation, Instruction]]:
    for name, _ in program.callees(one):
        computation = program.computations[name]
        for inner in computation.instructions:
            if inner.kind in COLLECTIVES and inner.phase != "done":
                yield computation, inner
            elif inner.runs:
                yield from _inside(program, inner)


def _between(computation: Computation, i: int) -> tuple[tuple[Instruction, ...], bool]:
    """Instructions scheduled between a start and its done, and whether the done was found."""
    start = computation.instructions[i]
    if start.phase != "start":
        return (), True
    alive = {start.name}
    for j in range(i + 1, len(computation.instructions)):
        one = computation.instructions[j]
        if alive & set(one.operands):
            if one.phase == "done":
                return computation.instructions[i + 1 : j], True
            if one.phase == "update":
                alive.add(one.name)
    return (), False


def _branches(program: Program) -> set[str]:
    """Computations that run only if a conditional takes their branch."""
    always = program.count(lambda _, one, __: one.opcode != "conditional")
    return {name for name, times in program.executions.items() if times and not always[name]}


def _collective(
    program: Program, found: _Found, mesh: _MeshCoordinates, links: Links, branches: set[str]
) -> Collective:
    inner, operands = found.inner, found.inner_computation.operands(found.inner)
    if inner.kind == "ragged-all-to-all":
        operands = operands[:1]
    shapes = [shape for operand in operands for shape in operand.shapes]
    listed = inner.pairs if inner.kind == "collective-permute" else inner.groups(program.partitions)
    groups = tuple(group for group in listed if len(set(group)) > 1)
    size = max((len(group) for group in groups), default=1)
    payload = sum(shape.bytes for shape in shapes) * (size if inner.kind == "all-gather" else 1)
    spread = [mesh.spread(group) for group in groups]
    domains = max((count for count, _ in spread), default=1)
    fewest = min((members for count, members in spread if count == domains), default=1)
    bytes_sent, seconds = _transfer(inner.kind, payload, size, domains, fewest, links)
    asynchronous = found.start.phase == "start" and not found.start.is_sync
    flops = sum(instruction_flops(program, found.computation, one) for one in found.between) if asynchronous else 0
    axes, named = mesh.axes(groups), _named(found)
    permute = inner.kind == "collective-permute"
    return Collective(
        name=found.start.name,
        kind=inner.kind,
        computation=found.computation.name,
        op_name=named.op_name,
        stack=named.stack,
        dtypes=tuple(sorted({shape.dtype for shape in shapes})),
        elements=sum(shape.elements for shape in shapes),
        payload=payload,
        bytes_sent=bytes_sent,
        calls=program.executions[found.computation.name],
        groups=groups,
        axes=axes,
        exact=len(axes) <= 1 if permute else mesh.exact(groups, axes),
        domains=domains,
        asynchronous=asynchronous,
        flops_between=flops,
        seconds=seconds,
        hidden_seconds=flops / links.peak,
        conditional=found.computation.name in branches,
        reduction=_reduction(program, inner),
        spmd="is_spmd_generated" in inner.attributes.get("frontend_attributes", ""),
    )


def _named(found: _Found) -> Instruction:
    """The collective, or the nearest operation before it that has a name if the compiler lost the collective's."""
    one = found.inner if found.inner.stack else found.start
    for _ in range(_NEAR):
        before = found.computation.operands(one)[:1]
        if one.stack or not before:
            break
        one = before[0]
    return one if one.stack else found.inner


def _transfer(kind: str, payload: int, size: int, domains: int, fewest: int, links: Links) -> tuple[int, float]:
    """Bytes that a device sends over the limiting link, and seconds; members of a domain share the network link."""
    rounds = 2 if kind == "all-reduce" else 1
    if size == 1:
        return 0, 0.0
    if kind in ("collective-permute", "collective-broadcast"):
        return payload, payload / (links.network if domains > 1 else links.fast)
    inside = rounds * payload * (size - 1) / size
    if domains == 1:
        return round(inside), inside / links.fast
    across = rounds * payload * (domains - 1) / domains
    if "all-to-all" not in kind:
        across /= fewest
    return round(across), max(across / links.network, (inside / links.fast if fewest > 1 else 0.0))


def _reduction(program: Program, one: Instruction) -> str:
    """The opcode that combines two values, '' for a kind that does not reduce."""
    name = one.attributes.get("to_apply", "").lstrip("%")
    return program.computations[name].root.opcode if name in program.computations else ""
