"""`jaxtrain eval`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic.dataclasses import dataclass

from jaxtrain.cli.output import print_json
from jaxtrain.cli.verb import VERB, Positional, Verb


@dataclass(frozen=True, config=VERB)
class Eval(Verb):
    """Compute the loss of the newest checkpoint of a run on its held-out documents."""

    run: Annotated[Path, Positional("RUN")]
    """Run directory."""
    coordinator: str | None = None
    """HOST:PORT on which process 0 listens; with --processes and --process-id, this process joins a job by hand."""
    processes: int | None = None
    """Processes of the job."""
    process_id: int | None = None
    """Rank of this process, from 0."""
    json: bool = False
    """Print one JSON object on stdout."""

    example: ClassVar[str] = "jaxtrain eval runs/tiny --mesh.data -1"

    def process(self) -> tuple[str | None, int | None, int | None]:
        """Arguments of `launch.distributed.join`."""
        return self.coordinator, self.processes, self.process_id

    def __call__(self, overrides: Sequence[str]) -> int:
        """Restore, evaluate, print in one process."""
        import jax

        from jaxtrain.train.use import evaluate

        found = evaluate(self.run, overrides)
        if jax.process_index():
            return 0
        if self.json:
            print_json(found)
        else:
            print(
                f"step {found['step']}: held-out loss {found['eval_loss']:.4f} over {found['scored_tokens']:,} tokens"
            )
        return 0
