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
    json: bool = False
    """Print one JSON object on stdout."""

    example: ClassVar[str] = "jaxtrain eval runs/tiny --mesh.data -1"

    def __call__(self, overrides: Sequence[str]) -> int:
        """Restore, evaluate, print."""
        from jaxtrain.train.step import jit_evaluate
        from jaxtrain.train.use import held_out, mean_loss, open_run

        opened = open_run(self.run, overrides)
        batches = held_out(opened.setup, opened.corpus)
        loss, scored = mean_loss(jit_evaluate(opened.setup.step), opened.params, batches)
        if self.json:
            print_json({"step": opened.step, "eval_loss": loss, "scored_tokens": scored})
        else:
            print(f"step {opened.step}: held-out loss {loss:.4f} over {scored:,} tokens")
        return 0
