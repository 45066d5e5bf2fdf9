"""What a run will read: its first batches as text, fill rate, document lengths, shares of the sources, speed."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
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
BORDER = " ║ "
MASK_BRACKETS = ("⟦", "⟧")
PREVIEW_LEGEND = (
    f"{MASK_BRACKETS[0]}not scored{MASK_BRACKETS[1]}{BORDER}next document of the sequence{BORDER}↵ end of line"
)
COLUMNS = {
    "documents": "documents",
    "tokens_an_epoch": "tokens\nan epoch",
    "run_epochs": "epochs\nin the run",
    "share_asked": "share\nasked",
    "share_read": "share\nread",
    "dropped_documents": "dropped\ndocuments",
    "dropped_tokens": "dropped\ntokens",
    "unscored_documents": "documents\nunscored",
}
"""Key of a source -> header of its column; short lines, so that the table fits into 80 columns."""
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
        """One row per source: documents, tokens of an epoch, epochs, share asked for and read, documents dropped."""
        settings, count = self.config.data.sources, len(self.pieces.targets)
        source = _source_of(self.corpus)
        weights, read = np.array([each.weight for each in settings]), np.array(self.measured["read"])
        columns = {
            "source": [f"{each.kind}: {each.path}" for each in settings],
            "documents": np.bincount(source, minlength=count).tolist(),
            "tokens_an_epoch": self.pieces.targets.tolist(),
            "epochs": [each.epochs for each in settings],
            "run_epochs": [
                taken / max(epoch, 1) for taken, epoch in zip(self.taken, self.pieces.targets.tolist(), strict=True)
            ],
            "share_asked": (weights / weights.sum()).tolist(),
            "share_read": (read / max(read.sum(), 1)).tolist(),
            "dropped_documents": self.pieces.dropped_documents.tolist(),
            "dropped_tokens": self.pieces.dropped_targets.tolist(),
            "unscored_documents": list(self.corpus.unscored),
        }
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    @cached_property
    def run_tokens(self) -> int:
        """Inputs that the whole run asks for, at the fill rate of the measured batches."""
        starts = [*(phase.start for phase in self.phases), self.config.train.steps]
        positions = sum(
            max(min(stop, self.config.train.steps) - phase.start, 0) * phase.global_batch * phase.seq_len
            for phase, stop in zip(self.phases, starts[1:], strict=True)
        )
        return round(positions * self.measured["fill"])

    @cached_property
    def taken(self) -> list[int]:
        """Inputs that the run takes from each source."""
        sources, targets = self.config.data.sources, self.pieces.targets.tolist()
        limits = [
            math.inf if source.epochs is None else source.epochs * epoch
            for source, epoch in zip(sources, targets, strict=True)
        ]
        return shares_of(self.run_tokens, [source.weight for source in sources], limits)

    def to_json(self) -> dict[str, Any]:
        """Every number, without the text."""
        return {
            "corpus": self.corpus.describe(),
            "packing": self.config.data.packing,
            "long": self.config.data.overlong,
            "phases": [phase.to_json() for phase in self.phases],
            "sources": self.sources,
            "tokens_an_epoch": int(self.pieces.targets.sum()),
            "run_tokens": self.run_tokens,
            **{name: value for name, value in self.measured.items() if name != "read"},
        }

    def render(self) -> RenderableType:
        """Tables and the first batches as text; document borders and the loss mask are marked and coloured."""
        shown = [Text(PREVIEW_LEGEND, style="dim")] if self.batches else []
        return Group(self._numbers(), self._sources(), *shown, *map(self._batch, range(len(self.batches))))

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
            "ends": self.corpus.tokenizer.describe(),
            "batch": shapes,
            "packing": f"{data.packing}, overlong documents: {data.overlong}",
            "fill rate": f"{measured['fill']:.4f} over {measured['updates']} batches",
            "scored": f"{measured['scored']:.4f} of all inputs",
            "tokens an epoch": int(self.pieces.targets.sum()),
            "tokens of the run": f"about {self.run_tokens:,} in {self.config.train.steps:,} steps",
            "speed": f"{measured['tokens_per_s']:,.0f} tokens/s, one thread",
        }
        for name, value in rows.items():
            table.add_row(name, Text(f"{value:,}" if isinstance(value, int) else str(value)))
        return table

    def _sources(self) -> Group:
        """Each name on its own line, complete at any width, then the numbers; columns of zeros are left out."""
        lines = [Text(f"{number}  {row['source']}", overflow="fold") for number, row in enumerate(self.sources)]
        table = Table(box=box.SIMPLE_HEAD)
        columns = [name for name in COLUMNS if any(row[name] for row in self.sources)]
        for header in ("", *(COLUMNS[name] for name in columns)):
            table.add_column(header, justify="right", overflow="fold")
        for number, row in enumerate(self.sources):
            table.add_row(str(number), *(_cell(name, row) for name in columns))
        notes = []
        if sum(self.taken) < self.run_tokens - len(self.taken):
            message = (
                f"The run asks for about {self.run_tokens:,} tokens, and the epochs of all sources have "
                f"{sum(self.taken):,}: it will stop with an error. Lower train.steps or raise epochs."
            )
            notes.append(Text(message, style="yellow"))
        return Group(Text("sources", style="italic"), *lines, table, *notes)

    def _batch(self, index: int) -> Panel:
        batch = self.batches[index]
        count, seq_len = batch["tokens"].shape
        texts = [self._sequence(batch, number) for number in range(min(count, SHOWN_SEQUENCES))]
        if count > SHOWN_SEQUENCES:
            texts.append(Text(f"{count - SHOWN_SEQUENCES} more sequences are not shown", style="dim"))
        title = f"batch {index + 1}: {count} sequences of {seq_len} tokens, fill {fill_rate(batch):.4f}"
        return Panel(Group(*texts), title=title, title_align="left", box=box.ROUNDED)

    def _sequence(self, batch: HostBatch, number: int) -> Text:
        segments = batch["segments"][number]
        text = Text(f"{number}: ", style="bold", overflow="fold")
        for segment in range(1, int(segments.max()) + 1):
            here = segments == segment
            if segment > 1:
                text.append(BORDER, style="bold")
            text.append_text(self._segment(batch["tokens"][number][here], batch["labels"][number][here], segment))
        if padding := int((segments == 0).sum()):
            text.append(f"{BORDER if padding < len(segments) else ''}{padding} padded", style="dim")
        return text

    def _segment(self, tokens: np.ndarray, labels: np.ndarray, segment: int) -> Text:
        """A document's part of a sequence; tokens that are no scored target are dim and in brackets."""
        style = DOCUMENT_STYLES[segment % len(DOCUMENT_STYLES)]
        # The first token is the target of nothing here, and the last target is no input.
        tokens = np.concatenate([tokens, labels[-1:][labels[-1:] != IGNORE]])
        scored = np.concatenate([[False], labels != IGNORE])[: len(tokens)]
        borders = [0, *(np.flatnonzero(np.diff(scored)) + 1).tolist(), len(tokens)]
        text = Text()
        for lo, hi in pairwise(borders):
            if words := _abbreviated(_printable(self.corpus.tokenizer.decode(tokens[lo:hi].tolist(), special=True))):
                text.append(*((words, style) if scored[lo] else (words.join(MASK_BRACKETS), f"dim {style}")))
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


def shares_of(tokens: int, weights: Sequence[float], limits: Sequence[float]) -> list[int]:
    """Tokens that each source gives to a total, by weight; sources at their limit leave the rest to the others."""
    taken, repeating = [0.0] * len(weights), set(range(len(weights)))
    while repeating:
        each_weight = (tokens - sum(taken)) / sum(weights[source] for source in repeating)
        ended = {source for source in repeating if limits[source] <= each_weight * weights[source]}
        for source in ended or repeating:
            taken[source] = limits[source] if ended else each_weight * weights[source]
        repeating = repeating - ended if ended else set()
    return [round(count) for count in taken]


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


def _abbreviated(words: str) -> str:
    """The words, or the beginning and end of a long run with the number of characters between them."""
    left_out = len(words) - SHOWN_CHARACTERS
    if left_out <= 0:
        return words
    head = SHOWN_CHARACTERS * 3 // 4
    return f"{words[:head]} «{left_out:,} characters left out» {words[head + left_out :]}"


def _cell(name: str, row: dict[str, Any]) -> str:
    value = row[name]
    if name.startswith("share"):
        return f"{value:.2%}"
    if name == "run_epochs":
        return (f"{value:,.1f}" if value >= 10 else f"{value:.2g}") + (
            "" if row["epochs"] is None else f" of {row['epochs']:g}"
        )
    return f"{value:,}"
