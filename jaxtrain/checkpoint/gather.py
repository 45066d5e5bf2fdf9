"""What the processes of a job agree on when they save and restore, through the coordination service."""

from __future__ import annotations

import functools
from typing import Any

from jaxtrain.launch.coordination import combine, exchange, process_name


def gather_json(local: dict[str, Any]) -> dict[str, Any]:
    """Merge the dicts of all processes, nested dicts key by key; every process calls it and gets the same result.

    Raises ValueError if two processes have different values for a key.
    """
    return dict(combine("data position", local, lambda parts: functools.reduce(merge_nested, parts)))


def shared_reason(name: str, reason: str, timeout: float = 300.0) -> str:
    """This process's reason to give up, else that of the first process which has one; empty if none has.

    Every process calls it with the same `name`, after work that may last longer on one by `timeout` seconds.
    """
    reasons = exchange(name, reason, timeout)
    return reason or next((f"{text} (on {process_name(i)})" for i, text in enumerate(reasons) if text), "")


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
