"""Signals that stop a run: SIGTERM, SIGINT, and SIGUSR1, Slurm's early signal (--signal=USR1@SECONDS).

The first one asks for a checkpoint at a step border, a second one ends the process at once. Before the first step there
is nothing to save, so one ends it.

Processes agree on the border without waiting for each other: whoever has a signal at the border of step n publishes
n + LAG in the coordination service, and each process looks there at each border. The recorder lets a process reach the
border of step m only after step m - 1 is complete on the device, and no step completes before all processes have
dispatched it. A process at the border of step n + LAG therefore knows that all others have left the border of step n,
where the one with the signal had published: it finds the key.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import jax

from jaxtrain.launch.coordination import client
from jaxtrain.launch.heartbeat import RANK

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
LAG = 2
"""Steps between the border at which a signal is published and the one at which all processes save."""
ONE_REQUEST_S = 2.0
"""Seconds after a signal in which another one is the same request, for a process that a launcher started.

Slurm signals every process of a step, and the launcher passes on what it gets.
"""
UNWIND_S = 5.0
"""Seconds that a start-up gets to remove its temporary files; native code such as a compilation cannot be left."""


class Interrupted(KeyboardInterrupt):
    """A signal before the first step; `status` is 128 + its number."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.status = 128 + signum


class StopSignals:
    """What a run knows of signals: none yet, or the one that asked it to stop."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._key = directory, f"jaxtrain/stop/{next(_runs)}"
        self._moment = "start"
        self._repeats_until = 0.0
        self._timer: threading.Timer | None = None
        self.received: int | None = None
        """Number of the first signal of this process."""

    @contextmanager
    def handled(self) -> Iterator[StopSignals]:
        """Handle signals until the body ends; in a thread other than the main one Python cannot, and does not."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        # The interpreter writes each signal's number to `sending` at once; its handlers wait for the main thread, which
        # may be in native code for minutes.
        receiving, sending = os.pipe()
        os.set_blocking(sending, False)
        previous = {number: signal.signal(number, self._on_main_thread) for number in SIGNALS}
        wakeup = signal.set_wakeup_fd(sending, warn_on_full_buffer=False)
        thread = threading.Thread(target=self._watch, args=(receiving,), name="signals", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup)
            if self._timer is not None:
                self._timer.cancel()
            os.close(sending)
            thread.join()
            os.close(receiving)

    def begin_steps(self) -> None:
        """From now on a signal asks for a checkpoint instead of ending the process."""
        self._moment = "steps"

    def end_steps(self) -> None:
        """From now on a signal asks for nothing that is not done anyway."""
        self._moment = "end"

    def stop_at(self, step: int) -> str | None:
        """The name of the signal for which all processes save at the border of `step`, None to go on.

        Every process calls it at each border, after the step before is complete.
        """
        if jax.process_count() == 1:
            return None if self.received is None else signal.Signals(self.received).name
        found = _peek(self._key)
        if found is None and self.received is not None:
            _put_first(self._key, f"{step + LAG} {signal.Signals(self.received).name}")
            found = _peek(self._key)
        if found is None:
            return None
        border, _, name = found.partition(" ")
        assert step <= int(border), f"step {step} is beyond the border {border} at which all processes save"
        return name if step == int(border) else None

    def resumption(self) -> str:
        """What the same command does after this process is gone, as far as the directory shows."""
        if not (steps := saved_steps(self._directory)):
            return "nothing is saved yet, the same command starts from the beginning"
        return f"the same command resumes at step {steps[-1]}"

    def _on_main_thread(self, number: int, _: FrameType | None) -> None:
        if self._moment == "start":
            raise Interrupted(number, self._ended(number))

    def _ended(self, number: int) -> str:
        return f"{signal.Signals(number).name} before the first step: {self.resumption()}"

    def _watch(self, receiving: int) -> None:
        while numbers := os.read(receiving, 64):
            for number in numbers:
                if number not in SIGNALS:
                    continue
                name, now = signal.Signals(number).name, time.monotonic()
                if now < self._repeats_until:
                    continue
                if self.received is not None:
                    _leave(number, f"{name} again, ended at once: {self.resumption()}")
                self.received = number
                self._repeats_until = now + ONE_REQUEST_S if RANK in os.environ else 0.0
                if self._moment == "start":
                    self._timer = threading.Timer(UNWIND_S, _leave, (number, self._ended(number)))
                    self._timer.daemon = True
                    self._timer.start()
                else:
                    saves = "a checkpoint is saved at the next step border" if self._moment == "steps" else "finishing"
                    _print(f"{name}: {saves}; a second signal ends this process at once")


def saved_steps(directory: Path) -> list[int]:
    """Steps that have a checkpoint in a run directory, in order, read from the names alone."""
    folder = directory / "checkpoints"
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal()) if folder.is_dir() else []


def _peek(key: str) -> str | None:
    try:
        return str(client().key_value_try_get(key))
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" in str(error):
            return None
        raise


def _put_first(key: str, text: str) -> None:
    """Publish a text unless another process was first."""
    try:
        client().key_value_set(key, text)
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise


def _leave(number: int, message: str) -> None:
    _print(message)
    os._exit(128 + number)


def _print(message: str) -> None:
    # One write, without the locks of Python's streams, which the main thread may hold.
    os.write(2, f"jaxtrain: {message}\n".encode())


_runs = itertools.count()
