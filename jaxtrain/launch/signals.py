"""Signals to the launcher: passed on to the processes, which save and exit; a second one ends them at once."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from jaxtrain.launch.worker import Worker

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
GRACE_S = 120.0
"""Seconds that processes get to save and exit after a signal to the launcher."""


class Signals:
    """What the launcher was told: `number` of the first signal, `deadline` (monotonic) of its processes' grace."""

    def __init__(self, grace: float = GRACE_S) -> None:
        self.grace = grace
        self.number: int | None = None
        self.deadline: float | None = None
        self._workers: Sequence[Worker] = ()
        self._received = threading.Event()

    @contextmanager
    def handled(self) -> Iterator[Signals]:
        """Receive signals in the body (in the main thread; elsewhere nothing is received)."""
        here = threading.current_thread() is threading.main_thread()
        previous = {number: signal.signal(number, self._receive) for number in FORWARDED} if here else {}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextmanager
    def to(self, workers: Sequence[Worker]) -> Iterator[None]:
        """Pass signals on to these processes in the body, also to those that are added to the list."""
        self._workers = workers
        try:
            yield
        finally:
            self._workers = ()

    def wait(self, seconds: float) -> bool:
        """Sleep; returns early, with True, when a signal comes or came."""
        return self._received.wait(seconds)

    def _receive(self, number: int, frame: object) -> None:
        if self.deadline is None:
            self.number, self.deadline = number, time.monotonic() + self.grace
        else:
            self.deadline = 0.0
        self._received.set()
        for worker in self._workers:
            worker.send(number)
