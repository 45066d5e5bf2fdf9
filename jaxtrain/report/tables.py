"""Tables that lose nothing at any width, and numbers as text.

A `FittedTable` has the width of the console: 80 columns in a pipe or a log. Columns of numbers are never wrapped. Other
cells are wrapped at separators such as `/`, never cut. Where even that does not fit, each row becomes a list of
`head: cell` lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.text import Text

Row = Sequence[str] | str
"""Cells, or a text that spans all columns."""
WORD_WIDTH = 18
"""Longer words may be broken where a column is narrow."""

_PIECES = re.compile(r".+?(?:/(?=\D)|[(|;](?=\S)|,(?=[^\d\s])|_(?=[a-z])|[-+](?=[a-z])|\s+|$)")
# Also the units of a byte count or a time: such a column is aligned to the right and never wrapped.
_NUMBER = re.compile(r"(?:[-+]?\d[\d,.]*(?:e-\d+|%| ?[kMGT]?B| m?s)?|-|)$")


@dataclass(frozen=True)
class FittedTable:
    """A table that rich prints at the width of the console.

    heads: one a column. rows: cells, or one text that spans all columns. A cell may have several lines.
    """

    heads: Sequence[str]
    rows: Sequence[Row]
    title: str = ""
    show_heads: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        if self.title:
            yield Text(self.title, style="bold", overflow="fold")
        for line, style in self.lines(options.max_width):
            yield Text(line, style=style, no_wrap=True, overflow="ignore", end="\n")
        yield Text("")

    def lines(self, width: int) -> Iterator[tuple[str, str]]:
        """(text, style) of each line."""
        cells = [row for row in self.rows if not isinstance(row, str)]
        columns = [[row[i] for row in cells] for i in range(len(self.heads))]
        numeric = [bool(column) and all(map(_NUMBER.match, column)) for column in columns]
        heads = self.heads if self.show_heads else [""] * len(self.heads)
        fitted = _fit_columns([[head, *column] for head, column in zip(heads, columns, strict=True)], numeric, width)
        if fitted is None:
            yield from self._records(width)
            return
        widths, gap = fitted
        if self.show_heads:
            yield from ((line, "bold") for line in _row_lines(heads, widths, numeric, gap))
            yield "─" * min(sum(widths) + len(gap) * (len(widths) - 1), width), "dim"
        for row in self.rows:
            if isinstance(row, str):
                yield from ((line, "") for line in wrap_cell(row, width))
            else:
                yield from ((line, "") for line in _row_lines(row, widths, numeric, gap))

    def _records(self, width: int) -> Iterator[tuple[str, str]]:
        for row in self.rows:
            if isinstance(row, str):
                yield from ((line, "bold") for line in wrap_cell(row, width))
                continue
            for head, cell in zip(self.heads, row, strict=True):
                text = f"{head}: {' '.join(cell.split())}" if head else cell
                yield from ((line, "") for line in wrap_cell(text, width))
            yield "", ""


def print_lines(console: Console, text: str, style: str = "") -> None:
    """Print text as it is: no markup, no colours of rich's own, long words folded."""
    console.print(Text(text, style=style, overflow="fold"))


def wrap_cell(text: str, width: int) -> list[str]:
    """Lines of at most `width` cells, broken after separators; continued lines are indented by one space."""
    lines: list[str] = []
    for paragraph in text.split("\n"):
        indent = " " * (len(paragraph) - len(paragraph.lstrip()))
        line, first = indent, True
        for piece in _PIECES.findall(paragraph.lstrip()):
            rest = piece
            while rest:
                if cell_len(line + rest.rstrip()) <= width:
                    line, rest = line + rest, ""
                elif line.strip():
                    lines.append(line.rstrip())
                    line, first = indent + (" " if width > 1 else ""), False
                else:
                    room = max(width - len(line), 1)
                    lines.append(line + rest[:room])
                    line, rest, first = indent + (" " if width > 1 else ""), rest[room:], False
        if line.strip() or first:
            lines.append(line.rstrip())
    return lines


def short_names(names: Sequence[str]) -> list[str]:
    """Paths shortened from the left to as few parts as tell them apart: '.../one.yaml', '.../two.yaml'."""
    parts = [name.split("/") for name in names]
    for count in range(1, max(map(len, parts)) + 1):
        tails = ["/".join(one[-count:]) for one in parts]
        if len(set(tails)) == len(set(names)):
            break
    return [tail if tail == name else f".../{tail}" for tail, name in zip(tails, names, strict=True)]


def _fit_columns(columns: Sequence[Sequence[str]], numeric: Sequence[bool], width: int) -> tuple[list[int], str] | None:
    """Width of each column and the gap between them; None where the table does not fit."""
    natural = [max(cell_len(line) for cell in column for line in cell.split("\n")) for column in columns]
    least = [
        max(map(cell_len, column[1:] or [""])) if whole else max(map(_widest_piece, column))
        for column, whole in zip(columns, numeric, strict=True)
    ]
    least = [max(one, min(_widest_piece(column[0]), WORD_WIDTH)) for one, column in zip(least, columns, strict=True)]
    for gap in (2, 1):
        room = width - gap * (len(columns) - 1)
        if sum(natural) <= room:
            return natural, " " * gap
        if sum(least) <= room:
            return _share(least, natural, room), " " * gap
    return None


def _share(least: list[int], natural: list[int], room: int) -> list[int]:
    """Widths between `least` and `natural` that use all the room: always the narrowest share grows."""
    widths = list(least)
    for _ in range(room - sum(widths)):
        growing = [i for i in range(len(widths)) if widths[i] < natural[i]]
        widths[min(growing, key=lambda i: widths[i] / natural[i])] += 1
    return widths


def _widest_piece(cell: str) -> int:
    """The longest piece that should not be broken; continued lines have an indent of one space."""
    pieces = [cell_len(piece.rstrip()) for line in cell.split("\n") for piece in _PIECES.findall(line)]
    whole = max(cell_len(line) for line in cell.split("\n"))
    return min(max(pieces, default=0) + 1, WORD_WIDTH, whole)


def _row_lines(row: Sequence[str], widths: Sequence[int], numeric: Sequence[bool], gap: str) -> Iterator[str]:
    cells = [wrap_cell(cell, width) for cell, width in zip(row, widths, strict=True)]
    for parts in zip_longest(*cells, fillvalue=""):
        padded = (
            " " * (width - cell_len(part)) + part if right else part + " " * (width - cell_len(part))
            for part, width, right in zip(parts, widths, numeric, strict=True)
        )
        yield gap.join(padded).rstrip()


def format_bytes(n: int) -> str:
    """Bytes in decimal units: GB is 10^9 bytes."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if n >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n} B"


def gib(size: float) -> str:
    """Bytes as GiB, without the unit: two decimals, or two digits below 0.01."""
    value = size / 2**30
    return f"{value:.2g}" if 0 < abs(value) < 0.01 else f"{value:.2f}"


def percent(share: float) -> str:
    """A share as percent."""
    return f"{share * 100:.0f}%"


def format_integer(value: float) -> str:
    """A count."""
    return str(int(value))


def format_number(value: float) -> str:
    """Three decimals below 10, one above."""
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def format_range(numbers: Sequence[int]) -> str:
    """'0-7' for consecutive numbers, '0-56/8' for equal distances, else all of them."""
    steps = {b - a for a, b in pairwise(numbers)}
    if steps == {1} or (len(steps) == 1 and len(numbers) > 2):
        step = steps.pop()
        return f"{numbers[0]}-{numbers[-1]}" + (f"/{step}" if step != 1 else "")
    return ", ".join(map(str, numbers))
