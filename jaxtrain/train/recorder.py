"""Metrics of each step: read from the device one step late, counted, and written to the log."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxtrain.data import Corpus
from jaxtrain.observe.log import Log, MetricsRow
from jaxtrain.train.experts import loads_every, traffic_metrics
from jaxtrain.train.phase_steps import PhaseSteps
from jaxtrain.train.resolve import Bound
from jaxtrain.train.skipped import diverged, why_skipped


@dataclass
class Counters:
    """Where a run stands: steps done, scored tokens of applied steps, skipped steps; what its newest step was."""

    step: int = 0
    tokens: int = 0
    skipped: int = 0
    rollbacks: int = 0
    in_a_row: int = 0
    """Skipped steps since the last one that was applied."""
    spike: str | None = None
    """Why the newest recorded step is a spike."""
    eval_loss: tuple[int, float] | None = None
    """Step and value of the last held-out loss."""


@dataclass(frozen=True)
class _Pending:
    """A step whose metrics are still on the device."""

    step: int
    metrics: dict[str, jax.Array]
    wait: float


class Recorder:
    """Turns the device's metrics into rows of metrics.jsonl.

    Rows lag one step behind the device, so that the device never waits for the host: `push` records the step before.
    """

    def __init__(
        self, bound: Bound, corpus: Corpus, phases: PhaseSteps, log: Log, counters: Counters, event: Callable[..., None]
    ) -> None:
        self._event = event
        self._bound, self._corpus, self._phases, self._log, self._counters = bound, corpus, phases, log, counters
        self._pending: _Pending | None = None
        self._first: dict[str, Any] = {}
        self._advance: Callable[[MetricsRow], None] = lambda row: None
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leave what came before out of the next step's time (compilation, evaluation)."""
        self._mark = time.perf_counter()

    def show_progress(self, advance: Callable[[MetricsRow], None]) -> None:
        """Call `advance` with each row."""
        self._advance = advance

    def before_first(self, values: Mapping[str, Any]) -> None:
        """Values of before the first step; they join its row as NAME_before."""
        self._first = {f"{name}_before": value for name, value in values.items()}

    def push(self, step: int, metrics: dict[str, jax.Array], wait: float) -> None:
        """Record the step before; `step` waits for the next call of `push` or `flush`."""
        self.flush()
        self._pending = _Pending(step, metrics, wait)

    def flush(self, evaluate: Callable[[], Mapping[str, Any]] | None = None) -> None:
        """Wait for the pending step and record it; what `evaluate` returns joins its row.

        Raises DivergedError after precision.max_skipped skipped steps in a row.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        values = {name: value.tolist() for name, value in jax.device_get(pending.metrics).items()}
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        applied, spike = bool(values.pop("applied")), bool(values.pop("spike", False))
        self._counters.in_a_row = int(values.pop("skipped_in_a_row"))
        row = self._row(pending, values, applied, seconds)
        if evaluate is not None:
            row |= evaluate()
            self.restart_clock()
        self._log.record(row)
        self._advance(row)
        self._counters.spike = why_skipped(values, spike) if spike else None
        if not applied:
            self._report_skipped(pending.step, values, why_skipped(values, spike), spike)

    def _row(self, pending: _Pending, values: dict[str, Any], applied: bool, seconds: float) -> MetricsRow:
        counters, step = self._counters, pending.step
        counters.tokens += values["scored_tokens"] if applied else 0
        counters.skipped += not applied
        traffic_PP = values.pop("expert_traffic", None)
        if step % loads_every(self._bound.config.model):
            values.pop("expert_load", None)
        row = {"step": step, **values, "tokens_total": counters.tokens, "skipped_total": counters.skipped}
        row["records_skipped"] = self._corpus.skipped
        row |= self._experts(step, traffic_PP, values.get("overflowed", 0))
        warms_up = step == self._phases.compiled_at + 1
        row |= self._phases.meter.record(values["scored_tokens"], seconds, pending.wait, compiled=warms_up)
        return row | (self._first if step == 1 else {})

    def _experts(self, step: int, traffic_PP: list[list[float]] | None, overflowed: int) -> dict[str, float]:
        """Bytes of a step's traffic between experts; tokens that overflowed a bounded buffer are reported."""
        if traffic_PP is None:
            return {}
        if overflowed:
            self._log.info(
                f"step {step}: {overflowed:,} choices of experts did not fit the receive buffer and count as zero "
                f"(model.moe.buffer {self._bound.config.model.moe.buffer}): raise it, or null for the worst case"
            )
        return traffic_metrics(traffic_PP, self._bound.expert_token_bytes, self._bound.expert_crossings)

    def _report_skipped(self, step: int, values: Mapping[str, Any], why: str, spike: bool) -> None:
        """Report a skipped step; raises DivergedError where it is one too many, or the last of a diverged run."""
        config, in_a_row, scale = self._bound.config, self._counters.in_a_row, values["loss_scale"]
        self._event("spike" if spike else "skipped", step=step, why=why)
        self._log.info(f"step {step} skipped: {why} (loss scale {scale:g}, {in_a_row} in a row)")
        # One skipped step at the end is no divergence where it is a spike or float16 that tries a larger loss scale.
        bearable = 1 if spike or config.precision.compute == "float16" else 0
        at_the_end = step >= config.train.steps and in_a_row > bearable
        if at_the_end or in_a_row >= config.precision.max_skipped:
            raise diverged(config, self._log.run_dir, step, in_a_row, why, scale)
