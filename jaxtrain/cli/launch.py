"""`jaxtrain launch`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

from pydantic.dataclasses import dataclass

from jaxtrain.cli.train import Train, default_run
from jaxtrain.cli.verb import VERB, Config, Verb, run_verb
from jaxtrain.config import ConfigError, load_config
from jaxtrain.launch.watchdog import Limits
from jaxtrain.observe.events import record_event


@dataclass(frozen=True, config=VERB)
class Launch(Verb):
    """Train a run in several processes on this machine, or join one process by hand or under Slurm."""

    config: Config
    """YAML file, name of a shipped configuration, or a run directory, which is resumed."""
    run: Path | None = None
    """Run directory; default runs/CONFIG, or CONFIG if that is a run directory."""
    processes: int | None = None
    """Processes to start here; with --process-id, processes of the whole job."""
    devices_per_process: int | None = None
    """Devices of each process started here; default all that it sees."""
    coordinator: str | None = None
    """HOST:PORT on which process 0 listens; with --processes and --process-id, this process joins the job by hand."""
    process_id: int | None = None
    """Rank of this process, from 0; no other process is started then."""
    restarts: int = 10
    """Restarts after failures that may follow each other without progress; 0: a failure ends the job. Default 10."""
    grace: float = 120.0
    """Seconds to save and exit after a signal to the launcher; a second signal ends all at once. Default 120."""

    example: ClassVar[str] = "jaxtrain launch tiny --processes 2 --devices-per-process 2 --mesh.data 4"

    def __call__(self, overrides: Sequence[str]) -> int:
        """Start the processes and wait for them; the first failure ends the others."""
        from jaxtrain.launch.distributed import under_scheduler
        from jaxtrain.launch.local import launch

        directory = self.run or default_run(self.config)
        by_hand = self.process_id is not None or self.coordinator is not None
        if by_hand or (self.processes is None and under_scheduler()):
            verb = Train(self.config, directory, self.coordinator, self.processes, self.process_id)
            return run_verb(verb, overrides)
        if self.processes is None:
            raise ConfigError("launch needs --processes N, the number of processes to start on this machine")
        if self.restarts < 0 or self.grace < 0:
            raise ConfigError(f"--restarts {self.restarts} --grace {self.grace:g}: use numbers from 0")
        config = load_config(self.config, overrides)
        command = [sys.executable, "-m", "jaxtrain", "train", self.config, "--run", str(directory)]
        command += [f"--{override}" for override in overrides]
        return launch(
            command, self.processes, self.devices_per_process, grace=self.grace, restarts=self.restarts,
            limits=Limits(config.watchdog.factor, config.watchdog.floors), record=partial(record_event, directory),
            newest_checkpoint=partial(newest_checkpoint, directory),
        )  # fmt: skip


def newest_checkpoint(directory: Path) -> int:
    """The newest committed step of a run directory, -1 without one; a save in progress has another name."""
    try:
        return max((int(name) for name in os.listdir(directory / "checkpoints") if name.isdecimal()), default=-1)
    except OSError:
        return -1
