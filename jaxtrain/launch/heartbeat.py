"""What this process does now, for the supervisor outside of it: step, phase, and since when."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

STATUS_DIR = "JAXTRAIN_STATUS_DIR"
"""Environment variable: folder of the files status-RANK.json that a supervisor watches; unset: nothing is written."""

PHASES = ("start", "join", "data", "compile", "restore", "input", "step", "evaluation", "checkpoint", "barrier", "end")


def report_phase(phase: str, step: int | None = None) -> None:
    """Report that this process now is in one of PHASES, at a step: one small write, nothing without a supervisor."""
    folder = os.environ.get(STATUS_DIR)
    if folder is None:
        return
    status = {"phase": phase, "step": step, "since": time.time(), "pid": os.getpid()}
    path = Path(folder) / f"status-{os.environ.get('JAXTRAIN_RANK', '0')}.json"
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(status))
    draft.replace(path)
