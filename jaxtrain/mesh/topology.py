"""Devices -> fast domains -> the five-axis device array.

A *domain* is a set of devices joined by fast links: a node, or a rack of several nodes. How often data flows along a
mesh axis decides which axes may cross domains: pipe first, then data and seq, tensor and expert last.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, product
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxtrain.config import AXES, Axis, ClusterConfig, ConfigError, MeshConfig

# Axes whose groups must stay inside a domain, the innermost first.
TIGHT: tuple[Axis, ...] = ("tensor", "expert")
NODE_SIZE = 8


@dataclass(frozen=True)
class DescribedDevice:
    """A device of a described cluster: the attributes of a real one that ordering and plots read."""

    id: int
    process_index: int
    platform: str = "gpu"
    device_kind: str = "described"
    compute_capability: str | None = None


@dataclass(frozen=True)
class Topology:
    """Devices and the fast domain of each, both [data, pipe, tensor, seq, expert] arrays."""

    devices: np.ndarray
    domain: np.ndarray

    @property
    def sizes(self) -> dict[Axis, int]:
        """Axis -> size, in mesh order."""
        return dict(zip(AXES, self.devices.shape, strict=True))

    def mesh(self) -> Mesh:
        """The jax Mesh of these devices, every axis Auto; needs real devices."""
        return Mesh(self.devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))

    def crossings(self) -> dict[Axis, int]:
        """Axis -> most domains that one group of devices along this axis spans; 1 stays inside a domain."""
        return {axis: _domains_touched(self.domain, (axis,)) for axis in AXES}


def resolve_sizes(mesh: MeshConfig, n_devices: int) -> dict[Axis, int]:
    """Axis -> size with -1 filled in; raises ConfigError with the arithmetic when the product is not `n_devices`."""
    sizes = mesh.sizes
    free = [axis for axis in AXES if sizes[axis] == -1]
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if free and n_devices % fixed == 0:
        return sizes | {free[0]: n_devices // fixed}
    if not free and fixed == n_devices:
        return sizes
    terms = " x ".join(f"{axis} {sizes[axis]}" for axis in AXES if sizes[axis] != -1)
    if free:
        raise ConfigError(
            f"mesh.{free[0]} is -1 and takes the devices that remain, but mesh {terms} = {fixed} does not divide "
            f"{n_devices} devices: choose sizes whose product divides {n_devices}"
        )
    raise ConfigError(f"mesh {terms} = {fixed} devices, but there are {n_devices}: {_fix_sizes(sizes, n_devices)}")


def described_devices(
    cluster: ClusterConfig, n: int | None = None, compute_capability: str | None = None
) -> list[DescribedDevice]:
    """`n` devices (null: all) of the machine that `cluster` describes, node by node.

    Without cluster.devices_per_node, nodes of 8 are assumed where 8 divides `n`, else one node.
    """
    if n is None and cluster.nodes is None:
        raise ConfigError("cluster.nodes is null: set it, or say how many devices to describe")
    per_node = cluster.devices_per_node or (NODE_SIZE if n is None or n % NODE_SIZE == 0 else n)
    total = n if n is not None else (cluster.nodes or 1) * per_node
    kind = cluster.device or "described"
    return [
        DescribedDevice(id=i, process_index=i // per_node, device_kind=kind, compute_capability=compute_capability)
        for i in range(total)
    ]


def node_size(topology: Topology) -> int:
    """Devices of a node; where nodes differ, the most common number."""
    return Counter(device.process_index for device in topology.devices.ravel()).most_common(1)[0][1]


def build_topology(
    mesh: MeshConfig, cluster: ClusterConfig, devices: Sequence[Any] | None = None, hosts: Sequence[int] = ()
) -> Topology:
    """Place devices (null: all that jax finds) on the mesh, domain by domain; the order of `devices` does not matter.

    `hosts` is the host of each process where that is known: processes of one host are neighbours, in whatever order
    ranks were given to hosts. Raises ConfigError when the sizes' product is not the number of devices, domains are
    uneven, or the tensor x expert group of a (data, pipe) coordinate spans domains and mesh.allow_cross_domain does not
    allow it.
    """
    found = list(jax.devices() if devices is None else devices)
    sizes = resolve_sizes(mesh, len(found))
    domains = fast_domains(found, cluster, hosts)
    bound = tuple(axis for axis in TIGHT if axis not in mesh.allow_cross_domain)
    order = _physical_order(sizes, len(domains[0]), bound)
    flat = np.empty(len(found), dtype=object)
    flat[:] = [device for domain in domains for device in domain]
    number = np.repeat(np.arange(len(domains)), len(domains[0]))
    topology = Topology(flat[order], number[order])
    _refuse_cross_domain(topology, bound, domains)
    return topology


def fast_domains(devices: Sequence[Any], cluster: ClusterConfig, hosts: Sequence[int] = ()) -> list[list[Any]]:
    """Devices grouped into equal fast domains: cluster.domain_size (or devices_per_node) each, else one a process.

    A domain holds whole processes or lies inside one; raises ConfigError for uneven domains, naming them.
    """
    ordered = sorted(devices, key=lambda d: (hosts[d.process_index] if hosts else 0, _host(d), d.process_index, d.id))
    processes = [list(group) for _, group in groupby(ordered, key=lambda d: d.process_index)]
    size = cluster.domain_size or cluster.devices_per_node
    if size is None:
        domains = processes
    else:
        domains = [ordered[i : i + size] for i in range(0, len(ordered), size)]
    counts = [len(domain) for domain in domains]
    if len(set(counts)) > 1:
        usual = max(set(counts), key=lambda count: (counts.count(count), count))
        odd = ", ".join(
            f"domain {i} (process {_processes(domain)}) has {len(domain)}"
            for i, domain in enumerate(domains)
            if len(domain) != usual
        )
        raise ConfigError(
            f"uneven domains: {len(ordered)} devices in domains of {usual}, but {odd}: use the same number of devices "
            f"in each, or set cluster.domain_size (now {cluster.domain_size}) to a divisor of {len(ordered)}"
        )
    for i, domain in enumerate(domains):
        members = {d.process_index for d in domain}
        outside = sum(d.process_index in members for d in ordered) - len(domain)
        if outside and len(members) > 1:
            raise ConfigError(
                f"cluster.domain_size {size} splits a process: domain {i} holds a part of processes "
                f"{_processes(domain)}; use a multiple or a divisor of the {len(processes[0])} devices a process has"
            )
    return domains


def cross_domain_groups(
    domain: np.ndarray, axes: tuple[Axis, ...] = TIGHT
) -> list[tuple[dict[Axis, int], dict[int, np.ndarray]]]:
    """Groups along `axes` of a five-axis array of domain numbers that span several domains.

    Each is (coordinates on the other axes, {domain: flat indices into the array of the members there}).
    """
    fixed = [axis for axis in AXES if axis not in axes]
    rows = np.moveaxis(domain, [AXES.index(axis) for axis in fixed], range(len(fixed)))
    index = np.moveaxis(np.arange(domain.size).reshape(domain.shape), [AXES.index(a) for a in fixed], range(len(fixed)))
    found = []
    for coordinate in product(*(range(n) for n in rows.shape[: len(fixed)])):
        members, where = rows[coordinate].ravel(), index[coordinate].ravel()
        touched = np.unique(members)
        if len(touched) > 1:
            found.append((dict(zip(fixed, coordinate, strict=True)), {int(d): where[members == d] for d in touched}))
    return found


def _physical_order(sizes: dict[Axis, int], domain_size: int, bound: tuple[Axis, ...]) -> np.ndarray:
    """Five-axis array of positions in domain order: [data, pipe, data in a domain, seq, expert, tensor], last fastest.

    As many replicas as fill a domain share it; whole replicas follow each other, so that with one group a node stage s
    of replica r is on node r x pipe + s. Groups that must stay inside a domain are innermost.
    """
    inner = ("seq", *(axis for axis in reversed(TIGHT) if axis not in bound), *reversed(bound))
    block = math.prod(sizes[axis] for axis in inner)
    near = math.gcd(sizes["data"], domain_size // block) if domain_size % block == 0 else 1
    extent = [sizes["data"] // near, sizes["pipe"], near, *(sizes[axis] for axis in inner)]
    positions = np.moveaxis(np.arange(math.prod(extent)).reshape(extent), 2, 1)
    merged = positions.reshape(sizes["data"], *positions.shape[2:])
    nest: tuple[str, ...] = ("data", "pipe", *inner)
    return merged.transpose([nest.index(axis) for axis in AXES])


def _domains_touched(domain: np.ndarray, axes: tuple[Axis, ...]) -> int:
    groups = np.moveaxis(domain, [AXES.index(axis) for axis in axes], range(-len(axes), 0))
    groups = np.sort(groups.reshape(-1, math.prod(domain.shape[AXES.index(axis)] for axis in axes)), axis=1)
    return int((np.diff(groups, axis=1) != 0).sum(axis=1).max() + 1)


def _refuse_cross_domain(topology: Topology, bound: tuple[Axis, ...], domains: list[list[Any]]) -> None:
    if not bound or _domains_touched(topology.domain, bound) == 1:
        return
    groups = cross_domain_groups(topology.domain, bound)
    coordinate, members = groups[0]
    flat, sizes, size = topology.devices.ravel(), topology.sizes, len(domains[0])
    group = " x ".join(f"{axis} {sizes[axis]}" for axis in bound)
    extent = math.prod(sizes[axis] for axis in bound)
    parts = "\n".join(
        f"  domain {d} (process {_processes(domains[d])}): {len(where)} devices, ids {_ids(flat[where])}"
        for d, where in members.items()
    )
    at = ", ".join(f"{axis} {i}" for axis, i in coordinate.items())
    raise ConfigError(
        f"the {group} group at ({at}) spans {len(members)} fast domains, "
        f"{' + '.join(str(len(w)) for w in members.values())} devices ({len(groups)} groups span domains; "
        f"{len(domains)} domains of {size} devices):\n{parts}\n"
        f"choose sizes whose product ({extent}) divides the {size} devices of a domain"
        f" ({' x '.join('mesh.' + axis for axis in bound)}), set cluster.domain_size if more devices share fast "
        f"links, or accept the cost with mesh.allow_cross_domain: [{', '.join(_would_help(sizes, size, bound))}]"
    )


def _would_help(sizes: dict[Axis, int], domain_size: int, bound: tuple[Axis, ...]) -> list[str]:
    """The fewest axes that must be allowed across domains so that the rest fits, the expert axis first."""
    for axis in ("expert", "tensor"):
        rest = [other for other in bound if other != axis]
        if axis in bound and domain_size % math.prod(sizes[other] for other in rest) == 0:
            return sorted({axis, *(a for a in TIGHT if a not in bound)})
    return list(TIGHT)


def _fix_sizes(sizes: dict[Axis, int], n_devices: int) -> str:
    for axis in AXES:
        rest = math.prod(size for other, size in sizes.items() if other != axis)
        if n_devices % rest == 0:
            return f"set mesh.{axis} to {n_devices // rest} (= {n_devices} / {rest}) or to -1"
    return f"choose sizes whose product is {n_devices}"


def _host(device: Any) -> int:
    # Some backends report which processes share fast links, even where a scheduler assigned ranks cyclically.
    known = (getattr(device, name, None) for name in ("partition_index", "slice_index"))
    return next((index for index in known if index is not None), 0)


def _processes(domain: list[Any]) -> str:
    return _ranges(sorted({d.process_index for d in domain}))


def _ids(devices: np.ndarray) -> str:
    return _ranges(sorted(d.id for d in devices))


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> '0-2, 5'."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
