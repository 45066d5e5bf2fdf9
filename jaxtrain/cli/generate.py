"""`jaxtrain generate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic.dataclasses import dataclass

from jaxtrain.cli.verb import VERB, Positional, Verb


@dataclass(frozen=True, config=VERB)
class Generate(Verb):
    """Continue a prompt with the newest checkpoint of a run."""

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

    example: ClassVar[str] = 'jaxtrain generate runs/tiny --prompt "def " --tokens 40'

    def __call__(self, overrides: Sequence[str]) -> int:
        """Restore, sample, print."""
        from jaxtrain.train.use import generate

        print(generate(self.run, self.prompt, self.tokens, self.temperature, self.seed, overrides))
        return 0
