"""events.jsonl of a run: starts, restores, compilations, checkpoints, failures and ends, one JSON object each.

The trainer and its supervisor append to it; `observe.goodput` reads it.
"""

from __future__ import annotations

import functools
import json
import os
import time
from pathlib import Path
from typing import Any

EVENTS = "events.jsonl"


def record_event(run_dir: Path, kind: str, **values: Any) -> None:
    """Append one event; a write that fails is left out, events cannot fail a run.

    "time" is the wall clock; "mono" a clock that never jumps, comparable between events with the same "boot".
    """
    clocks = {"time": time.time(), "mono": time.monotonic(), "boot": _boot()}
    line = json.dumps({**clocks, "kind": kind, **values}, default=str) + "\n"
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
    """All events in file order; lines that are no event (cut by a kill or a full disk) are left out, [] without a file.

    An event has "time" (a number) and "kind".
    """
    path = run_dir / EVENTS
    if not path.exists():
        return []
    return [event for line in path.read_bytes().split(b"\n") if (event := _event(line)) is not None]


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    good = isinstance(event, dict) and isinstance(event.get("time"), int | float) and isinstance(event.get("kind"), str)
    return event if good else None


@functools.cache
def _boot() -> str | None:
    """Identity of this machine's boot, None where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    except OSError:
        return None
