"""`jaxtrain tokenize`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic.dataclasses import dataclass

from jaxtrain.cli.output import print_counts
from jaxtrain.cli.verb import VERB, Config, Verb
from jaxtrain.config import load_config


@dataclass(frozen=True, config=VERB)
class Tokenize(Verb):
    """Write the sources of a configuration as token shards. The same command again continues after a kill."""

    config: Config
    """YAML file, name of a shipped configuration, or a run directory."""
    out: Path
    """Folder of the shards, with tokens.json and tokenizer.json; a source names it as tokens or arrayrecord."""
    format: Literal["bin", "arrayrecord"] = "bin"
    """bin (default; .bin and .idx as in Megatron, read by memory map) or arrayrecord."""
    workers: int | None = None
    """Worker processes; default one per core."""
    json: bool = False
    """Print the counts as one JSON object on stdout."""

    example: ClassVar[str] = "jaxtrain tokenize tiny --out tokens"

    def __call__(self, overrides: Sequence[str]) -> int:
        """Write the shards, print the counts."""
        from jaxtrain.data.tokenize import tokenize

        config = load_config(self.config, overrides)
        counts = tokenize(config, self.out, self.format, self.workers or os.cpu_count() or 1)
        print_counts(counts, self.json)
        return 0
