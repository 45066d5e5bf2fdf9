"""Which checkpoints are kept and when one is due by the clock."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxtrain.config import CheckpointConfig
from jaxtrain.launch.coordination import exchange

CLOCK_STRIDE = 100
"""Most steps between two looks at the clock of process 0."""
CLOCK_LIMIT = 3600.0
"""Seconds that the processes may differ in reaching a step."""


class Facts(NamedTuple):
    """What the retention of a checkpoint depends on."""

    good: bool = True
    """Whether the checkpoint's step was applied to a finite state, not skipped."""
    eval_loss: float | None = None
    """Held-out loss at the checkpoint's step, in nats a token."""


def facts_of(meta: Mapping[str, Any]) -> Facts:
    """The facts in a checkpoint's metadata; checkpoints of before these facts count as good."""
    loss = meta.get("eval_loss")
    return Facts(bool(meta.get("good", True)), loss if isinstance(loss, int | float) and math.isfinite(loss) else None)


def retained(checkpoints: Mapping[int, Facts], config: CheckpointConfig) -> set[int]:
    """The steps to keep: the newest, the newest `keep` good ones, good multiples of `keep_every`, the `keep_best` best.

    Checkpoints of skipped steps never displace good ones. Of equal losses the later one is better.
    """
    if not checkpoints:
        return set()
    good = sorted((step for step, facts in checkpoints.items() if facts.good), reverse=True)
    kept = {max(checkpoints), *good[: config.keep]}
    if config.keep_every is not None:
        kept.update(step for step in good if step % config.keep_every == 0)
    losses = [(loss, -step) for step in good if (loss := checkpoints[step].eval_loss) is not None]
    return kept | {-step for _, step in sorted(losses)[: config.keep_best or 0]}


class WallClock:
    """Whether checkpoint.every_minutes have passed, by the clock of process 0; the same answer on all processes.

    Each process computes from process 0's answer at which step to ask next, about half of the remaining time ahead.
    """

    def __init__(self, minutes: float | None) -> None:
        self._limit = None if minutes is None else 60 * minutes
        self.restart(0)

    def restart(self, step: int) -> None:
        """Count from now; a checkpoint of `step` was begun."""
        self._began, self._from, self._next = time.monotonic(), step, step + 1

    def due(self, step: int) -> bool:
        """Whether the time has passed. All processes must call it at the same steps."""
        if self._limit is None or step < self._next:
            return False
        elapsed = exchange("checkpoint.every_minutes", time.monotonic() - self._began, CLOCK_LIMIT)[0]
        left = self._limit - elapsed
        step_seconds = max(elapsed / max(step - self._from, 1), 1e-6)
        self._next = step + min(max(int(left / step_seconds / 2), 1), CLOCK_STRIDE)
        return left <= 0
