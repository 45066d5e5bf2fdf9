"""What verbs print on stdout."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console


def print_counts(counts: dict[str, Any], as_json: bool) -> None:
    """One line per count, or one JSON object."""
    if as_json:
        print_json(counts)
        return
    for name, value in counts.items():
        text = f"{value:,}" if isinstance(value, int) else str(value)
        Console().print(f"{name.replace('_', ' ')}: {text}")


def print_json(value: dict[str, Any]) -> None:
    """One JSON object on one line."""
    print(json.dumps(value, default=str))
