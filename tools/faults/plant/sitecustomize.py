"""Faults inside a trainer, planted by PYTHONPATH in the user's own command; imported by Python at its start.

JAXTRAIN_FAULT is JSON: `what` (a key of FAULTS), `step` (the n-th train step of this process, or of the loader's
thread), `rank` (default all), `once` (a file: a fault that has happened does not happen again), `pause` (seconds that
every step takes longer, so that a signal meets a step). The file of `once` holds the time of the injection.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

PLAN: dict[str, Any] = json.loads(os.environ.get("JAXTRAIN_FAULT", "{}"))


def claim() -> bool:
    """Whether this process may inject the fault now; writes the time of the injection."""
    try:
        handle = os.open(PLAN["once"], os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return False
    os.write(handle, json.dumps({"time": time.time(), "pid": os.getpid()}).encode())
    os.close(handle)
    return True


def mine() -> bool:
    import jax

    return PLAN.get("rank", jax.process_index()) == jax.process_index()


def fail(state: Any) -> Any:
    raise RuntimeError("planted: an exception in one rank")


def hang(state: Any) -> Any:
    while True:
        time.sleep(3600)


def hang_native(state: Any) -> Any:
    import ctypes

    while True:
        ctypes.PyDLL(None).pause()  # holds the GIL: no other thread of Python runs


def vanish(state: Any) -> Any:
    os._exit(0)


def crash(state: Any) -> Any:
    import ctypes

    return ctypes.string_at(0)


def die(state: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(state: Any) -> Any:
    os.kill(os.getpid(), signal.SIGSTOP)
    return state


def grow(state: Any) -> Any:
    blocks = []
    while True:
        blocks.append(bytearray(os.urandom(1) * (256 << 20)))


def flip(state: Any) -> Any:
    """One bit of one parameter, in the memory of this process's first device."""
    import jax
    import numpy as np

    path, leaves = "embed", state["params"]["embed"]
    name = next(iter(leaves))
    array = leaves[name]
    shards = [np.array(shard.data) for shard in array.addressable_shards]
    shards[0].view(np.uint32).reshape(-1)[7] ^= np.uint32(1 << 20)
    pieces = [jax.device_put(data, shard.device) for data, shard in zip(shards, array.addressable_shards, strict=True)]
    changed = jax.make_array_from_single_device_arrays(array.shape, array.sharding, pieces)
    return {**state, "params": {**state["params"], path: {**leaves, name: changed}}}


FAULTS = {
    "raise": fail, "hang": hang, "native": hang_native, "vanish": vanish, "crash": crash, "kill": die, "stop": stop,
    "memory": grow, "flip": flip,
}  # fmt: skip


def patch_steps(module: ModuleType) -> None:
    """Every train step goes through here: the pause, and the faults of the main thread."""
    real, count = module.PhaseSteps.train_step, 0

    def train_step(self: Any, state: Any, *rest: Any) -> Any:
        nonlocal count
        count += 1
        time.sleep(PLAN.get("pause", 0.0))
        if PLAN.get("what") in FAULTS and count == PLAN["step"] and mine() and (PLAN.get("always") or claim()):
            state = FAULTS[PLAN["what"]](state)
        if PLAN.get("what") == "straggle" and mine():
            time.sleep(PLAN["seconds"])
        return real(self, state, *rest)

    module.PhaseSteps.train_step = train_step


def patch_loader(module: ModuleType) -> None:
    """The thread that prepares batches hangs, or fails, at its n-th batch."""
    if PLAN.get("what") not in ("loader", "loader-raise"):
        return
    real, count = module.Stream._produce, 0

    def produce(self: Any) -> Any:
        nonlocal count
        count += 1
        if count == PLAN["step"] and mine() and claim():
            if PLAN["what"] == "loader-raise":
                raise OSError(5, "planted: Input/output error")
            hang(None)
        return real(self)

    module.Stream._produce = produce


def register_losses(module: ModuleType) -> None:
    """Losses that are not finite, or a thousandfold, on some batches; a metric that tells batches apart."""
    import jax.numpy as jnp

    def digest(inputs: Any) -> Any:
        """A sum of whole numbers below 2^24, which is exact in any order."""
        weights = 1 + inputs.batch["positions"] % 7
        return jnp.sum(jnp.where(inputs.scored, inputs.batch["labels"] * weights, 0))

    def poisoned(value: float, every: int, rest: int) -> Any:
        def loss(inputs: Any) -> Any:
            total, sums = module.cross_entropy_loss(inputs)
            # A factor, since the gradient of a branch that is not taken is NaN too.
            factor = jnp.where(digest(inputs) % every == rest, value, 1.0)
            return total * factor, {**sums, "loss": sums["loss"] * factor}

        return loss

    module.METRICS.register("batch_digest")(lambda inputs: digest(inputs).astype(jnp.float32))
    module.LOSSES.register("nan_in_some_batches")(poisoned(float("nan"), 5, 0))
    module.LOSSES.register("nan_in_every_batch")(poisoned(float("nan"), 1, 0))
    module.LOSSES.register("spikes")(poisoned(1e3, 13, 3))


PATCHES = {
    "jaxtrain.train.phase_steps": patch_steps, "jaxtrain.data.stream": patch_loader,
    "jaxtrain.train.losses": register_losses,
}  # fmt: skip


class Finder(importlib.abc.MetaPathFinder):
    """Patches a module right after it was imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in PATCHES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            PATCHES[name](module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if PLAN and Path(sys.executable).name.startswith("python"):
    sys.meta_path.insert(0, Finder())
