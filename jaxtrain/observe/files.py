"""metrics.jsonl as a file: one JSON object a step, readable after any kill."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.config import ConfigError, StorageError

METRICS = "metrics.jsonl"


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Rows of RUN/metrics.jsonl in file order, an unfinished last line left out; [] when there is no file.

    Raises ConfigError naming the line when a finished line is no JSON object with a step.
    """
    return [row for row, _ in _lines(run_dir / METRICS)]


def truncate_metrics(run_dir: Path, step: int) -> int | None:
    """Keep the rows of steps up to `step`, drop an unfinished last line, atomically; returns the last step."""
    path = run_dir / METRICS
    rows = [(row["step"], line) for row, line in _lines(path) if row["step"] <= step]
    if path.exists():
        write_atomic(path, b"".join(line for _, line in rows))
    return rows[-1][0] if rows else None


def to_json(row: Mapping[str, Any]) -> str:
    """One line of valid JSON; numbers that are not finite become null, their names are listed under "nonfinite"."""
    values = {name: _python_number(value) for name, value in row.items()}
    bad = [name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
    if bad:
        values |= dict.fromkeys(bad) | {"nonfinite": bad}
    return json.dumps(values, allow_nan=False)


def write_atomic(path: Path, content: bytes) -> None:
    """Replace a file's content in one step: readers and a kill see the old or the new, never a part."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def write_summary(run_dir: Path, result: Mapping[str, Any]) -> None:
    """Write RUN/summary.json atomically."""
    text = json.dumps(dict(result), indent=1, default=str)
    write_atomic(Path(run_dir) / "summary.json", (text + "\n").encode())


def _lines(path: Path) -> Iterator[tuple[dict[str, Any], bytes]]:
    if not path.exists():
        return
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StorageError(
            f"{path} cannot be read ({error.strerror or error}): permit reading, or move it away"
        ) from None
    for number, line in enumerate(content.splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            return
        try:
            row = json.loads(line)
            int(row["step"])
        except (ValueError, TypeError, KeyError):
            raise ConfigError(
                f"{path} line {number} is not a JSON object with a step: fix or remove that line"
            ) from None
        yield row, line


def _python_number(value: Any) -> Any:
    """Scalars of numpy and jax as Python numbers."""
    return value.item() if hasattr(value, "item") else value
