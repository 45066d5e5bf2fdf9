"""Spikes of loss and gradient norm, by a rule that the compiled step applies: a spike changes nothing.

The history holds the newest guard.window values of applied steps, oldest first. It travels with the state under the key
GUARD, and checkpoints keep it in their metadata: the rule may be switched on and off between two starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.config import GuardConfig

GUARD = "guard"
"""Part of the state in memory that holds the history: float32 "loss" and "norm" [window], int32 "count"."""
LEAST = 0.01
"""The deviation counts as at least this share of the median: a flat curve has no spikes of rounding size."""

History = dict[str, jax.Array]


def new_history(config: GuardConfig, mesh: Mesh, stored: Mapping[str, Any]) -> dict[str, History]:
    """{GUARD: history} on all devices, as `stored` in a checkpoint or empty; {} where guard.spike is null."""
    if config.spike is None:
        return {}
    values: dict[str, np.ndarray] = {"count": np.zeros((), np.int32)}
    for name in ("loss", "norm"):
        newest = np.asarray(stored.get(name, ()), np.float32)[-config.window :]
        values[name] = np.concatenate([np.zeros(config.window - len(newest), np.float32), newest])
        values["count"] = np.asarray(len(newest), np.int32)
    replicated = NamedSharding(mesh, PartitionSpec())
    return {
        GUARD: {
            name: jax.make_array_from_callback(value.shape, replicated, value.__getitem__)
            for name, value in values.items()
        }
    }


def abstract_history(config: GuardConfig, mesh: Mesh) -> dict[str, Any]:
    """Shapes and shardings of `new_history`."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), new_history(config, mesh, {})
    )


def stored_history(history: History) -> dict[str, list[float]]:
    """The history as JSON, exactly."""
    values = jax.device_get(history)
    first = len(values["loss"]) - int(values["count"])
    return {name: values[name][first:].tolist() for name in ("loss", "norm")}


def is_spike(config: GuardConfig, history: History, loss: jax.Array, norm: jax.Array) -> jax.Array:
    """Whether loss or norm exceeds median + guard.spike x deviation of a full history, a bool scalar.

    The deviation is the median absolute deviation, at least LEAST x the median.
    """
    assert config.spike is not None, "there is a history only where guard.spike is set"
    factor = config.spike

    def limit(values: jax.Array) -> jax.Array:
        median = jnp.median(values)
        deviation = jnp.maximum(jnp.median(jnp.abs(values - median)), LEAST * jnp.abs(median))
        return median + factor * deviation

    above = (loss > limit(history["loss"])) | (norm > limit(history["norm"]))
    return above & (history["count"] == config.window)


def next_history(history: History, loss: jax.Array, norm: jax.Array, applied: jax.Array) -> History:
    """The history after a step."""
    new = {
        "count": jnp.minimum(history["count"] + 1, history["loss"].shape[0]),
        "loss": jnp.append(history["loss"][1:], loss),
        "norm": jnp.append(history["norm"][1:], norm),
    }
    return {name: jnp.where(applied, value, history[name]) for name, value in new.items()}
