"""One started process of a job: its output, its record, its end; it never outlives the launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress

from jaxtrain.launch.heartbeat import GENERATION, RANK, STATUS_FD, Record, Status

TAIL = 60
"""Last lines of output kept for the report of a failure; a traceback through jax has some 40."""


class Worker:
    """One started process, a thread that forwards its output, and one that notes when it ended."""

    def __init__(self, rank: int, command: Sequence[str], env: Mapping[str, str], generation: int = 1) -> None:
        self.rank = rank
        self.status: int | None = None
        self.ended = 0.0
        self.started = time.monotonic()
        self.tail: deque[str] = deque(maxlen=TAIL)
        self._record = Record.create()
        added = {STATUS_FD: str(self._record.fd), RANK: str(rank), GENERATION: str(generation)}
        try:
            # A new session: a signal to the group reaches its children, and Ctrl-C only reaches the launcher.
            self.process = subprocess.Popen(
                [*_tied(), *command], env={**env, **added}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, start_new_session=True, pass_fds=[self._record.fd],
            )  # fmt: skip
        except BaseException:
            self._record.close()
            raise
        self.reader = threading.Thread(target=self._forward_output, daemon=True)
        self.reader.start()
        threading.Thread(target=self._note_end, daemon=True).start()

    def poll(self) -> int | None:
        """Exit status as in a shell (128 + signal), None while it runs; kills children that an ended process left."""
        if self.status is None and (code := self.process.poll()) is not None:
            self.status = 128 - code if code < 0 else code
            self.ended = self.ended or time.monotonic()
            self.signal_group(signal.SIGKILL)
        return self.status

    def send(self, signum: int) -> None:
        """Signal the process and its children if it still runs."""
        if self.poll() is None:
            self.signal_group(signum)

    def signal_group(self, signum: int) -> None:
        """Signal what is left of the process's group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signum)

    def read_status(self) -> Status:
        """What it reported last; in phase start before its first report."""
        found = self._record.read()
        # A record that another process wrote is a child's, which inherited the variables.
        return found or Status("start", None, self.started, self.process.pid, {})

    def is_stopped(self) -> bool:
        """Whether a signal (SIGSTOP) holds the process (Linux)."""
        with suppress(OSError), open(f"/proc/{self.process.pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
        return False

    def close(self, timeout: float = 30.0) -> bool:
        """Kill what still runs, and wait until its output is forwarded; False if it does not end in `timeout` seconds.

        A process that waits in the kernel, for storage that went away, cannot be killed.
        """
        self.send(signal.SIGKILL)
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        self.poll()
        self.reader.join(timeout=5)
        self._record.close()
        return True

    def _note_end(self) -> None:
        self.process.wait()
        self.ended = self.ended or time.monotonic()

    def _forward_output(self) -> None:
        assert self.process.stdout is not None
        prefix = f"[{self.rank}] " if self.rank else ""
        with self.process.stdout as output:
            for line in output:
                text = line.decode(errors="replace").rstrip("\n")
                self.tail.append(text)
                # One write per line, so that lines of different processes are not mixed.
                sys.stdout.write(f"{prefix}{text}\n")
                sys.stdout.flush()


# Asks the kernel for SIGKILL (9) when the parent dies (PR_SET_PDEATHSIG, 1), then becomes the command by exec.
# A separate program does this, since code between fork and exec may deadlock in a multi-threaded parent.
_TIE = (
    "import ctypes, os, sys\n"
    "ctypes.CDLL(None).prctl(1, 9)\n"
    "if os.getppid() != int(sys.argv[1]): sys.exit(1)\n"
    "os.execvp(sys.argv[2], sys.argv[2:])"
)


def _tied() -> list[str]:
    """Arguments before a command that end it with the launcher, however that ends (Linux only)."""
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid())] if sys.platform == "linux" else []
