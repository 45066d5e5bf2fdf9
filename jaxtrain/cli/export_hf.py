"""`jaxtrain export-hf`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic.dataclasses import dataclass

from jaxtrain.cli.output import print_counts
from jaxtrain.cli.verb import VERB, Positional, Verb


@dataclass(frozen=True, config=VERB)
class ExportHf(Verb):
    """Write the newest checkpoint of a run as a Hugging Face folder."""

    run: Annotated[Path, Positional("RUN")]
    """Run directory."""
    directory: Annotated[Path, Positional("DIR")]
    """Folder to make."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of every tensor. Default float32, which is exact."""
    max_shard_gb: float = 5.0
    """Size of the largest safetensors file, in GB (10^9 bytes). Default 5."""
    family: str | None = None
    """model_type of the hub; default that of the import, else the first family that can express the model."""
    coordinator: str | None = None
    """HOST:PORT on which process 0 listens; with --processes and --process-id, this process joins a job by hand."""
    processes: int | None = None
    """Processes of the job."""
    process_id: int | None = None
    """Rank of this process, from 0."""
    json: bool = False
    """Print one JSON object on stdout."""

    example: ClassVar[str] = "jaxtrain export-hf runs/tiny ./tiny-hf --dtype bfloat16"

    def process(self) -> tuple[str | None, int | None, int | None]:
        """Arguments of `launch.distributed.join`."""
        return self.coordinator, self.processes, self.process_id

    def __call__(self, overrides: Sequence[str]) -> int:
        """Restore, write, print counts in one process."""
        import jax

        from jaxtrain.hub.runs import export_run

        options = (self.dtype, self.max_shard_gb, self.family)
        counts = export_run(self.run, self.directory, *options, overrides)
        if jax.process_index() == 0:
            print_counts(counts, self.json)
        return 0
