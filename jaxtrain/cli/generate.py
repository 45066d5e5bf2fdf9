"""`jaxtrain generate`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic.dataclasses import dataclass

from jaxtrain.cli.verb import VERB, Positional, Verb
from jaxtrain.config import ConfigError


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
        from jaxtrain.train.use import continue_text, open_run

        if self.tokens < 1 or self.temperature < 0:
            raise ConfigError(
                f"--tokens {self.tokens} --temperature {self.temperature}: use at least 1 token and a temperature of "
                "at least 0"
            )
        opened = open_run(self.run, overrides)
        options = (self.prompt, self.tokens, self.temperature, self.seed)
        print(continue_text(opened.setup, opened.corpus, opened.params, *options))
        return 0
