"""What a run will read: its first batches as text, fill rate, document lengths, shares of the sources, speed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from jaxtrain.config import ConfigError, RunConfig
from jaxtrain.data.corpus import Corpus, prepare
from jaxtrain.data.packing import HostBatch, fill_rate
from jaxtrain.data.phases import Phase
from jaxtrain.data.pieces import Pieces
from jaxtrain.data.stream import open_stream, tokens_read
from jaxtrain.numerics.labels import IGNORE

MEASURE_S = 2.0
SHOWN_SEQUENCES = 4
SHOWN_CHARACTERS = 400
DOCUMENT_STYLES = ("black on bright_cyan", "black on bright_yellow", "black on bright_green", "black on bright_magenta")
SOURCE_COLORS = ("#2f6db5", "#d1603d", "#4a9a62", "#8a5fb0", "#9aa5b1", "#c9a227")


@dataclass(frozen=True)
class Preview:
    """The corpus and stream of a run, its first batches, and measurements on them and on the batches after them."""

    config: RunConfig
    corpus: Corpus
    pieces: Pieces
    phases: tuple[Phase, ...]
    batches: list[HostBatch]
    measured: dict[str, Any]

    @cached_property
    def sources(self) -> list[dict[str, Any]]:
        """One row per source: documents, targets in an epoch, share asked for and realised, documents dropped."""
        settings, count = self.config.data.sources, len(self.pieces.targets)
        source = _source_of(self.corpus)
        weights, read = np.array([each.weight for each in settings]), np.array(self.measured["read"])
        columns = {
            "source": [f"{each.kind}: {each.path}" for each in settings],
            "documents": np.bincount(source, minlength=count).tolist(),
            "tokens_an_epoch": self.pieces.targets.tolist(),
            "epochs": [each.epochs for each in settings],
            "share_asked": (weights / weights.sum()).tolist(),
            "share_read": (read / max(read.sum(), 1)).tolist(),
            "dropped_documents": self.pieces.dropped_documents.tolist(),
            "dropped_tokens": self.pieces.dropped_targets.tolist(),
        }
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def to_json(self) -> dict[str, Any]:
        """Every number, without the text."""
        return {
            "corpus": self.corpus.describe(),
            "packing": self.config.data.packing,
            "long": self.config.data.overlong,
            "phases": [asdict(phase) for phase in self.phases],
            "sources": self.sources,
            "tokens_an_epoch": int(self.pieces.targets.sum()),
            **{name: value for name, value in self.measured.items() if name != "read"},
        }

    def render(self) -> RenderableType:
        """Tables and the first batches as text, one colour a document; dim is not scored."""
        return Group(self._numbers(), self._sources(), *map(self._batch, range(len(self.batches))))

    def draw(self, path: Path) -> Path:
        """Plot a histogram of document lengths, one colour per source, with the sequence lengths marked.

        Raises ConfigError when the file cannot be written or its suffix names no image format.
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        lengths, source = self.corpus.train.lengths, _source_of(self.corpus)
        figure = Figure(figsize=(9, 4.5), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        edges = np.geomspace(1, max(int(lengths.max()), 2) + 1, 60)
        axes.hist(
            [lengths[source == each] for each in range(len(self.sources))],
            bins=edges.tolist(),
            stacked=True,
            color=[SOURCE_COLORS[each % len(SOURCE_COLORS)] for each in range(len(self.sources))],
            label=[row["source"] for row in self.sources],
        )
        for phase in {phase.seq_len: phase for phase in self.phases}.values():
            axes.axvline(phase.seq_len, color="#333a42", linewidth=1, linestyle="--")
            axes.annotate(f" {phase.seq_len}", (phase.seq_len, 1), xycoords=("data", "axes fraction"), va="top")
        axes.set_xscale("log")
        axes.set_xlabel("tokens of a document (dashed: a sequence)")
        axes.set_ylabel("documents")
        axes.set_title(f"{len(lengths):,} documents, {self.pieces.targets.sum():,} tokens an epoch", loc="left")
        axes.legend(frameon=False, fontsize=8)
        try:
            figure.savefig(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--picture {path} cannot be written ({error}): name a .png, .svg or .pdf file") from None
        return path

    def _numbers(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, show_header=False, title="data", title_justify="left")
        table.add_column(style="dim", no_wrap=True)
        table.add_column(overflow="fold")
        data, measured = self.config.data, self.measured
        shapes = ", ".join(
            f"{phase.global_batch} x {phase.seq_len}" + (f" from step {phase.start + 1} on" if phase.start else "")
            for phase in self.phases
        )
        rows = {
            **self.corpus.describe(),
            "batch": shapes,
            "packing": f"{data.packing}, overlong documents: {data.overlong}",
            "fill rate": f"{measured['fill']:.4f} over {measured['updates']} batches",
            "scored": f"{measured['scored']:.4f} of all inputs",
            "tokens an epoch": int(self.pieces.targets.sum()),
            "speed": f"{measured['tokens_per_s']:,.0f} tokens/s, one thread",
        }
        for name, value in rows.items():
            table.add_row(name, f"{value:,}" if isinstance(value, int) else str(value))
        return table

    def _sources(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, title="sources", title_justify="left")
        for name in self.sources[0]:
            table.add_column(name.replace("_", " "), justify="left" if name == "source" else "right", overflow="fold")
        for row in self.sources:
            table.add_row(*(_cell(value) for value in row.values()))
        return table

    def _batch(self, index: int) -> Panel:
        batch = self.batches[index]
        count, seq_len = batch["tokens"].shape
        texts = [self._sequence(batch, number) for number in range(min(count, SHOWN_SEQUENCES))]
        if count > SHOWN_SEQUENCES:
            texts.append(Text(f"... {count - SHOWN_SEQUENCES} more sequences", style="dim"))
        title = f"batch {index + 1}: {count} sequences of {seq_len} tokens, fill {fill_rate(batch):.4f}"
        return Panel(Group(*texts), title=title, title_align="left", box=box.ROUNDED)

    def _sequence(self, batch: HostBatch, number: int) -> Text:
        segments = batch["segments"][number]
        text = Text(f"{number}: ", style="bold")
        for segment in range(1, int(segments.max()) + 1):
            here = segments == segment
            text.append_text(self._segment(batch["tokens"][number][here], batch["labels"][number][here], segment))
        if padding := int((segments == 0).sum()):
            text.append(f" {padding} padded", style="dim")
        return text

    def _segment(self, tokens: np.ndarray, labels: np.ndarray, segment: int) -> Text:
        """A document's part of a sequence; a token that is no scored target is dim."""
        style = DOCUMENT_STYLES[segment % len(DOCUMENT_STYLES)]
        scored = np.concatenate([[True], labels[:-1] != IGNORE])
        borders = [0, *(np.flatnonzero(np.diff(scored)) + 1).tolist(), len(tokens)]
        text = Text()
        for lo, hi in pairwise(borders):
            words = _printable(self.corpus.tokenizer.decode(tokens[lo:hi].tolist()))
            text.append(words, style=style if scored[lo] else f"dim {style}")
        if len(text) > SHOWN_CHARACTERS:
            text.truncate(SHOWN_CHARACTERS)
            text.append(f"... ({len(tokens)} tokens)", style=f"bold {style}")
        return text


def preview(config: RunConfig, batches: int = 2) -> Preview:
    """Read the first `batches` of a run, then more for MEASURE_S seconds to measure fill rate, shares and speed.

    Raises ConfigError as `prepare` and the stream do.
    """
    corpus = prepare(config)
    with closing(open_stream(corpus.train, config, prefetch=0)) as stream:
        shown: list[HostBatch] = []
        inputs = scored = positions = steps = 0
        begin = time.perf_counter()
        while steps < max(batches, 1) or time.perf_counter() - begin < MEASURE_S:
            try:
                batch = next(stream)
            except ConfigError:
                if not steps:
                    raise
                break  # all sources are used up: fewer batches than asked for
            steps += 1
            inputs += int(np.count_nonzero(batch["segments"]))
            scored += int(np.count_nonzero(batch["labels"] != IGNORE))
            positions += batch["tokens"].size
            if len(shown) < batches:
                shown.append(batch)
        seconds = time.perf_counter() - begin
        measured = {
            "updates": steps,
            "fill": inputs / positions,
            "scored": scored / inputs,
            "tokens_per_s": inputs / seconds,
            "read": tokens_read(stream.get_state()),
        }
        return Preview(config, corpus, stream.pieces, stream.phases, shown, measured)


def write_html(shown: Sequence[RenderableType], path: Path) -> Path:
    """Write renderables as an HTML page; raises ConfigError when the file cannot be written."""
    import io

    console = Console(record=True, width=160, file=io.StringIO(), force_terminal=True)
    for each in shown:
        console.print(each)
    try:
        console.save_html(str(path))
    except OSError as error:
        raise ConfigError(f"--html {path} cannot be written ({error.strerror}): name another file") from None
    return path


def _source_of(corpus: Corpus) -> np.ndarray:
    source = corpus.train.source
    return np.zeros(len(corpus.train), np.int32) if source is None else source


def _printable(words: str) -> str:
    """One line without control characters."""
    return "".join("↵" if c == "\n" else c if c.isprintable() or c == "\t" else "·" for c in words)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
