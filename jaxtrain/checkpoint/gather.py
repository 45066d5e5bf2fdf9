"""Gather JSON from all processes and merge it on each of them."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def gather_json(local: dict[str, Any]) -> dict[str, Any]:
    """Merge the dicts of all processes, nested dicts key by key. A collective: every process gets the same result.

    Raises ValueError if two processes have different values for a key.
    """
    if jax.process_count() == 1:
        return local
    text = np.frombuffer(json.dumps(local).encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.int32(len(text)))
    padded = np.pad(text, (0, int(lengths.max()) - len(text)))
    texts = multihost_utils.process_allgather(padded)
    merged: dict[str, Any] = {}
    for encoded, length in zip(texts, lengths, strict=True):
        merged = merge_nested(merged, json.loads(encoded[:length].tobytes()))
    return merged


def merge_nested(left: dict[str, Any], right: dict[str, Any], path: str = "") -> dict[str, Any]:
    """The union of two nested dicts; raises ValueError naming a key that has two values."""
    merged = dict(left)
    for key, value in right.items():
        if key not in merged or merged[key] == value:
            merged[key] = value
        elif isinstance(merged[key], dict) and isinstance(value, dict):
            merged[key] = merge_nested(merged[key], value, f"{path}{key}/")
        else:
            raise ValueError(f"processes disagree on {path}{key}: {merged[key]!r} and {value!r}")
    return merged
