"""The verbs of corpora and of the hub, and how verbs print what they counted."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console
from tyro.conf import Positional, arg

from jaxtrain.config import load_config


@dataclasses.dataclass(frozen=True)
class Tokenize:
    """Write the sources of a configuration as token shards; the same command again goes on after a kill."""

    config: Positional[Annotated[str, arg(metavar="CONFIG")]]
    """YAML file, or the name of a shipped one."""
    out: Path
    """Folder of the shards, with tokens.json and tokenizer.json; name it as a source's tokens or arrayrecord."""
    format: Literal["bin", "arrayrecord"] = "bin"
    """Megatron's .bin/.idx, mapped as it lies, or ArrayRecord."""
    workers: int | None = None
    """Processes; default one a core."""
    json: bool = False
    """Print the counts as one JSON object on stdout."""

    def __call__(self, overrides: Sequence[str]) -> int:
        """Write the shards, print the counts."""
        from jaxtrain.data.tokenize import tokenize

        counts = tokenize(
            load_config(self.config, overrides), self.out, self.format, self.workers or os.cpu_count() or 1
        )
        print_counts(counts, self.json)
        return 0


@dataclasses.dataclass(frozen=True)
class Data:
    """Show what a run will read: batches as text, fill rate, lengths, shares of the sources, speed of the pipeline."""

    config: Positional[Annotated[str, arg(metavar="CONFIG")]]
    """YAML file, or the name of a shipped one."""
    batches: int = 2
    """First batches shown as text, a colour a document."""
    picture: Path | None = None
    """Draw the histogram of document lengths (.png, .svg or .pdf)."""
    html: Path | None = None
    """Write what is shown as an HTML page."""
    json: bool = False
    """Print the numbers as one JSON object on stdout."""

    def __call__(self, overrides: Sequence[str]) -> int:
        """Read, measure, print."""
        from jaxtrain.data.preview import preview, write_html

        seen = preview(load_config(self.config, overrides), self.batches)
        if self.json:
            print_json(seen.to_json())
        else:
            Console().print(seen.render())
        for path in (
            self.picture and seen.draw(self.picture),
            self.html and write_html([seen.render()], self.html),
        ):
            if path and not self.json:
                Console().print(f"written: {path}")
        return 0


@dataclasses.dataclass(frozen=True)
class ImportHf:
    """Make a run of a Hugging Face folder, before its first update: train, eval and generate go on from there."""

    directory: Positional[Annotated[Path, arg(metavar="DIR")]]
    """Folder with config.json and safetensors."""
    run: Positional[Annotated[Path, arg(metavar="RUN")]]
    """Run directory to make."""
    config: str | None = None
    """YAML file, or the name of a shipped one, for all but the model: data, optimizer, mesh."""
    ignore: tuple[str, ...] = ()
    """Keys of config.json that change nothing of the model though its family does not know them."""
    json: bool = False
    """Print one JSON object on stdout."""

    def __call__(self, overrides: Sequence[str]) -> int:
        """Join the job, read, write the run."""

        def body() -> dict[str, Any]:
            from jaxtrain.hub.runs import import_run

            return import_run(self.directory, self.run, self.config, overrides, self.ignore)

        return counted(body, self.json)


@dataclasses.dataclass(frozen=True)
class ExportHf:
    """Write a run's newest checkpoint as a Hugging Face folder."""

    run: Positional[Annotated[Path, arg(metavar="RUN")]]
    """Run directory."""
    directory: Positional[Annotated[Path, arg(metavar="DIR")]]
    """Folder to make."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of every tensor; float32 loses nothing."""
    max_shard_gb: float = 5.0
    """Largest safetensors file, in GB (10^9 bytes)."""
    family: str | None = None
    """The hub's model_type; default that of the import, else the first that can say the model."""
    json: bool = False
    """Print one JSON object on stdout."""

    def __call__(self, overrides: Sequence[str]) -> int:
        """Join the job, restore, write."""

        def body() -> dict[str, Any]:
            from jaxtrain.hub.runs import export_run

            at = (self.run, self.directory, self.dtype, self.max_shard_gb, self.family)
            return export_run(*at, overrides)

        return counted(body, self.json)


def counted(body: Callable[[], dict[str, Any]], as_json: bool) -> int:
    """Join the job, run `body` in every process, print its counts in one."""
    from jaxtrain.launch.distributed import guard, join

    def main() -> int:
        import jax

        counts = body()
        if jax.process_index() == 0:
            print_counts(counts, as_json)
        return 0

    join()
    return guard(main)


def print_counts(counts: dict[str, Any], as_json: bool) -> None:
    """A line a count, or one JSON object."""
    if as_json:
        print_json(counts)
        return
    for name, value in counts.items():
        text = f"{value:,}" if isinstance(value, int) else str(value)
        Console().print(f"{name.replace('_', ' ')}: {text}")


def print_json(value: dict[str, Any]) -> None:
    """One JSON object on stdout."""
    print(json.dumps(value, default=str))
