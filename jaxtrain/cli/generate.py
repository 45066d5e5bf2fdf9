"""`jaxtrain generate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic.dataclasses import dataclass

from jaxtrain.cli.verb import VERB, Positional, Verb


@dataclass(frozen=True, config=VERB)
class Generate(Verb):
    """Continue a prompt with the newest checkpoint of a run, up to the end that the model draws."""

    run: Annotated[Path, Positional("RUN")]
    """Run directory."""
    prompt: str
    """Text to continue."""
    tokens: int = 96
    """Tokens to add; prompt and added tokens must fit in data.seq_len. Default 96."""
    temperature: float = 0.7
    """Softmax temperature; 0 is greedy. Default 0.7."""
    seed: int = 0
    """Seed of sampling."""
    chat: bool = False
    """The prompt is a user's turn in the template of the run's chat source; print the answer alone."""
    special: bool = False
    """Names of special tokens in the prompt are special tokens; otherwise they are text."""
    coordinator: str | None = None
    """HOST:PORT on which process 0 listens; with --processes and --process-id, this process joins a job by hand."""
    processes: int | None = None
    """Processes of the job."""
    process_id: int | None = None
    """Rank of this process, from 0."""

    example: ClassVar[str] = 'jaxtrain generate runs/tiny --prompt "def " --tokens 40'

    def process(self) -> tuple[str | None, int | None, int | None]:
        """Arguments of `launch.distributed.join`."""
        return self.coordinator, self.processes, self.process_id

    def __call__(self, overrides: Sequence[str]) -> int:
        """Restore, sample, print in one process."""
        import jax

        from jaxtrain.train.use import generate

        drawn = self.tokens, self.temperature, self.seed
        text = generate(self.run, self.prompt, *drawn, overrides, self.chat, self.special)
        if jax.process_index() == 0:
            print(text)
        return 0
