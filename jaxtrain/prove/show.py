"""Print a verification as a table or JSON, and its progress."""

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
from jaxtrain.prove.shrink import SHRINK_RULES
from jaxtrain.prove.verify import LayoutResult, VerifyReport

STYLES = {"passed": "green", "failed": "bold red", "refused": "yellow"}


def show_report(report: VerifyReport, console: Console) -> None:
    """Print the shrinking rules, the table of layouts and the counts."""
    model = report.config.model
    console.print("The model is shrunk, with the same structure:", style="bold")
    for line in SHRINK_RULES:
        console.print(f"- {line}", highlight=False)
    console.print(
        f"here: {model.n_layers} layers, {model.n_heads} heads over {model.kv_heads}, windows {model.windows}"
        + (f", {model.moe.experts} experts, top {model.moe.top_k}" if model.moe.experts else "")
        + f"; {report.devices} devices",
        highlight=False,
    )
    table = Table(
        "layout", "", "worst leaf", "relative error", "s", title="Every layout against the reference implementation"
    )
    for result in report.results:
        table.add_row(
            Text(result.name), Text(result.status, style=STYLES[result.status]), Text(_leaf(result)),
            _error(result.failure or result.worst), f"{result.seconds:.1f}",
        )  # fmt: skip
    console.print(table)
    console.print(", ".join(f"{count} {status}" for status, count in report.counts.items()), highlight=False)


def fault_lines(report: VerifyReport) -> list[str]:
    """One line per fault, with the failing leaf or the reason."""
    return [f"{result.name}: {_fault(result.failure) if result.failure else result.reason}" for result in report.faults]


def report_to_json(report: VerifyReport) -> dict[str, Any]:
    """Plain values: verdict, counts, devices, shrinking rules, the shrunk model, and `layouts` in the table's order."""
    return {
        "passed": report.passed, "counts": report.counts, "devices": report.devices, "rule": list(SHRINK_RULES),
        "model": to_tree(report.config)["model"],
        "layouts": [
            {
                "name": result.name, "status": result.status, "seconds": round(result.seconds, 3),
                "worst": _check(result.worst), "guilty": _check(result.failure), "reason": result.reason,
            }
            for result in report.results
        ],
    }  # fmt: skip


@contextmanager
def verify_progress(console: Console, shown: bool) -> Iterator[Callable[[int, int, LayoutResult | None], None]]:
    """A progress bar over the layouts, for the argument `on_progress` of `verify`."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task("reference", total=None)

        def on_progress(done: int, total: int, result: LayoutResult | None) -> None:
            latest = "reference" if result is None else f"{result.status}: {result.name}"
            bar.update(task, completed=done, total=total, description=latest.replace("[", r"\["))

        yield on_progress


def _fault(check: Check) -> str:
    when = f" after step {check.step}" if check.step else ""
    return f"{check.kind} {check.leaf}{when}: relative error {check.error:.1e}, at most {check.bound:.0e}"


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
