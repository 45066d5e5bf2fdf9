"""Commands of the campaign: real processes, the lines that they print with the time of each, and their end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from faults.processes import below, command_of


class Job:
    """One command of a user, in a session of its own; `lines` are (wall-clock time, text)."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: Path) -> None:
        self.lines: list[tuple[float, str]] = []
        self.began = time.time()
        self.ended: float | None = None
        self.process = subprocess.Popen(
            list(command), env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        """Everything printed so far."""
        return "\n".join(line for _, line in self.lines)

    def said(self, pattern: str) -> float | None:
        """When a line first matched, None if none did."""
        return next((moment for moment, line in self.lines if re.search(pattern, line)), None)

    def wait(self, limit: float) -> int | None:
        """The exit status as in a shell (128 + signal), None if it still runs after `limit` seconds."""
        try:
            code = self.process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        self.ended = self.ended or time.time()
        # A child that outlives the command may hold the pipe open: it is reported as left behind.
        self._reader.join(timeout=2)
        return 128 - code if code < 0 else code

    def pid(self, rank: int | None) -> int:
        """The trainer of a rank, or the command itself (None: a supervisor)."""
        if rank is None:
            return self.process.pid
        for pid in below(self.process.pid):
            words = command_of(pid)
            if "--process-id" in words and words[words.index("--process-id") + 1] == str(rank):
                return pid
        return self.process.pid

    def signal(self, signum: int, rank: int | None = None) -> None:
        """Send a signal to the trainer of a rank, or to the command itself."""
        with suppress(ProcessLookupError):
            os.kill(self.pid(rank), signum)

    def kill(self) -> None:
        """End the command and its session with SIGKILL."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.wait(30)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.time(), line.decode(errors="replace").rstrip("\n")))
