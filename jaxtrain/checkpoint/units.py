"""Which process writes which shards to the disk of its node, and which nodes hold them: pure functions.

A *unit* is a part of the state that the same processes hold, as one file. In each node that holds it, one of its
processes writes it from its own devices. Where fewer nodes than 1 + peers hold it, further nodes fetch a copy. With
data-parallel replicas in several nodes (DDP, HSDP) the copies are there already, and nothing is sent.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

Index = tuple[tuple[int, int], ...]
"""Begin and end of a shard in each dimension of its leaf."""
Held = tuple[int, str, int]
"""A file on a disk: step, token of the save, unit."""


class Shard(NamedTuple):
    """A distinct part of one leaf of the state."""

    path: str
    where: Index
    dtype: str
    bytes: int


class Unit(NamedTuple):
    """Shards in one file."""

    number: int
    shards: tuple[Shard, ...]
    holders: tuple[int, ...]
    """Processes whose devices hold these shards."""
    writers: dict[int, int]
    """Node -> the process there that writes the file from its devices."""
    copies: dict[int, int]
    """Node -> the process there that fetches the file, where fewer nodes than wanted hold the shards."""

    @property
    def bytes(self) -> int:
        """Bytes of the shards."""
        return sum(shard.bytes for shard in self.shards)

    @property
    def keepers(self) -> dict[int, int]:
        """Node -> the process that answers for its file."""
        return {**self.copies, **self.writers}


class TierBytes(NamedTuple):
    """Bytes of one save: on the fullest node, of shards of its own and of copies; sent by all nodes together."""

    own: int
    copies: int
    sent: int
    total: int
    """Written by all nodes together."""


class Choice(NamedTuple):
    """The save to restore, and for each unit the processes whose node holds its file."""

    step: int
    token: str
    sources: dict[int, list[int]]


def plan_units(
    leaves: Mapping[str, Any], process_of: Callable[[Any], int], nodes: Sequence[int], peers: int
) -> list[Unit]:
    """The units of a state; `leaves`: path -> what has shape, dtype and sharding; `nodes`: the node of each process."""
    ranks_of: defaultdict[int, list[int]] = defaultdict(list)
    for rank, node in enumerate(nodes):
        ranks_of[node].append(rank)
    ordered = sorted(ranks_of)
    units: list[Unit] = []
    for holders, shards in sorted(_by_holders(leaves, process_of).items()):
        here: defaultdict[int, list[int]] = defaultdict(list)
        for rank in holders:
            here[nodes[rank]].append(rank)
        first = ordered.index(min(here))
        others = [node for node in ordered[first:] + ordered[:first] if node not in here]
        wanted = max(min(1 + peers, len(ordered)) - len(here), 0)
        # All processes of a node that hold the shards write at the same time.
        for turn, part in enumerate(_split(shards, min(map(len, here.values())))):
            writers = {node: ranks[turn % len(ranks)] for node, ranks in here.items()}
            copies = {node: ranks_of[node][len(units) % len(ranks_of[node])] for node in others[:wanted]}
            units.append(Unit(len(units), part, holders, writers, copies))
    return units


def layout_hash(units: Sequence[Unit]) -> str:
    """Equal where mesh, shapes, number of processes and their nodes are: then every unit holds the same shards."""
    text = json.dumps([[unit.shards, unit.holders, sorted(unit.writers.items())] for unit in units])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def tier_bytes(units: Sequence[Unit]) -> TierBytes:
    """What one save writes."""
    own: defaultdict[int, int] = defaultdict(int)
    copies: defaultdict[int, int] = defaultdict(int)
    for unit in units:
        for node in unit.writers:
            own[node] += unit.bytes
        for node in unit.copies:
            copies[node] += unit.bytes
    fullest = max({*own, *copies}, key=lambda node: own[node] + copies[node])
    sent = sum(copies.values())
    return TierBytes(own[fullest], copies[fullest], sent, sum(own.values()) + sent)


def choose(
    held: Sequence[Collection[Held]], units: int, newer_than: int, without: Collection[tuple[int, str]] = ()
) -> Choice | None:
    """The newest save of a step after `newer_than` of which every unit is on some disk, None where there is none.

    `held`: what each process found, in order of rank. Units of two saves of one step are never mixed.
    """
    sources: defaultdict[tuple[int, str], defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, files in enumerate(held):
        for step, token, unit in files:
            sources[step, token][unit].append(rank)
    complete = [
        save for save, found in sources.items() if save[0] > newer_than and save not in without and len(found) == units
    ]
    if not complete:
        return None
    step, token = max(complete)
    return Choice(step, token, dict(sources[step, token]))


def normal_index(index: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
    """The index of a shard as begin and end of each dimension."""
    return tuple(
        (part.start or 0, size if part.stop is None else part.stop) for part, size in zip(index, shape, strict=True)
    )


def _by_holders(leaves: Mapping[str, Any], process_of: Callable[[Any], int]) -> dict[tuple[int, ...], list[Shard]]:
    """Processes -> the distinct shards that exactly these hold, in order of leaves."""
    found: defaultdict[tuple[int, ...], list[Shard]] = defaultdict(list)
    for path, leaf in leaves.items():
        holders: defaultdict[Index, set[int]] = defaultdict(set)
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
            holders[normal_index(index, leaf.shape)].add(process_of(device))
        for index, ranks in sorted(holders.items()):
            size = math.prod(end - begin for begin, end in index) * leaf.dtype.itemsize
            found[tuple(sorted(ranks))].append(Shard(path, index, str(leaf.dtype), size))
    return found


def _split(shards: Sequence[Shard], parts: int) -> list[tuple[Shard, ...]]:
    """Shards in at most `parts` groups of about the same size, each in the order given."""
    groups: list[list[int]] = [[] for _ in range(parts)]
    sizes = [0] * parts
    for number in sorted(range(len(shards)), key=lambda i: -shards[i].bytes):
        lightest = sizes.index(min(sizes))
        groups[lightest].append(number)
        sizes[lightest] += shards[number].bytes
    return [tuple(shards[i] for i in sorted(group)) for group in groups if group]
