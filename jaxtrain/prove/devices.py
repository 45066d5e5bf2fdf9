"""Devices of a proof: those at hand where they are enough, else simulated ones on the CPU."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from jaxtrain.config import ConfigError
from jaxtrain.launch.process import enough_threads

# Independent collectives of one program may otherwise run in different order on different devices, and wait for ever.
FLAG = "--xla_cpu_enable_concurrency_optimized_scheduler=false"


def find_devices(count: int) -> list[Any]:
    """`count` of jax' devices, on the CPU where the accelerators are fewer; must come before jax' first use.

    Raises ConfigError where there are not as many.
    """
    if count < 1:
        raise ConfigError(f"--devices is {count}: at least 1")
    flags = os.environ.get("XLA_FLAGS", "")
    if FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {FLAG}".strip()
    enough_threads(count)
    import jax

    # Too late once the devices are made: then those that there are must do.
    with suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", max(count, jax.config.jax_num_cpu_devices))
    found = next((found for found in (jax.devices(), jax.devices("cpu")) if len(found) >= count), None)
    if found is None:
        raise ConfigError(f"--devices is {count}, jax has {len(jax.devices('cpu'))} already: ask for fewer")
    return found[:count]
