"""A run opened for reading: its weights on a mesh that fits this machine, its own tokenizer, no corpus."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint import CheckpointReader
from jaxtrain.checkpoint.order import CheckpointOrder
from jaxtrain.config import AXES, ConfigError, MeshConfig, RunConfig, load_config, replace
from jaxtrain.config.load import RUN_FILE
from jaxtrain.data import TextTokenizer
from jaxtrain.train.agreement import agree_on_start
from jaxtrain.train.resolve import Bound, bind
from jaxtrain.train.run_dir import tokenizer_of_run

Say = Callable[[str], None]


@dataclass(frozen=True)
class Opened:
    """A run restored from its newest intact checkpoint; `meta` is the record beside the weights."""

    setup: Bound
    tokenizer: TextTokenizer
    params: Any
    step: int
    meta: dict[str, Any]


def say(line: str) -> None:
    """Print a line on stderr, in process 0 only: stdout is for the verb's result."""
    if jax.process_index() == 0:
        print(f"jaxtrain: {line}", file=sys.stderr, flush=True)


def open_run(directory: Path, overrides: Sequence[str] = (), log: Say = say) -> Opened:
    """Restore a run's weights on this machine's devices; overrides such as mesh.data=-1 change its settings.

    Where the run's mesh does not fit the devices here, another one is chosen and `log` is told. Raises ConfigError
    where the directory is not a run, or has no intact checkpoint.
    """
    config = run_config(directory, overrides)
    agree_on_start(config, read=directory)
    setup = bind_here(config, overrides, log)
    order = CheckpointOrder(setup)
    found = CheckpointReader(directory / "checkpoints").restore(order.params_layout, subset=True)
    if found is None:
        raise ConfigError(f"{directory} has no checkpoint yet: train it first")
    tokenizer = tokenizer_of_run(directory, config, found.meta["tokenizer"])
    return Opened(setup, tokenizer, order.params_from_checkpoint(found.state), found.step, found.meta)


def run_config(directory: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of a run directory; raises ConfigError where it is none."""
    if not (directory / RUN_FILE).is_file():
        raise ConfigError(
            f"{directory} is not a run (it has no {RUN_FILE}): name the --run directory of a training run"
        )
    return load_config(directory / RUN_FILE, overrides, hints=False)


def bind_here(config: RunConfig, overrides: Sequence[str] = (), log: Say = say) -> Bound:
    """A run's configuration on the devices of this job, for reading; where its mesh does not fit them, on another mesh.

    A mesh that `overrides` name is taken as it is. Raises ConfigError where no mesh fits, with the reason why that of
    the run does not.
    """
    try:
        return bind(config)
    except ConfigError as error:
        if any(override.startswith("mesh.") for override in overrides):
            raise
        reason = error
    for changed, devices in _candidates(config):
        try:
            found = bind(changed, devices)
        except ConfigError:
            continue
        log(
            f"the run's mesh ({_show(config.mesh.sizes)}) does not fit here ({str(reason).partition(chr(10))[0]}); "
            f"read on mesh {_show(found.topology.sizes)} of {found.mesh.size} devices (--mesh.AXIS N chooses another)"
        )
        return found
    raise reason


def _candidates(config: RunConfig) -> Iterator[tuple[RunConfig, Sequence[Any] | None]]:
    """Configurations of other meshes and their devices (None: all), first those that keep most of the run's mesh."""
    everything = jax.devices()
    # A mesh must hold devices of every process; alone, a process may leave some of its own idle.
    counts = range(len(everything), 0, -1) if jax.process_count() == 1 else [len(everything)]
    # The kernel may belong to the card that trained.
    for backend in dict.fromkeys((config.attention.backend, "auto")):
        for count in counts:
            devices = None if count == len(everything) else everything[:count]
            for mesh in dict.fromkeys(_meshes(config.mesh, count)):
                fixed = dict(zip(AXES, mesh, strict=True))
                yield replace(config, *_overrides(config, fixed), f"attention.backend={backend}"), devices


def _meshes(mesh: MeshConfig, count: int) -> Iterator[tuple[int, ...]]:
    """Sizes (data, pipe, tensor, seq, expert) for a number of devices."""
    sizes = {axis: max(size, 1) for axis, size in mesh.sizes.items()}
    for pipe, seq in ((sizes["pipe"], sizes["seq"]), (1, sizes["seq"]), (1, 1)):
        inner = pipe * sizes["tensor"] * seq * sizes["expert"]
        if count % inner == 0:
            yield count // inner, pipe, sizes["tensor"], seq, sizes["expert"]
    tensor = math.gcd(sizes["tensor"], count)
    expert = math.gcd(sizes["expert"], count // tensor)
    yield count // tensor // expert, 1, tensor, 1, expert
    yield count, 1, 1, 1, 1


def _overrides(config: RunConfig, mesh: dict[Any, int]) -> list[str]:
    """What changes with the mesh: the microbatch of a replica stays as large as it was, or less."""
    replicas = mesh["data"] * mesh["expert"]
    batch, largest = config.train.global_batch, _microbatch(config)
    share = max(batch // replicas, 1)
    microbatch = max((m for m in range(1, min(largest, share) + 1) if share % m == 0), default=1)
    return [
        *(f"mesh.{axis}={size}" for axis, size in mesh.items()),
        "cluster.domain_size=null", "cluster.devices_per_node=null", "cluster.nodes=null",
        f"train.microbatch={microbatch}", "train.accumulation=null", "pipeline.microbatches=null", "data.schedule=[]",
        *(["pipeline.chunks=null", "pipeline.stages=auto"] if mesh["pipe"] != config.mesh.pipe else []),
    ]  # fmt: skip


def _microbatch(config: RunConfig) -> int:
    """Sequences of a microbatch on one replica of the run's own mesh, as far as its settings say."""
    train = config.train
    if train.microbatch is not None:
        return train.microbatch
    replicas = max(config.mesh.data, 1) * max(config.mesh.expert, 1)
    microbatches = train.accumulation or config.pipeline.microbatches or 1
    return max(train.global_batch // (replicas * microbatches), 1)


def _show(sizes: dict[Any, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size != 1) or "data 1"
