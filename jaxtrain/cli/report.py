"""`jaxtrain report`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic.dataclasses import dataclass
from rich.console import Console

from jaxtrain.cli.output import print_json
from jaxtrain.cli.verb import VERB, Positional, Verb


@dataclass(frozen=True, config=VERB)
class Report(Verb):
    """Show where the time of a run went (goodput), and its restarts with their causes, from its local files."""

    run: Annotated[Path, Positional("RUN")]
    """Run directory; the run may be training."""
    json: bool = False
    """Print one JSON object on stdout."""

    example: ClassVar[str] = "jaxtrain report runs/tiny"

    def __call__(self, overrides: Sequence[str]) -> int:
        """Read, print."""
        from jaxtrain.config import ConfigError
        from jaxtrain.observe.goodput import measure_goodput
        from jaxtrain.report.goodput import goodput_tables

        if overrides:
            raise ConfigError(f"report reads a run and takes no settings: leave out {', '.join(overrides)}")
        found = measure_goodput(self.run)
        if self.json:
            print_json(found.to_json())
            return 0
        for table in goodput_tables(found):
            Console().print(table)
        return 0
