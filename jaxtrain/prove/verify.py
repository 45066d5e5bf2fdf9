"""Compare the steps of a shrunk configuration under every layout with a reference implementation on one device."""

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
from jaxtrain.prove.adamw import missing_in_numpy, reference_steps
from jaxtrain.prove.batches import StepBatch, adversarial_batches, randomize_masked, repack
from jaxtrain.prove.compare import Check, compare, first_failure
from jaxtrain.prove.layouts import (
    SkippedLayout,
    VerifyLayout,
    applicable_layouts,
    listed_layouts,
    parse_layout,
    without_layout,
)
from jaxtrain.prove.measure import Outcome, StepRunner, random_state
from jaxtrain.prove.shrink import SHRINK_RULES, shrink
from jaxtrain.train.resolve import Bound, bind

LOSS_SCALE = 3.0
"""Loss scale of the layouts; the reference has 1."""
ADAMW_ROW = "one device against AdamW in NumPy"
"""Name of the row that checks clipping, the schedule and the optimizer, which all layouts share."""
FAST_CPU = {"xla_backend_optimization_level": 0}
"""XLA options for simulated devices: the same partitioned program, less optimised machine code."""

COMPILERS = 2
"""Number of layouts that compile concurrently."""


@dataclass(frozen=True)
class LayoutResult:
    """The verdict on one layout: passed, failed or refused; `reason` is the error if it raised one."""

    name: str
    status: str
    seconds: float
    worst: Check | None = None
    failure: Check | None = None
    reason: str = ""


@dataclass(frozen=True)
class VerifyReport:
    """The result of `verify`."""

    config: RunConfig
    devices: int
    results: tuple[LayoutResult, ...]
    requested: str = "all"
    not_applicable: tuple[SkippedLayout, ...] = ()
    rules: tuple[str, ...] = SHRINK_RULES
    """How the configuration was made smaller."""

    @property
    def counts(self) -> dict[str, int]:
        """Number of results of each status."""
        statuses = [result.status for result in self.results]
        return {status: statuses.count(status) for status in ("passed", "failed", "refused")}

    @property
    def faults(self) -> list[LayoutResult]:
        """Failed layouts, and layouts that were requested by name and refused."""
        named = self.requested != "all"
        return [r for r in self.results if r.status == "failed" or (named and r.status == "refused")]

    @property
    def passed(self) -> bool:
        """Whether at least one row passed and there is no fault."""
        return self.counts["passed"] > 0 and not self.faults


def verify(
    config: RunConfig,
    layouts: str = "all",
    devices: list[Any] | None = None,
    on_progress: Callable[[int, int, LayoutResult | None], None] = lambda done, total, result: None,
) -> VerifyReport:
    """Compare layouts of the shrunk configuration with the reference, on `devices` (default: all of JAX).

    layouts: all, file (the configuration's own), or a list such as 'data=2,tensor=2;tensor=4,rules.preset=[tensor]'.
    on_progress: called with the number of finished rows, their total, and the latest result.

    With `all`, rows of the table that do not apply to the model or the devices are left out and listed in the report.
    Any other layout that the trainer refuses has the status "refused". Raises ConfigError if `layouts` names none.
    """
    small, found = shrink(config), jax.devices() if devices is None else devices
    names, skipped = applicable_layouts(small, found) if layouts == "all" else (listed_layouts(layouts), [])
    numpy_gap = missing_in_numpy(small.optimizer)
    if numpy_gap:
        skipped.append(SkippedLayout(ADAMW_ROW, numpy_gap))
    total = len(names) + (not numpy_gap)
    on_progress(0, total, None)
    verifier, results = Verifier(small, found), []

    def add(result: LayoutResult) -> None:
        results.append(result)
        on_progress(len(results), total, result)

    if not numpy_gap:
        add(verifier.check_adamw())
    # One layout runs while others compile. Two programs that run at once on the same devices could deadlock.
    with ThreadPoolExecutor(COMPILERS) as pool:
        for compiled in pool.map(verifier.compile, names):
            add(verifier.run(compiled))
    return VerifyReport(small, len(found), tuple(results), layouts, tuple(skipped))


@dataclass(frozen=True)
class CompiledLayout:
    """A compiled layout, and the seconds that compilation took."""

    layout: VerifyLayout
    setup: Bound
    runner: StepRunner
    seconds: float


class Verifier:
    """Computes the reference of a shrunk configuration and compares layouts with it."""

    def __init__(self, config: RunConfig, devices: list[Any]) -> None:
        self._config, self._devices = config, devices
        self._options = FAST_CPU if devices[0].platform == "cpu" else {}
        train, data, moe = config.train, config.data, config.model.moe
        self._step_batches = adversarial_batches(train.global_batch, data.seq_len, config.model.token_rows)
        # A balance loss or a capacity per sequence depends on the packing: the reference is packed like the layout.
        self._packed_reference = bool(moe.experts) and (moe.balance == "sequence" or moe.capacity is not None)
        sequences = max(len(step_batch.spans) for step_batch in self._step_batches) * 2
        reference = replace(without_layout(config), "mesh.data=1", f"train.global_batch={sequences}")
        self._reference = bind(self._with_xla_options(reference), devices[:1])
        self._initial = random_state(self._reference)
        with use_reference():
            self._runner = StepRunner(self._reference, 1.0)
        self._reference_outcome = cache(self._run_reference)

    def check_adamw(self) -> LayoutResult:
        """The reference's steps against AdamW in NumPy; `missing_in_numpy` must be empty."""
        start = time.monotonic()
        batches = [self._reference_batch(step_batch) for step_batch in self._step_batches]
        want = reference_steps(self._reference, self._runner, self._initial, batches)
        return self._judge(ADAMW_ROW, start, self._reference_outcome(tuple(self._step_batches)), want)

    def compile(self, name: str) -> CompiledLayout | LayoutResult:
        """The compiled step of a layout, or the result if it cannot be compiled."""
        start = time.monotonic()
        try:
            layout = parse_layout(self._config, name, len(self._devices))
            setup = bind(self._with_xla_options(layout.config), self._devices[: layout.devices])
            return CompiledLayout(layout, setup, StepRunner(setup, LOSS_SCALE), time.monotonic() - start)
        except Exception as error:
            return error_result(name, start, error)

    def run(self, compiled: CompiledLayout | LayoutResult) -> LayoutResult:
        """Run a layout and compare it with the reference."""
        if isinstance(compiled, LayoutResult):
            return compiled
        name, start = compiled.layout.name, time.monotonic() - compiled.seconds
        try:
            step_batches = self._packed_for(compiled.layout)
            batches, randomized = self._batches(compiled.setup.batch_shape.global_batch, step_batches)
            got = compiled.runner.run(self._initial, batches, randomized)
        except Exception as error:
            return error_result(name, start, error)
        return self._judge(name, start, got, self._reference_outcome(step_batches))

    def _packed_for(self, layout: VerifyLayout) -> tuple[StepBatch, ...]:
        """The step batches, repacked if the layout sets data.packing."""
        data = layout.config.data
        if "data.packing" not in layout.name:
            return tuple(self._step_batches)
        return tuple(repack(step_batch, data.packing, data.seq_len) for step_batch in self._step_batches)

    def _batches(self, batch_size: int, step_batches: tuple[StepBatch, ...]) -> tuple[list[HostBatch], HostBatch]:
        seq_len, model = self._config.data.seq_len, self._config.model
        batches = [step_batch.packed(batch_size, seq_len) for step_batch in step_batches]
        # Unscored tokens of a mixture count in its balance loss; multi-token prediction scores tokens by later labels.
        tails = not (model.moe.experts or model.mtp)
        return batches, randomize_masked(batches[0], model.token_rows, seq_len, tails)

    def _reference_batch(self, step_batch: StepBatch) -> HostBatch:
        batch_size, seq_len = self._reference.batch_shape.global_batch, self._config.data.seq_len
        make = step_batch.packed if self._packed_reference else step_batch.unpacked
        return make(batch_size, seq_len)

    def _run_reference(self, step_batches: tuple[StepBatch, ...]) -> Outcome:
        return self._runner.run(self._initial, [self._reference_batch(step_batch) for step_batch in step_batches])

    def _judge(self, name: str, start: float, got: Outcome, want: Outcome) -> LayoutResult:
        checks = compare(got, want, self._initial, self._config.optimizer)
        gradients = [check for check in checks if check.kind == "gradient"] or checks
        failure = first_failure(checks)
        worst = max(gradients, key=lambda check: check.error_over_bound)
        return LayoutResult(name, "failed" if failure else "passed", time.monotonic() - start, worst, failure)

    def _with_xla_options(self, config: RunConfig) -> RunConfig:
        return config.model_copy(update={"xla": self._options})


def error_result(name: str, start: float, error: Exception) -> LayoutResult:
    """Refused for a ConfigError; failed for any other error, such as one of the compiler."""
    refused = isinstance(error, ConfigError)
    reason = str(error) if refused else f"{type(error).__name__}: {error}"
    return LayoutResult(name, "refused" if refused else "failed", time.monotonic() - start, reason=reason)
