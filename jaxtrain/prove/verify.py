"""A run's configuration, made small, computed plainly once and under every layout: do they agree?"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax

from jaxtrain.config import ConfigError, RunConfig, replace
from jaxtrain.data.packing import HostBatch
from jaxtrain.ops.reference import use_reference
from jaxtrain.prove.adamw import reference_steps
from jaxtrain.prove.batches import StepBatch, hostile_steps, repacked, scrambled
from jaxtrain.prove.compare import Check, compare, guilty
from jaxtrain.prove.layouts import VerifyLayout, bare, layout_of, names_of
from jaxtrain.prove.measure import Bench, Outcome, random_state
from jaxtrain.prove.shrink import shrink
from jaxtrain.train.setup import Setup, resolve

SCALE = 3.0
"""Factor of the loss under a layout; the reference has none."""
RULE = "one device against AdamW in NumPy"
"""Name of the row that checks clipping, schedule and update rule, which every layout shares."""
FAST_CPU = {"xla_backend_optimization_level": 0}
"""Compiler options on simulated devices: the same partitioned program, with a shorter way to machine code."""

COMPILERS = 2
"""Layouts that compile at once."""


@dataclass(frozen=True)
class Result:
    """One layout's verdict: passed, failed or refused; `reason` says why it was refused or broke."""

    name: str
    status: str
    seconds: float
    worst: Check | None = None
    guilty: Check | None = None
    reason: str = ""


@dataclass(frozen=True)
class VerifyReport:
    """What a verification found."""

    config: RunConfig
    devices: int
    results: tuple[Result, ...]
    asked: str = "all"

    @property
    def counts(self) -> dict[str, int]:
        """Results of each status."""
        statuses = [result.status for result in self.results]
        return {status: statuses.count(status) for status in ("passed", "failed", "refused")}

    @property
    def faults(self) -> list[Result]:
        """What failed, and what was asked for by name and refused."""
        named = self.asked != "all"
        return [r for r in self.results if r.status == "failed" or (named and r.status == "refused" and r.name != RULE)]

    @property
    def passed(self) -> bool:
        """Whether something passed and there is no fault."""
        return self.counts["passed"] > 0 and not self.faults


def verify(
    config: RunConfig,
    layouts: str = "all",
    devices: list[Any] | None = None,
    on_progress: Callable[[int, int, Result | None], None] = lambda done, of, result: None,
) -> VerifyReport:
    """Compare a plain computation of the shrunk configuration with its layouts, on `devices` (default: jax').

    `layouts`: all, file (the configuration's own), or texts such as 'data=2,tensor=2;tensor=4,rules.preset=[tensor]'.
    `told` hears how many of how many rows are done, and the latest. What the trainer refuses is a result; raises
    ConfigError where `layouts` names none.
    """
    small = shrink(config)
    names, found = names_of(small, layouts), jax.devices() if devices is None else devices
    on_progress(0, len(names) + 1, None)
    proof = Verifier(small, found)
    results = [proof.rule()]
    # One layout runs while others compile; two programs at once on the same devices would wait for each other.
    with ThreadPoolExecutor(COMPILERS) as pool:
        for compiled in pool.map(proof.compile, names):
            on_progress(len(results), len(names) + 1, results[-1])
            results.append(proof.run(compiled))
    on_progress(len(results), len(names) + 1, results[-1])
    return VerifyReport(small, len(found), tuple(results), layouts)


@dataclass(frozen=True)
class Compiled:
    """A layout that is ready to run, and the seconds that took."""

    layout: VerifyLayout
    setup: Setup
    bench: Bench
    seconds: float


class Verifier:
    """The reference of a shrunk configuration, and layouts compared with it."""

    def __init__(self, config: RunConfig, devices: list[Any]) -> None:
        self._config, self._devices = config, devices
        self._options = FAST_CPU if devices[0].platform == "cpu" else {}
        train, data, moe = config.train, config.data, config.model.moe
        self._updates = hostile_steps(train.global_batch, data.seq_len, config.model.vocab_size)
        # A balance of each row is a matter of what lies in it: then the reference has the rows of the layout.
        self._by_row = bool(moe.experts) and moe.balance == "sequence"
        rows = max(len(update.spans) for update in self._updates) * 2
        plainly = replace(bare(config), "mesh.data=1", f"train.global_batch={rows}")
        self._reference = resolve(self._fast(plainly), devices[:1])
        self._initial = random_state(self._reference)
        with use_reference():
            self._bench = Bench(self._reference, 1.0)
        self._outcome = cache(self._measure)

    def rule(self) -> Result:
        """The reference's updates against NumPy."""
        start = time.monotonic()
        optimizer = self._config.optimizer.name
        if optimizer != "adamw":
            return Result(RULE, "refused", 0.0, reason=f"optimizer.name is {optimizer}: the rule in NumPy is adamw")
        batches = [self._plain(update) for update in self._updates]
        want = reference_steps(self._reference, self._bench, self._initial, batches)
        return self._verdict(RULE, start, self._outcome(tuple(self._updates)), want)

    def compile(self, name: str) -> Compiled | Result:
        """One layout's step, or the verdict where there is none."""
        start = time.monotonic()
        try:
            laid = layout_of(self._config, name, len(self._devices))
            setup = resolve(self._fast(laid.config), self._devices[: laid.devices])
            return Compiled(laid, setup, Bench(setup, SCALE), time.monotonic() - start)
        except Exception as error:
            return _broken(name, start, error)

    def run(self, compiled: Compiled | Result) -> Result:
        """One layout against the reference."""
        if isinstance(compiled, Result):
            return compiled
        name, start = compiled.layout.name, time.monotonic() - compiled.seconds
        try:
            updates = self._laid(compiled.layout)
            got = compiled.bench.run(self._initial, *self._batches(compiled.setup.batch_shape.global_batch, updates))
        except Exception as error:
            return _broken(name, start, error)
        return self._verdict(name, start, got, self._outcome(updates))

    def _laid(self, laid: VerifyLayout) -> tuple[StepBatch, ...]:
        data = laid.config.data
        if "data.packing" not in laid.name:
            return tuple(self._updates)
        return tuple(repacked(update, data.packing, data.seq_len) for update in self._updates)

    def _batches(self, rows: int, updates: tuple[StepBatch, ...]) -> tuple[list[HostBatch], HostBatch]:
        length, model = self._config.data.seq_len, self._config.model
        batches = [update.packed(rows, length) for update in updates]
        # In a mixture an unscored token still counts in the balance, and a further token is scored by its own label.
        return batches, scrambled(batches[0], model.vocab_size, length, tails=not (model.moe.experts or model.mtp))

    def _plain(self, update: StepBatch) -> HostBatch:
        rows, length = self._reference.batch_shape.global_batch, self._config.data.seq_len
        return update.packed(rows, length) if self._by_row else update.alone(rows, length)

    def _measure(self, updates: tuple[StepBatch, ...]) -> Outcome:
        return self._bench.run(self._initial, [self._plain(update) for update in updates])

    def _verdict(self, name: str, start: float, got: Outcome, want: Outcome) -> Result:
        checks = compare(got, want, self._initial)
        gradients = [check for check in checks if check.kind == "gradient"] or checks
        culprit = guilty(checks)
        worst = max(gradients, key=lambda check: check.excess)
        return Result(name, "failed" if culprit else "passed", time.monotonic() - start, worst, culprit)

    def _fast(self, config: RunConfig) -> RunConfig:
        return config.model_copy(update={"xla": self._options})


def _broken(name: str, start: float, error: Exception) -> Result:
    """What the trainer refuses, or a finding like any other: a layout that breaks the compiler or loses a target."""
    refused = isinstance(error, ConfigError)
    reason = str(error) if refused else f"{type(error).__name__}: {error}"
    return Result(name, "refused" if refused else "failed", time.monotonic() - start, reason=reason)
