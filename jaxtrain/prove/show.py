"""Print a verification as a table or JSON, and its progress."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from textwrap import shorten
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from jaxtrain.config import to_tree
from jaxtrain.prove.compare import Check
from jaxtrain.prove.layouts import SkippedLayout
from jaxtrain.prove.verify import LayoutResult, VerifyReport

STYLES = {"passed": "green", "failed": "bold red", "refused": "yellow"}


def show_report(report: VerifyReport, console: Console) -> None:
    """Print the shrinking rules, the table of layouts and the counts."""
    model = report.config.model
    console.print("The model is shrunk, with the same structure:", style="bold")
    for line in report.rules:
        console.print(f"- {line}", highlight=False)
    console.print(
        f"here: {model.n_layers} layers, {model.n_heads} heads over {model.kv_heads}, windows {model.windows}"
        + (f", {model.moe.experts} experts, top {model.moe.top_k}" if model.moe.experts else "")
        + f"; {report.devices} devices",
        highlight=False,
    )
    names = (Column("layout", overflow="fold"), "", Column("worst leaf", overflow="fold"), "relative error", "s")
    table = Table(*names, title="Every layout against the reference implementation")
    for result in report.results:
        table.add_row(
            Text(result.name), Text(result.status, style=STYLES[result.status]), Text(_leaf(result)),
            _error(result.failure or result.worst), f"{result.seconds:.1f}",
        )  # fmt: skip
    console.print(table)
    console.print(", ".join(f"{count} {status}" for status, count in report.counts.items()), highlight=False)
    if line := skipped_line(report):
        console.print(line, highlight=False)


def fault_lines(report: VerifyReport) -> list[str]:
    """One line per fault, with the failing leaf or the reason."""
    return [f"{result.name}: {_fault(result.failure) if result.failure else result.reason}" for result in report.faults]


def report_to_json(report: VerifyReport) -> dict[str, Any]:
    """Plain values: verdict, counts, devices, shrinking rules, the shrunk model, `layouts`, skipped rows."""
    return {
        "passed": report.passed, "counts": report.counts, "devices": report.devices, "rule": list(report.rules),
        "model": to_tree(report.config)["model"],
        "layouts": [
            {
                "name": result.name, "status": result.status, "seconds": round(result.seconds, 3),
                "worst": _check(result.worst), "guilty": _check(result.failure), "reason": result.reason,
            }
            for result in report.results
        ],
        "not_applicable": [{"name": skipped.name, "reason": skipped.reason} for skipped in report.not_applicable],
    }  # fmt: skip


@contextmanager
def verify_progress(console: Console, bar: bool) -> Iterator[Callable[[int, int, LayoutResult | None], None]]:
    """The argument `on_progress` of `verify`: a progress bar with the estimated time left, or a line per finished row.

    The estimate is the mean time of the finished rows, times the number of rows left.
    """
    start = time.monotonic()
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not bar) as display:
        task = display.add_task("reference", total=None)

        def on_progress(done: int, total: int, result: LayoutResult | None) -> None:
            left = time_left(time.monotonic() - start, done, total)
            if bar:
                latest = "compiling the reference" if result is None else f"{result.status}: {result.name}"
                text = escape(", ".join(filter(None, (left, latest))))
                display.update(task, completed=done, total=total, description=text)
            elif result is None:
                _print_line(console, f"verify: {total} rows; the first one gives an estimate of the time")
            else:
                what = f"{result.name}: {result.status} in {result.seconds:.1f} s"
                _print_line(console, ", ".join(filter(None, (f"verify: {done} of {total}, {what}", left))))

        yield on_progress


def time_left(elapsed: float, done: int, total: int) -> str:
    """Estimated time for the rows left, such as 'about 3 min left'; empty before the first row and after the last."""
    if not 0 < done < total:
        return ""
    seconds = elapsed / done * (total - done)
    return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"


def skipped_line(report: VerifyReport) -> str:
    """One line that counts the rows that do not apply, by the setting that excludes them; empty if there are none."""
    settings = Counter(_excluding_setting(skipped) for skipped in report.not_applicable)
    counts = ", ".join(f"{setting} {count}" for setting, count in settings.items())
    rows = "1 row does" if len(report.not_applicable) == 1 else f"{len(report.not_applicable)} rows do"
    return f"{rows} not apply to this model and these devices: {counts} (reasons in --json)" if counts else ""


def _excluding_setting(skipped: SkippedLayout) -> str:
    """The first setting in the reason, else the reason's first words."""
    found = re.search(
        r"\b(?:model|mesh|rules|data|train|optimizer|attention|pipeline|remat|moe)(?:\.[a-z_]+)+", skipped.reason
    )
    return found[0] if found else shorten(skipped.reason, 60)


def _print_line(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _fault(check: Check) -> str:
    when = f" after step {check.step}" if check.step else ""
    why = ", which follows from the errors of its moments" if check.kind == "parameter" and check.limit else ""
    return f"{check.kind} {check.leaf}{when}: relative error {check.error:.1e}, at most {check.bound:.0e}{why}"


def _leaf(result: LayoutResult) -> str:
    check = result.failure or result.worst
    return result.reason if check is None else f"{check.kind} {check.leaf}"


def _error(check: Check | None) -> str:
    return "" if check is None else f"{check.error:.1e}"


def _check(check: Check | None) -> dict[str, Any] | None:
    if check is None:
        return None
    # JSON has no infinity and no NaN.
    error = check.error if math.isfinite(check.error) else str(check.error)
    return {"kind": check.kind, "leaf": check.leaf, "error": error, "bound": check.bound, "update": check.step}
