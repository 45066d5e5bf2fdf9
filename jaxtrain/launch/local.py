"""Starting several processes of one job on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from jaxtrain.config import ConfigError
from jaxtrain.launch.process import visible_gpus

GRACE_S = 5.0
"""Seconds that other processes get after one has failed; they cannot save a checkpoint without it."""
SIGNAL_GRACE_S = 120.0
"""Seconds that processes get to save and exit after a signal to the launcher; a second signal kills them at once."""
POLL_S = 0.05


class _Worker:
    """One started process, and a thread that forwards its output."""

    def __init__(self, number: int, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.number = number
        self.status: int | None = None
        self.tail: deque[str] = deque(maxlen=20)
        # A new session: a signal to the group reaches its children, and Ctrl-C reaches it only through the launcher.
        self.process = subprocess.Popen(
            [*_tied(), *command], env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self.reader = threading.Thread(target=self._forward_output, daemon=True)

    def poll(self) -> int | None:
        """Exit status as in a shell (128 + signal), None while it runs; kills children that an ended process left."""
        if self.status is None and (code := self.process.poll()) is not None:
            self.status = 128 - code if code < 0 else code
            self._signal_group(signal.SIGKILL)
        return self.status

    def send(self, signum: int) -> None:
        """Signal the process and its children if it still runs."""
        if self.poll() is None:
            self._signal_group(signum)

    def _signal_group(self, signum: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signum)

    def _forward_output(self) -> None:
        assert self.process.stdout is not None
        prefix = f"[{self.number}] " if self.number else ""
        for line in self.process.stdout:
            text = line.decode(errors="replace").rstrip("\n")
            self.tail.append(text)
            # One write per line, so that lines of different processes are not mixed.
            sys.stdout.write(f"{prefix}{text}\n")
            sys.stdout.flush()


def launch(
    command: Sequence[str], processes: int, devices_per_process: int | None = None, grace: float = GRACE_S
) -> int:
    """Run `command --coordinator 127.0.0.1:PORT --processes N --process-id i` N times; 0, or the first failed status.

    Lines of process 0 are printed as they are, lines of process i after "[i] ". When a process fails, the others get
    SIGTERM, and SIGKILL after `grace` seconds. SIGINT and SIGTERM are forwarded. No process outlives the launcher, even
    if that is killed. Each process gets `devices_per_process` CPU devices, or as many GPUs. Raises ConfigError for
    impossible numbers.
    """
    environments = [dict(env) for env in worker_environments(processes, devices_per_process, os.environ)]
    address = f"127.0.0.1:{free_port()}"
    workers: list[_Worker] = []
    try:
        with _signals_to(workers) as interrupted:
            for i, env in enumerate(environments):
                words = [*command, "--coordinator", address, "--processes", str(processes), "--process-id", str(i)]
                workers.append(_Worker(i, words, env))
            for worker in workers:
                worker.reader.start()
            return _wait(workers, grace, interrupted)
    finally:
        for worker in workers:
            worker.send(signal.SIGKILL)
            worker.process.wait()
            worker.poll()


def worker_environments(processes: int, devices: int | None, env: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Environment of each process: its number of CPU devices, and its GPUs if this machine has some.

    Raises ConfigError if there are too few GPUs.
    """
    if processes < 1 or (devices is not None and devices < 1):
        raise ConfigError(f"--processes {processes} --devices-per-process {devices}: use positive numbers")
    gpus = 0 if env.get("JAX_PLATFORMS") == "cpu" else visible_gpus(env)
    each = devices or gpus // processes
    if gpus and (each == 0 or each * processes > gpus):
        raise ConfigError(
            f"--processes {processes} with {each or 1} GPUs each needs {(each or 1) * processes}, this machine shows "
            f"{gpus}: lower --processes or --devices-per-process, or set JAX_PLATFORMS=cpu to simulate devices"
        )
    names = env.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    width = shutil.get_terminal_size().columns - len("[0] ")
    for i in range(processes):
        added = {"PYTHONUNBUFFERED": "1", "COLUMNS": str(width)}
        if devices is not None:
            added["JAX_NUM_CPU_DEVICES"] = str(devices)
        if gpus:
            added["CUDA_VISIBLE_DEVICES"] = ",".join(names[i * each : (i + 1) * each])
        yield {**env, **added}


def free_port() -> int:
    """A TCP port on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(workers: Sequence[_Worker], grace: float, interrupted: Callable[[], float | None]) -> int:
    """Wait for all workers; the first failure ends the others."""
    failed: _Worker | None = None
    deadline: float | None = None
    # A list, not a generator: every worker is polled.
    while None in [worker.poll() for worker in workers]:
        if failed is None:
            failed = next((worker for worker in workers if worker.status), None)
            if failed is not None and interrupted() is None:
                deadline = time.monotonic() + grace
                for worker in workers:
                    worker.send(signal.SIGTERM)
        limit = min((moment for moment in (deadline, interrupted()) if moment is not None), default=None)
        if limit is not None and time.monotonic() >= limit:
            for worker in workers:
                worker.send(signal.SIGKILL)
        time.sleep(POLL_S)
    for worker in workers:
        worker.reader.join(timeout=5)
    failed = failed or next((worker for worker in workers if worker.status), None)
    if failed is None:
        return 0
    if interrupted() is None:
        _explain(failed, len(workers))
    return failed.status or 1


def _explain(worker: _Worker, processes: int) -> None:
    lines = "\n".join(f"  {line}" for line in worker.tail) or "  (it printed nothing)"
    print(
        f"jaxtrain: process {worker.number} of {processes} ended with status {worker.status}, the others were ended; "
        f"its last lines:\n{lines}",
        file=sys.stderr,
        flush=True,
    )


@contextmanager
def _signals_to(workers: Sequence[_Worker]) -> Iterator[Callable[[], float | None]]:
    """Forward SIGINT and SIGTERM (main thread only); yields a function: the deadline after a signal, None before."""
    deadline: float | None = None

    def forward(signum: int, _: object) -> None:
        nonlocal deadline
        deadline = time.monotonic() + SIGNAL_GRACE_S if deadline is None else 0.0
        for worker in workers:
            worker.send(signum)

    here = threading.current_thread() is threading.main_thread()
    previous = {s: signal.signal(s, forward) for s in (signal.SIGINT, signal.SIGTERM)} if here else {}
    try:
        yield lambda: deadline
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


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
