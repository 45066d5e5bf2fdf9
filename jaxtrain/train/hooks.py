"""Hooks: actions of the loop between two steps.

A hook is any object with `due(run)` and `__call__(run)`. Values that it returns join the metrics row of the step that
just ended. User code passes hooks to `train(config, directory, hooks=[...])`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from jaxtrain.data import Corpus
from jaxtrain.train.resolve import Bound
from jaxtrain.train.step import jit_evaluate
from jaxtrain.train.use import held_out, mean_loss

if TYPE_CHECKING:
    from jaxtrain.train.run import Run


class Hook(Protocol):
    """Acts between two steps."""

    def due(self, run: Run) -> bool:
        """Whether to act after step `run.step` (0: before the first step)."""

    def __call__(self, run: Run) -> Mapping[str, Any] | None:
        """Act; flat scalars that are returned join the step's row of metrics.jsonl."""


class Evaluate:
    """Held-out loss every eval.every steps, before the first step and after the last.

    Raises ConfigError where no document is held out.
    """

    def __init__(self, bound: Bound, corpus: Corpus) -> None:
        self._batches = held_out(bound, corpus)
        self._evaluate = jit_evaluate(bound.step)
        self._every = bound.config.eval.every or 1

    def due(self, run: Run) -> bool:
        """At every eval.every-th step and the last."""
        return run.step % self._every == 0 or run.last

    def __call__(self, run: Run) -> dict[str, Any]:
        """Evaluate and print; the loss joins the row as eval_loss."""
        begin = time.perf_counter()
        loss, scored = mean_loss(self._evaluate, run.state["params"], self._batches)
        run.event("evaluation", step=run.step, seconds=time.perf_counter() - begin)
        run.log.info(f"held-out loss after step {run.step}: {loss:.4f} over {scored:,} tokens")
        run.counters.eval_loss = run.step, loss
        return {"eval_loss": loss}
