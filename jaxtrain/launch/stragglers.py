"""Naming ranks that make the others wait at every step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from jaxtrain.launch.watchdog import find_stragglers

LOOK_EVERY_S = 20.0
SILENT_S = 300.0
"""Seconds for which a rank that was named is not named again."""


class Stragglers:
    """Compares the ranks' own times now and then; prints and records a rank that is slow twice in a row."""

    def __init__(self, record: Callable[..., None], every: float = LOOK_EVERY_S) -> None:
        self._record, self._every = record, every
        self._looked = time.monotonic()
        self._before: set[int] = set()
        self._named: dict[int, float] = {}

    def look(self, times: Mapping[int, tuple[float, float]], hosts: Mapping[int, str] | None = None) -> None:
        """Take (seconds waiting for input, seconds of a step) of each rank."""
        now = time.monotonic()
        if now - self._looked < self._every or len(times) < 2:
            return
        self._looked = now
        step_s = max(step for _, step in times.values())
        slow = find_stragglers({rank: own for rank, (own, _) in times.items()}, step_s)
        for rank in sorted(set(slow) & self._before):
            if now - self._named.get(rank, -SILENT_S) >= SILENT_S:
                self._named[rank] = now
                self._report(rank, (hosts or {}).get(rank), times[rank][0], slow[rank], step_s)
        self._before = set(slow)

    def _report(self, rank: int, host: str | None, own_s: float, cost_s: float, step_s: float) -> None:
        where = f"rank {rank} ({host})" if host else f"rank {rank}"
        print(
            f"jaxtrain: {where} makes the others wait: its input takes {own_s:.3g} s, {cost_s:.3g} s more than the "
            f"others' (a step is {step_s:.3g} s); look at the storage and the load of its machine",
            flush=True,
        )
        values = {"rank": rank, "host": host, "input_s": own_s, "cost_s": cost_s, "step_s": step_s}
        # A file system that hangs must not hold the watchdog.
        threading.Thread(target=self._record, args=("straggler",), kwargs=values, daemon=True).start()
