"""`jaxtrain inspect`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic.dataclasses import dataclass
from rich.console import Console

from jaxtrain.cli.output import print_json, save_figure, save_text
from jaxtrain.cli.verb import VERB, Config, Verb
from jaxtrain.config import ConfigError, load_config


@dataclass(frozen=True, config=VERB)
class Inspect(Verb):
    """Show how a configuration is sharded over a mesh. The devices need not exist."""

    config: Config
    """YAML file, name of a shipped configuration, or a run directory."""
    devices: int | None = None
    """Number of devices; default those of --cluster, or of this machine."""
    cluster: str | None = None
    """A described cluster, such as h100_8x8 (configs/clusters)."""
    diff: tuple[str, ...] = ()
    """Overrides to compare with, such as rules.mlp=null."""
    schedule: bool = False
    """Show the schedule of the pipeline instead: work of each stage, bubble, memory."""
    schedule_svg: Path | None = None
    """Write a plot of the schedule to this SVG file."""
    picture: Path | None = None
    """Write a plot of the devices and their mesh coordinates to this file (.png, .svg or .pdf)."""
    json: bool = False
    """Print one JSON object on stdout."""

    example: ClassVar[str] = "jaxtrain inspect llama3_8b --cluster h100_8x8 --diff rules.preset=[fsdp]"

    def __call__(self, overrides: Sequence[str]) -> int:
        """Print the tables."""
        if self.schedule or self.schedule_svg:
            return self._show_schedule(overrides)
        from jaxtrain.inspect import inspect

        before = inspect(load_config(self.config, overrides), self.devices, self.cluster)
        shown: Any = before.diff(*self.diff) if self.diff else before
        if self.picture:
            save_figure(before.plot_mesh(), self.picture)
        if self.json:
            print_json(shown.to_json())
        else:
            shown.print(Console())
        return 0

    def _show_schedule(self, overrides: Sequence[str]) -> int:
        from jaxtrain.inspect import inspect_schedule

        if self.diff or self.picture:
            raise ConfigError("--diff and --picture show layouts: leave them out beside --schedule")
        schedule = inspect_schedule(load_config(self.config, overrides), self.devices, self.cluster)
        if self.schedule_svg:
            save_text(schedule.svg(), self.schedule_svg, "--schedule-svg")
        if self.json:
            print_json(schedule.to_json())
        else:
            schedule.print(Console())
        return 0
