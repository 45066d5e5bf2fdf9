"""events.jsonl of a run: starts, restores, compilations, checkpoints, rollbacks and ends, one JSON object each."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

EVENTS = "events.jsonl"


def record_event(run_dir: Path, kind: str, **values: Any) -> None:
    """Append one event with the wall-clock time; a write that fails is left out, events cannot fail a run."""
    line = json.dumps({"time": time.time(), "kind": kind, **values}, default=str) + "\n"
    try:
        # One write with O_APPEND: lines of the trainer and of its supervisor do not mix.
        handle = os.open(run_dir / EVENTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    except OSError:
        return
    try:
        os.write(handle, line.encode())
    except OSError:
        pass
    finally:
        os.close(handle)


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """All events in file order; an unfinished last line is left out, [] where there is no file."""
    path = run_dir / EVENTS
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in lines if line.startswith(b"{") and line.endswith(b"}")]
