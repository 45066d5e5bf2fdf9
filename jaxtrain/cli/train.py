"""`jaxtrain train`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from pydantic.dataclasses import dataclass

from jaxtrain.cli.output import print_json
from jaxtrain.cli.verb import VERB, Config, Verb
from jaxtrain.config import ConfigError, is_run, load_config


@dataclass(frozen=True, config=VERB)
class Train(Verb):
    """Train a run to its last step. The same command again resumes it, and so does a run directory as CONFIG."""

    config: Config
    """YAML file, name of a shipped configuration, or a run directory, which is resumed."""
    run: Path | None = None
    """Run directory; default runs/CONFIG, or CONFIG if that is a run directory."""
    coordinator: str | None = None
    """HOST:PORT on which process 0 listens; with --processes and --process-id, this process joins the job by hand."""
    processes: int | None = None
    """Processes of the job."""
    process_id: int | None = None
    """Rank of this process, from 0."""
    from_: Path | None = None
    """Run, or RUN/checkpoints/STEP, whose weights a new run starts with; its own settings, length and mesh are free."""
    from_optimizer: bool = False
    """With --from: take over the optimizer's state too."""
    json: bool = False
    """Print the summary as one JSON object on stdout, in process 0 alone."""

    example: ClassVar[str] = "jaxtrain train tiny --run runs/short --train.steps 40"

    def process(self) -> tuple[str | None, int | None, int | None]:
        """Arguments of `launch.distributed.join`."""
        return self.coordinator, self.processes, self.process_id

    def __call__(self, overrides: Sequence[str]) -> int:
        """Train, print the summary."""
        import jax

        from jaxtrain.train.loop import train
        from jaxtrain.train.resume import Source

        if self.from_optimizer and self.from_ is None:
            raise ConfigError("--from-optimizer needs --from RUN, the run whose optimizer state is taken over")
        config = load_config(self.config, overrides)
        source = Source(self.from_, self.from_optimizer) if self.from_ else None
        result = train(config, self.run or default_run(self.config), quiet=self.json, source=source)
        if self.json and jax.process_index() == 0:
            print_json(result)
        return 0


def default_run(config: str) -> Path:
    """The run directory of a configuration: a run directory itself (or that of its config.yaml), else runs/CONFIG."""
    path = Path(config)
    if is_run(path):
        return path if path.is_dir() else path.parent
    return Path("runs") / path.stem
