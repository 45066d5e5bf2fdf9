"""A verification as a table, as a tree for JSON, and while it runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from jaxtrain.config import to_tree
from jaxtrain.prove.compare import Check
from jaxtrain.prove.shrink import RULE
from jaxtrain.prove.verify import Result, VerifyReport

STYLES = {"passed": "green", "failed": "bold red", "refused": "yellow"}


def show_report(report: VerifyReport, console: Console) -> None:
    """Print the shrinking rule, the table of layouts and the count."""
    model = report.config.model
    console.print("The configuration is made small, same structure:", style="bold")
    for line in RULE:
        console.print(f"- {line}", highlight=False)
    console.print(
        f"here: {model.n_layers} layers, {model.n_heads} heads over {model.kv_heads}, windows {model.windows}"
        + (f", {model.moe.experts} experts, {model.moe.top_k} a token" if model.moe.experts else "")
        + f"; {report.devices} devices",
        highlight=False,
    )
    table = Table("layout", "", "worst leaf", "relative error", "s", title="Every layout against one plain computation")
    for result in report.results:
        table.add_row(
            Text(result.name), Text(result.status, style=STYLES[result.status]), Text(_leaf(result)),
            _error(result.guilty or result.worst), f"{result.seconds:.1f}",
        )  # fmt: skip
    console.print(table)
    console.print(", ".join(f"{count} {status}" for status, count in report.counts.items()), highlight=False)


def failures(report: VerifyReport) -> list[str]:
    """One line a fault, with the guilty leaf or the reason."""
    return [f"{result.name}: {_fault(result.guilty) if result.guilty else result.reason}" for result in report.faults]


def to_json(report: VerifyReport) -> dict[str, Any]:
    """One tree: verdict, counts, devices, the shrunk model, and `layouts`, a list in the table's order."""
    return {
        "passed": report.passed, "counts": report.counts, "devices": report.devices, "rule": list(RULE),
        "model": to_tree(report.config)["model"],
        "layouts": [
            {
                "name": result.name, "status": result.status, "seconds": round(result.seconds, 3),
                "worst": _check(result.worst), "guilty": _check(result.guilty), "reason": result.reason,
            }
            for result in report.results
        ],
    }  # fmt: skip


@contextmanager
def progress(console: Console, shown: bool) -> Iterator[Callable[[int, int, Result | None], None]]:
    """A bar over the layouts, for `verify`'s `told`."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task("reference", total=None)

        def on_progress(done: int, of: int, result: Result | None) -> None:
            latest = "reference" if result is None else f"{result.status}: {result.name}"
            bar.update(task, completed=done, total=of, description=latest.replace("[", r"\["))

        yield on_progress


def _fault(check: Check) -> str:
    when = f" after update {check.update}" if check.update else ""
    return f"{check.kind} {check.leaf}{when}: relative error {check.error:.1e}, at most {check.bound:.0e}"


def _leaf(result: Result) -> str:
    check = result.guilty or result.worst
    return result.reason if check is None else f"{check.kind} {check.leaf}"


def _error(check: Check | None) -> str:
    return "" if check is None else f"{check.error:.1e}"


def _check(check: Check | None) -> dict[str, Any] | None:
    if check is None:
        return None
    # JSON has no infinity and no NaN.
    error = check.error if math.isfinite(check.error) else str(check.error)
    return {"kind": check.kind, "leaf": check.leaf, "error": error, "bound": check.bound, "update": check.update}
