"""The result of compiling for a cluster, as frozen dataclasses: for tables, pages, notebooks and tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxtrain.program.collectives import Collective, DomainProof, Reductions
from jaxtrain.program.low_precision import LowPrecisionMatmul
from jaxtrain.program.partitioner import Rematerialization
from jaxtrain.program.timeline import LayerTimeline

JSON_KEYS = {"bytes_sent": "wire", "inserted_resharding": "inventions"}
"""Fields whose key in the JSON output is an older name: keys of the output stay."""


@dataclass(frozen=True)
class LiveBuffer:
    """A buffer that is alive at the peak: bytes on a device, the operation and the source line that made it."""

    name: str
    bytes: int
    shape: str
    op_name: str
    source: str


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of one device during the step; `host` bytes are in host memory and not in `peak`.

    `card` is the memory of the card, None if the cluster does not give it. `exact` is False for the CPU compiler's
    figure. `live` are the bytes alive at the peak, `largest` the largest of these buffers; the rest of `peak` is unused
    space between buffers. `save` is the peak between steps, while a checkpoint is copied to host memory; `replay` that
    of a step that is computed twice (guard.replay_every), None where none is.
    """

    peak: int
    card: int | None
    host: int
    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    exact: bool
    live: int
    largest: tuple[LiveBuffer, ...]
    save: int
    replay: int | None

    @property
    def needed(self) -> int:
        """The largest of the peaks: step, save and replay."""
        return max(self.peak, self.save, self.replay or 0)

    @property
    def spare(self) -> int | None:
        """Bytes of the card that stay free at the largest peak, negative when it does not fit; None without a card."""
        return None if self.card is None else self.card - self.needed

    @property
    def fits(self) -> bool | None:
        """Whether the peak fits the card; None without a card."""
        return None if self.spare is None else self.spare >= 0


@dataclass(frozen=True)
class FlopsReport:
    """Matmul FLOPs of one step on one device: executed, and the model's by the formula of observe.flops.

    `opaque` are kernels whose work is not in the program: (name, calls), counted as 0; `in_kernels` are the model's
    FLOPs (full) of these kernels.
    """

    executed: int
    causal: float
    full: float
    in_kernels: float
    by_source: Mapping[str, int]
    opaque: tuple[tuple[str, int], ...]

    @property
    def ratio(self) -> float:
        """Executed / model FLOPs with every score counted (full), work in kernels left out on both sides."""
        return self.executed / (self.full - self.in_kernels)

    @property
    def recompute(self) -> float:
        """Share of the executed FLOPs beyond the model's (full): recomputation, and work that devices repeat."""
        return 1 - 1 / self.ratio if self.executed else 0.0


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind along the same axes: totals of one step on one device.

    `payload` are bytes of the arrays; `covered` is the share of `seconds` (at the published speed of the link) that
    overlaps with matmuls; `groups` are those of the largest collective, as partition numbers.
    """

    axes: str
    kind: str
    link: str
    asynchronous: bool
    calls: int
    payload: int
    bytes_sent: int
    seconds: float
    covered: float
    groups: tuple[tuple[int, ...], ...]
    sources: tuple[str, ...]


@dataclass(frozen=True)
class ProgramReport:
    """One configuration compiled for one cluster.

    `collectives` has each collective of the program, `traffic` their sums. `proof`: whether tensor and expert groups
    stay inside a domain. `unknown`: what the readers did not understand and did not count, (what, where). `local_tier`:
    bytes of a save on the local disk of a node, own and copies, those that all nodes send, and how many saves are kept;
    None without checkpoint.local. `low_precision`: the matmuls of precision.recipe.
    """

    config: Mapping[str, Any]
    cluster: str
    card: str
    target: str
    devices: int
    sizes: Mapping[str, int]
    domain: np.ndarray
    nodes: np.ndarray
    accumulation: int
    microbatch: int
    parameters: int
    memory: MemoryReport
    flops: FlopsReport
    traffic: tuple[Traffic, ...]
    collectives: tuple[Collective, ...]
    reductions: Reductions
    coverage: Mapping[str, float]
    inserted_resharding: tuple[Collective, ...]
    rematerializations: tuple[Rematerialization, ...]
    proof: DomainProof
    timelines: tuple[LayerTimeline, ...]
    trace_seconds: float
    compile_seconds: float
    options: Mapping[str, Any]
    version: str
    notes: tuple[str, ...]
    unknown: tuple[tuple[str, str], ...]
    local_tier: Mapping[str, int] | None = None
    low_precision: tuple[LowPrecisionMatmul, ...] = ()

    def link_bytes(self, link: str) -> int:
        """Bytes that one device sends over 'fast' or 'network' links in one step."""
        return sum(row.bytes_sent for row in self.traffic if row.link == link)

    def to_json(self) -> dict[str, Any]:
        """Python values, derived ones included."""
        tree: dict[str, Any] = _json_value(self)
        tree["memory"] |= {"spare": self.memory.spare, "fits": self.memory.fits}
        tree["flops"] |= {"ratio": self.flops.ratio, "recompute": self.flops.recompute}
        return tree


def _json_value(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            JSON_KEYS.get(field.name, field.name): _json_value(getattr(value, field.name))
            for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {str(key): _json_value(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(one) for one in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.item() if isinstance(value, np.generic) else value
