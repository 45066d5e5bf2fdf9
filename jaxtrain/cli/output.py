"""What verbs print on stdout and write to files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from jaxtrain.config import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


def save_figure(figure: Figure, path: Path, option: str = "--picture") -> None:
    """Write a figure; raises ConfigError for a suffix that is no image format and for a file that cannot be written."""
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} {path} cannot be written ({error}): name a .png, .svg or .pdf file") from None


def save_text(text: str, path: Path, option: str) -> None:
    """Write a text file; raises ConfigError for a file that cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be written ({error}): name another file") from None
