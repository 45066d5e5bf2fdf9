"""The table of layouts that `verify` tries, in the syntax of `--layouts`.

A layout is a list of items `axis=size` and `section.key=value`. Mesh axes that are not named have size 1, except that
data takes the remaining devices. A layout without a `rules` item uses the preset `tensor` if the tensor axis is larger
than 1, else `ddp`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtrain.config import AXES, ConfigError, RunConfig, replace, to_tree, validate
from jaxtrain.mesh.topology import build_topology
from jaxtrain.train.resolve import resolve

FILE = "file"
"""Name of the configuration's own layout."""

DENSE = (
    "data=1, train.accumulation=4, remat.policy=full",
    "data=-1",
    "data=-1, train.accumulation=2",
    "data=4, train.accumulation=4",
    "data=-1, rules.preset=[zero1], train.accumulation=2",
    "data=-1, rules.preset=[zero2]",
    "data=4, rules.preset=[zero2], train.accumulation=4",
    "data=-1, rules.preset=[fsdp]",
    "data=4, rules.preset=[fsdp], train.accumulation=4, remat.policy=full",
    "data=2, tensor=4, rules.preset=[hybrid_fsdp]",
    "tensor=2, rules.preset=[tensor]",
    "tensor=4, rules.preset=[tensor], train.accumulation=2",
    "data=1, tensor=4, rules.preset=[tensor]",
    "tensor=8, rules.preset=[tensor]",
    "tensor=4, rules.preset=[tensor_sequence]",
    "tensor=2, rules.preset=[zero1,tensor_sequence], train.accumulation=4",
    "tensor=2, rules.preset=[zero2,tensor], train.accumulation=4, remat.policy=dots",
    "tensor=2, rules.preset=[fsdp,tensor], train.accumulation=2, remat.policy=full, remat.every=2",
    "data=2, tensor=2, rules.preset=[fsdp,tensor_sequence], train.accumulation=4",
    "data=2, remat.policy=dots",
    "data=2, rules.preset=[zero2], train.accumulation=2, remat.policy=offload",
    "data=2, remat.policy=names, remat.names=[qkv,mlp_hidden]",
    "data=2, data.packing=first_fit",
    "data=2, data.packing=best_fit, rules.preset=[fsdp]",
    "data=2, data.packing=concat, train.accumulation=2",
    "data=2, data.packing=none, train.global_batch=64, train.accumulation=2",
)
ATTENTION_LAYOUTS = (
    "data=2, attention.backend=xla",
    "data=2, attention.backend=tokamax",
    "data=2, attention.backend=cudnn",
)
SEQUENCE = (
    "seq=2",
    "data=1, seq=8",
    "seq=4, attention.context_parallel=all_gather",
    "seq=2, attention.context_parallel=ulysses",
    "seq=2, rules.preset=[zero2], train.accumulation=2, remat.policy=full",
    "tensor=2, seq=2, rules.preset=[fsdp,tensor_sequence]",
    "tensor=2, seq=2, attention.context_parallel=ulysses, train.accumulation=2",
)
PIPELINE = (
    # Pipeline alone, with 1 to 4 times as many microbatches as stages.
    "data=1, pipe=2, pipeline.schedule=gpipe, train.accumulation=2",
    "data=1, pipe=4, train.accumulation=4, remat.policy=full",
    "data=1, pipe=2, pipeline.schedule=zero_bubble, pipeline.chunks=2, train.accumulation=8",
    "data=1, pipe=4, pipeline.schedule=interleaved, train.accumulation=16",
    # With sharded state.
    "pipe=4, pipeline.schedule=gpipe, rules.preset=[zero2], train.accumulation=8",
    "pipe=2, rules.preset=[fsdp], train.accumulation=4, remat.policy=full, remat.every=2",
    "pipe=4, pipeline.schedule=zero_bubble, rules.preset=[zero1], train.accumulation=8, remat.policy=dots",
    "pipe=4, pipeline.schedule=zero_bubble, pipeline.chunks=2, rules.preset=[fsdp], train.accumulation=4",
    "pipe=2, tensor=2, pipeline.schedule=interleaved, rules.preset=[hybrid_fsdp], train.accumulation=2",
    # With tensor parallelism, and numbers of microbatches that the stages do not divide.
    "pipe=4, tensor=2, rules.preset=[tensor], train.global_batch=24, train.accumulation=6",
    "pipe=4, tensor=2, pipeline.schedule=interleaved, rules.preset=[zero1,tensor_sequence], train.accumulation=8,"
    " remat.policy=offload",
    "pipe=2, tensor=2, pipeline.schedule=zero_bubble, pipeline.chunks=2, rules.preset=[zero2,tensor_sequence],"
    " train.global_batch=18, train.accumulation=3",
    "pipe=2, tensor=4, pipeline.schedule=gpipe, rules.preset=[tensor_sequence], train.accumulation=8",
    # With context parallelism.
    "pipe=2, seq=2, rules.preset=[zero2], train.accumulation=4, remat.policy=names, remat.names=[qkv,attention_out]",
    "pipe=4, seq=2, pipeline.schedule=zero_bubble, train.accumulation=8, remat.policy=full, remat.every=2",
    "pipe=2, seq=4, attention.context_parallel=all_gather, pipeline.schedule=interleaved, train.accumulation=4",
    "pipe=2, tensor=2, seq=2, attention.context_parallel=ulysses, pipeline.schedule=zero_bubble, train.accumulation=2",
    "pipe=2, tensor=2, seq=2, pipeline.schedule=interleaved, rules.preset=[tensor_sequence], train.accumulation=8",
    # Each packer; stages with different numbers of layers.
    "data=2, pipe=2, pipeline.stages=[5,3], data.packing=first_fit, train.accumulation=8",
    "data=2, pipe=2, pipeline.schedule=interleaved, pipeline.stages=[3,1,2,2], data.packing=best_fit,"
    " rules.preset=[zero1], train.accumulation=4",
    "data=2, pipe=4, pipeline.schedule=zero_bubble, pipeline.stages=[1,3,2,2], data.packing=concat,"
    " train.accumulation=4",
    "data=2, pipe=2, pipeline.schedule=gpipe, pipeline.chunks=2, data.packing=none, train.global_batch=64,"
    " train.accumulation=4",
)
EXPERTS = (
    "expert=2",
    "data=1, expert=8, train.accumulation=2",
    "expert=4, rules.preset=[zero2], train.accumulation=2",
    "expert=2, rules.preset=[fsdp], remat.policy=full",
    "tensor=2, expert=2, rules.preset=[fsdp,tensor]",
    "seq=2, expert=2, train.accumulation=2",
    "tensor=2, seq=2, expert=2, rules.preset=[tensor_sequence]",
    "pipe=2, expert=2, train.accumulation=4",
    "pipe=4, expert=2, pipeline.schedule=zero_bubble, train.accumulation=4",
    "pipe=2, seq=2, expert=2, pipeline.schedule=interleaved, train.accumulation=2",
    "pipe=2, tensor=2, expert=2, rules.preset=[tensor_sequence], train.global_batch=18, train.accumulation=3",
)
PRECISION = (
    "data=1",
    "data=1, train.accumulation=4, remat.policy=full",
    "data=4, rules.preset=[zero2], train.accumulation=4",
    "data=-1, rules.preset=[fsdp]",
    "data=4, rules.preset=[fsdp], train.accumulation=2, remat.policy=full",
    "tensor=4, rules.preset=[tensor], train.accumulation=2",
    "tensor=2, rules.preset=[zero2,tensor_sequence], train.accumulation=2, remat.policy=dots",
    "data=2, tensor=2, rules.preset=[fsdp,tensor_sequence]",
    "data=2, attention.backend=xla",
    "data=2, seq=4",
    "data=2, seq=2, attention.context_parallel=all_gather, rules.preset=[fsdp]",
    "tensor=2, seq=2, attention.context_parallel=ulysses",
    "pipe=4, train.accumulation=8",
    "pipe=2, rules.preset=[fsdp], train.accumulation=4, remat.policy=full",
    "pipe=2, tensor=2, pipeline.schedule=zero_bubble, rules.preset=[zero2,tensor_sequence], train.accumulation=4",
    *(EXPERTS[i] for i in (0, 2, 3, 4, 5, 7)),
)
"""What `verify --precision` tries: each way in which a gradient is accumulated or crosses devices."""


@dataclass(frozen=True)
class VerifyLayout:
    """A layout's name, configuration and number of devices."""

    name: str
    config: RunConfig
    devices: int


@dataclass(frozen=True)
class SkippedLayout:
    """A row of the table that does not apply to a model or to the devices, and the reason."""

    name: str
    reason: str


ALL = (*DENSE, *ATTENTION_LAYOUTS, *SEQUENCE, *PIPELINE, *EXPERTS)


def applicable_layouts(
    config: RunConfig, devices: Sequence[Any], table: Sequence[str] = ALL
) -> tuple[list[str], list[SkippedLayout]]:
    """The configuration's own layout and the applicable rows of the table, and the rows that are skipped.

    A row is skipped if `resolve` refuses it, before anything is compiled: attention backends that need a GPU, stages or
    heads that do not divide, experts without a mixture.
    """
    names, skipped = [FILE], []
    for name in table:
        try:
            if name in EXPERTS and not config.model.moe.experts:
                raise ConfigError("model.moe.experts is 0: the model has no experts to shard")
            layout = parse_layout(config, name, len(devices))
            topology = build_topology(layout.config.mesh, layout.config.cluster, devices[: layout.devices])
            resolve(layout.config, topology)
        except ConfigError as error:
            skipped.append(SkippedLayout(name, str(error)))
        else:
            names.append(name)
    return names, skipped


def listed_layouts(requested: str) -> list[str]:
    """The layouts listed in `--layouts`, separated by `;`. Raises ConfigError if none is listed."""
    names = [name.strip() for name in requested.split(";") if name.strip()]
    if not names:
        raise ConfigError(f"--layouts {requested!r} names no layout: use all, file, or 'data=2,tensor=2;tensor=4'")
    return names


def parse_layout(config: RunConfig, name: str, devices: int) -> VerifyLayout:
    """One layout of a shrunk configuration on at most `devices` devices; raises ConfigError if it is impossible."""
    layout = _file_layout(config, devices) if name == FILE else _listed_layout(config, name)
    sizes = layout.mesh.sizes
    needed = devices if -1 in sizes.values() else math.prod(sizes.values())
    if needed > devices:
        raise ConfigError(f"layout {name!r} takes {needed} devices, there are {devices}: raise --devices")
    return VerifyLayout(name, layout, needed)


def _file_layout(config: RunConfig, devices: int) -> RunConfig:
    """The configuration's own mesh, shrunk: each axis larger than 1 becomes 2, and data takes the remaining devices."""
    used = [axis for axis, size in config.mesh.sizes.items() if size != 1 and axis != "data"]
    rest = devices // 2 ** len(used) if config.mesh.data != 1 else 1
    if rest == 0:
        raise ConfigError(f"mesh axes {', '.join(used)} of 2 take {2 ** len(used)} devices, not {devices}")
    return replace(config, f"mesh.data={rest}", *(f"mesh.{axis}=2" for axis in used))


def _listed_layout(config: RunConfig, name: str) -> RunConfig:
    items = [item.strip() for item in re.split(r",(?![^\[]*\])", name)]
    malformed = [item for item in items if not re.fullmatch(r"[a-z_0-9.]+=.+", item)]
    if malformed:
        raise ConfigError(f"layout item {malformed[0]!r} is not axis=size or section.key=value")
    overrides = ["mesh." + item if item.partition("=")[0] in AXES else item for item in items]
    if not any(item.startswith("rules.") for item in overrides):
        has_tensor = any(item.startswith("mesh.tensor=") and item != "mesh.tensor=1" for item in overrides)
        overrides.append(f"rules.preset=[{'tensor' if has_tensor else 'ddp'}]")
    return replace(without_layout(config), *overrides)


def without_layout(config: RunConfig) -> RunConfig:
    """The configuration with one microbatch, nothing sharded and no rematerialisation."""
    tree = to_tree(config)
    sections = {name: tree[name] for name in ("model", "data", "precision", "optimizer", "eval")}
    rules = {"replicated_limit": config.rules.replicated_limit}
    return validate({**sections, "rules": rules, "train": {**tree["train"], "accumulation": 1}})
