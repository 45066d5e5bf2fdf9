"""`jaxtrain import-hf`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic.dataclasses import dataclass

from jaxtrain.cli.output import print_counts
from jaxtrain.cli.verb import VERB, Positional, Verb


@dataclass(frozen=True, config=VERB)
class ImportHf(Verb):
    """Make a run at step 0 from a Hugging Face folder. train, eval and generate continue from it."""

    directory: Annotated[Path, Positional("DIR")]
    """Folder with config.json and safetensors files."""
    run: Annotated[Path, Positional("RUN")]
    """Run directory to make."""
    config: str | None = None
    """YAML file, or the name of a shipped configuration, for all sections but model."""
    ignore: tuple[str, ...] = ()
    """Keys of config.json to ignore though the family does not know them: they must not change the model."""
    coordinator: str | None = None
    """HOST:PORT on which process 0 listens; with --processes and --process-id, this process joins a job by hand."""
    processes: int | None = None
    """Processes of the job."""
    process_id: int | None = None
    """Rank of this process, from 0."""
    json: bool = False
    """Print one JSON object on stdout."""

    example: ClassVar[str] = "jaxtrain import-hf ./Llama-3.1-8B runs/llama --config llama3_8b"

    def process(self) -> tuple[str | None, int | None, int | None]:
        """Arguments of `launch.distributed.join`."""
        return self.coordinator, self.processes, self.process_id

    def __call__(self, overrides: Sequence[str]) -> int:
        """Read the folder, write the run, print counts in one process."""
        import jax

        from jaxtrain.hub.runs import import_run

        counts = import_run(self.directory, self.run, self.config, overrides, self.ignore)
        if jax.process_index() == 0:
            print_counts(counts, self.json)
        return 0
