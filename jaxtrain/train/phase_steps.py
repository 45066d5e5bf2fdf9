"""The compiled train step of each phase of data.schedule, with a meter for each."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from jaxtrain.data import phase_at
from jaxtrain.launch.coordination import wait_for_all
from jaxtrain.launch.heartbeat import report_phase
from jaxtrain.observe.meter import Meter
from jaxtrain.train.guard import abstract_history
from jaxtrain.train.replay import Replay
from jaxtrain.train.resolve import Bound
from jaxtrain.train.state import TrainState
from jaxtrain.train.step import Batch, compile_step

COMPILE_S = 3600.0
"""Seconds that one process may compile longer than another."""


class PhaseSteps:
    """The train step of the phase that a step belongs to, compiled once when the phase begins."""

    def __init__(self, bound: Bound) -> None:
        self._bound = bound
        self.phase = -1
        self._replay: Replay | None = None
        self.compiled_at = 0
        """Steps done when the current phase was compiled: the next step also warms up."""
        self.compile_s = 0.0
        self.meters: dict[int, Meter] = {}

    def begins(self, done: int) -> bool:
        """Whether another phase begins after `done` steps."""
        return phase_at(self._bound.phases, done) != self.phase

    def enter(self, done: int) -> None:
        """Compile the phase that begins after `done` steps; every process waits for the slowest compiler."""
        begin, bound = time.perf_counter(), self._bound
        self.phase, self.compiled_at = phase_at(bound.phases, done), done
        state = bound.abstract | abstract_history(bound.config.guard, bound.mesh)
        batch, self._replay = bound.phase_batch(self.phase), None
        step = bound.phase_step(self.phase)
        self._train_step = compile_step(step, state, batch)
        if (every := bound.config.guard.replay_every) is not None:
            self._replay = Replay(compile_step(step, state, batch, donate=False), every)
        self.compile_s += time.perf_counter() - begin
        self.meters[self.phase] = self._new_meter(self.phase)
        report_phase("barrier", done)
        wait_for_all("compiled", COMPILE_S)

    def read(self, rows: Sequence[Mapping[str, Any]], warm_ups: Collection[int]) -> None:
        """Measure recorded steps of earlier starts, for a summary without a step of this one.

        `warm_ups`: steps that followed a compilation.
        """
        self.phase = len(self._bound.phases) - 1
        self.meters = {index: self._new_meter(index) for index in range(len(self._bound.phases))}
        for row in rows:
            meter = self.meters[phase_at(self._bound.phases, row["step"] - 1)]
            meter.record(row["scored_tokens"], row["step_s"], row["data_wait_s"], compiled=row["step"] in warm_ups)

    def _new_meter(self, phase: int) -> Meter:
        bound = self._bound
        return Meter(
            bound.config.model,
            bound.phases[phase].seq_len,
            jax.devices()[0].device_kind,
            bound.topology.devices.size,
            bound.config.precision.compute,
            jax.config.jax_default_matmul_precision,
        )

    def train_step(self, state: TrainState, batch: Batch, number: int) -> tuple[TrainState, dict[str, jax.Array]]:
        """The step of a number from 1; the state is donated. Raises CorruptionError where a replay finds other bits."""
        if self._replay is not None and self._replay.due(number):
            return self._replay(state, batch, number)
        return self._train_step(state, batch)

    @property
    def meter(self) -> Meter:
        """The meter of the current phase."""
        return self.meters[self.phase]

    def summary(self) -> dict[str, Any]:
        """Rates of the current phase; with data.schedule, those of each phase of this start too."""
        bound = self._bound
        if len(bound.phases) == 1:
            return self.meter.summary()
        phases = [bound.phases[index].to_json() | each.summary() for index, each in self.meters.items()]
        return {"phases": phases, **self.meter.summary()}
