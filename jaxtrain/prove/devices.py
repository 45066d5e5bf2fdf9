"""Devices for `verify`: the accelerators if there are enough of them, else simulated CPU devices."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from jaxtrain.config import ConfigError
from jaxtrain.launch.process import enough_threads

# With the concurrency-optimised scheduler, independent collectives of one program may run in a different order on each
# device and deadlock.
NO_CONCURRENT_SCHEDULER = "--xla_cpu_enable_concurrency_optimized_scheduler=false"


def find_devices(count: int) -> list[Any]:
    """The first `count` JAX devices, on the CPU if there are fewer accelerators. Call it before JAX is first used.

    Raises ConfigError if there are fewer than `count` devices.
    """
    if count < 1:
        raise ConfigError(f"--devices is {count}: at least 1")
    flags = os.environ.get("XLA_FLAGS", "")
    if NO_CONCURRENT_SCHEDULER not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {NO_CONCURRENT_SCHEDULER}".strip()
    enough_threads(count)
    import jax

    # JAX raises if its devices exist already; then the existing ones are used.
    with suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", max(count, jax.config.jax_num_cpu_devices))
    found = next((found for found in (jax.devices(), jax.devices("cpu")) if len(found) >= count), None)
    if found is None:
        raise ConfigError(f"--devices is {count}, but JAX has only {len(jax.devices('cpu'))}: ask for fewer")
    return found[:count]
