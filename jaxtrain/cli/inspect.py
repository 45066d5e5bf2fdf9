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
    """Show how a configuration is sharded over a mesh, whose devices need not exist, or what a checkpoint holds."""

    config: Config
    """YAML file, name of a shipped configuration, a run directory, or a checkpoint (RUN/checkpoints/STEP)."""
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
        if Path(self.config).name.isdecimal() and Path(self.config).is_dir():
            return self._show_checkpoint()
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

    def _show_checkpoint(self) -> int:
        from jaxtrain.checkpoint import inspect_checkpoint
        from jaxtrain.report.tables import FittedTable, format_bytes

        found = inspect_checkpoint(Path(self.config))
        if self.json:
            print_json(found)
        else:
            rows = [
                (
                    path,
                    entry["array"],
                    format_bytes(entry["bytes"]),
                    "-" if entry["norm"] is None else f"{entry['norm']:.6g}",
                    "holds" if entry["intact"] else entry.get("error", "altered bytes"),
                )
                for path, entry in found["arrays"].items()
            ]
            verdict = "every digest holds" if found["intact"] else "DAMAGED"
            title = f"checkpoint of step {found['step']}: {format_bytes(found['bytes'])}, {verdict}"
            console = Console()
            console.print(FittedTable(("array", "shape", "bytes", "norm", "digest"), rows, title))
            console.print_json(data={key: value for key, value in found["meta"].items() if key != "config"})
        return 0 if found["intact"] else 1

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
