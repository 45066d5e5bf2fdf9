"""Replay: a step is computed twice from the same state and batch, and every device's results are compared bit by bit.

What it finds, before the step is saved: a device whose second result differs from its first, and a device whose bits of
an array differ from those of the devices that hold the same part (replicas), before the step or after it. An error
inside the backward pass spreads through reductions: then many devices differ, and the message names them all.
What it does not find: a flipped bit, between two replays, of an array of which each part is on one device only (ZeRO-3
shards). Both computations start from it. Nor does it find what a nondeterministic program of the compiler hides: on
GPUs set xla.xla_gpu_deterministic_ops.
"""

from __future__ import annotations

import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxtrain.checkpoint.digest import device_digests, flatten_state
from jaxtrain.config import CorruptionError
from jaxtrain.launch.coordination import exchange, process_name
from jaxtrain.train.state import TrainState
from jaxtrain.train.step import Batch

Metrics = dict[str, jax.Array]
Digests = dict[int, tuple[int, ...]]
WAIT_S = 3600.0
"""Seconds that the processes may differ in reaching a replay."""
NAMED = 8
"""Findings that a message lists."""


class Replay:
    """A train step that compares its results; `program` must not donate its arguments."""

    def __init__(self, program: Callable[..., tuple[TrainState, Metrics]], every: int) -> None:
        self._program, self._every = program, every

    def due(self, step: int) -> bool:
        """Whether this step is replayed."""
        return step % self._every == 0

    def __call__(self, state: TrainState, batch: Batch, step: int) -> tuple[TrainState, Metrics]:
        """One step, computed twice; every process must call it.

        Raises CorruptionError naming devices, hosts and leaves that differ. At most two states are held at a time.
        """
        before = device_digests(state)
        first = device_digests(self._computed(state, batch))
        after = self._program(state, batch)
        tree = _joined(*after)
        everywhere: list[Digests] = [{}, {}, {}]
        for tables in exchange("replay", [before, first, device_digests(tree)], WAIT_S):
            for table, here in zip(everywhere, tables, strict=True):
                table |= {int(device): tuple(values) for device, values in here.items()}
        found = [
            *(f"{name}, before the step, differs from its replicas on {where}" for name, where in
              differing_replicas(state, everywhere[0])),
            *(f"{name}, computed twice, differs on {where}" for name, where in
              differing_replays(tree, everywhere[1], everywhere[2])),
            *(f"{name}, after the step, differs from its replicas on {where}" for name, where in
              differing_replicas(tree, everywhere[2])),
        ]  # fmt: skip
        if found:
            more = f"\n  and {len(found) - NAMED} more" if len(found) > NAMED else ""
            raise CorruptionError(
                f"step {step} is not saved, its bits differ (guard.replay_every {self._every}):\n  "
                + "\n  ".join(found[:NAMED]) + more
                + "\nthe same command resumes from the newest checkpoint; replace a device that is named again"
            )  # fmt: skip
        return after

    def _computed(self, state: TrainState, batch: Batch) -> dict[str, Any]:
        return _joined(*self._program(state, batch))


def differing_replicas(tree: Any, digests: Digests) -> Iterator[tuple[str, str]]:
    """(path, devices) of each leaf that a device holds with other bits than most devices that hold the same part.

    Where no value has a majority, all holders are named.
    """
    for number, (path, leaf) in enumerate(flatten_state(tree).items()):
        parts = defaultdict(list)
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
            parts[str(index)].append(device)
        for devices in parts.values():
            counts = Counter(digests[device.id][number] for device in devices)
            value, most = counts.most_common(1)[0]
            if most < len(devices):
                odd = [d for d in devices if 2 * most <= len(devices) or digests[d.id][number] != value]
                yield path, _show(odd)


def differing_replays(tree: Any, first: Digests, second: Digests) -> Iterator[tuple[str, str]]:
    """(path, devices) of each leaf whose two computations gave other bits."""
    for number, (path, leaf) in enumerate(flatten_state(tree).items()):
        odd = [d for d in leaf.sharding.mesh.devices.ravel() if first[d.id][number] != second[d.id][number]]
        if odd:
            yield path, _show(odd)


def _joined(state: TrainState, metrics: Metrics) -> dict[str, Any]:
    return {**state, "metrics": metrics}


def _show(devices: list[jax.Device]) -> str:
    """'device 5 of process 1 (node1 pid 77)', for each device."""
    processes = defaultdict(list)
    for device in devices:
        processes[device.process_index].append(str(device.id))
    alone = jax.process_count() == 1
    return ", ".join(
        f"device{'s' * (len(ids) > 1)} {', '.join(ids)} of {socket.gethostname() if alone else process_name(rank)}"
        for rank, ids in processes.items()
    )
