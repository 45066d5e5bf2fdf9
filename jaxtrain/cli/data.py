"""`jaxtrain data`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from pydantic.dataclasses import dataclass
from rich.console import Console

from jaxtrain.cli.output import print_json
from jaxtrain.cli.verb import VERB, Config, Verb
from jaxtrain.config import load_config


@dataclass(frozen=True, config=VERB)
class Data(Verb):
    """Show what a run will read: batches as text, fill rate, lengths, shares of the sources, speed of the loader."""

    config: Config
    """YAML file, name of a shipped configuration, or a run directory."""
    batches: int = 2
    """Batches shown as text, one colour per document. Default 2."""
    picture: Path | None = None
    """Write a histogram of document lengths to this file (.png, .svg or .pdf)."""
    html: Path | None = None
    """Write the output as an HTML page to this file."""
    json: bool = False
    """Print the numbers as one JSON object on stdout."""

    example: ClassVar[str] = "jaxtrain data tiny --batches 1 --picture lengths.png"

    def __call__(self, overrides: Sequence[str]) -> int:
        """Read, measure, print."""
        from jaxtrain.data.preview import preview, write_html

        seen = preview(load_config(self.config, overrides), self.batches)
        if self.json:
            print_json(seen.to_json())
        else:
            Console().print(seen.render())
        for path in (
            self.picture and seen.draw(self.picture),
            self.html and write_html([seen.render()], self.html),
        ):
            if path and not self.json:
                Console().print(f"written: {path}")
        return 0
