"""The tables of `jaxtrain report`."""

from __future__ import annotations

from typing import Any

from jaxtrain.observe.goodput import CATEGORIES, Goodput
from jaxtrain.report.tables import FittedTable


def goodput_tables(found: Goodput) -> list[FittedTable]:
    """Where the time went, and one row for each restart where there was one."""
    share = found.to_json()["share"]
    rows = [
        [name.replace("_", " "), show_seconds(found.seconds[name]), f"{100 * share[name]:.1f} %", meaning]
        for name, meaning in CATEGORIES.items()
    ]
    rows.append(["wall time", show_seconds(found.wall_s), "100.0 %" if found.wall_s else "", ""])
    steps = f"{found.steps:,} steps" + (f" and {found.steps_lost:,} that were undone" if found.steps_lost else "")
    title = f"goodput {100 * found.goodput:.1f} %: {steps}; {len(found.restarts)} restarts; newest start: {found.ended}"
    tables = [FittedTable(["", "time", "share", ""], rows, title)]
    if found.restarts:
        tables.append(_restarts(found.restarts))
    return tables


def show_seconds(seconds: float) -> str:
    """1.2 s, 3:04 min, 1:02:03 h."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d} h"


def _restarts(restarts: list[dict[str, Any]]) -> FittedTable:
    rows = []
    for number, row in enumerate(restarts, 1):
        rank = "" if row["rank"] is None else f"rank {row['rank']}"
        who = ", ".join(part for part in (rank, row["host"] or "") if part)
        step = "" if row["step"] is None else f"step {row['step']}"
        where = ", ".join(part for part in (step, row["phase"] or "") if part)
        lost = f"{row['steps_lost']} steps, {show_seconds(row['lost_s'])}"
        rows.append([str(number), show_seconds(row["at_s"]), row["cause"], who, where, lost,
                     show_seconds(row["downtime_s"])])  # fmt: skip
    return FittedTable(["", "after", "cause", "who", "where", "lost", "downtime"], rows, "restarts")
