"""A run between two starts: its state, what it reads and writes, and how it resumes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint import Checkpoints
from jaxtrain.checkpoint.order import CheckpointOrder
from jaxtrain.config import ConfigError, RunError, StoppedError
from jaxtrain.data import Corpus
from jaxtrain.launch.heartbeat import report_phase
from jaxtrain.numerics.counter import counter_int
from jaxtrain.observe.events import record_event
from jaxtrain.observe.log import Log
from jaxtrain.train.feed import BatchFeed
from jaxtrain.train.recorder import Counters
from jaxtrain.train.resolve import Bound
from jaxtrain.train.resume import carry_over, config_of_meta, learning_rate_change
from jaxtrain.train.run_dir import check_same_data, checkpoint_meta
from jaxtrain.train.signals import Interrupted, StopSignals
from jaxtrain.train.state import TrainState


class Run:
    """What hooks see of a run: `bound`, `corpus`, `log`, `directory`, `state`, `step`; they may call `stop`."""

    def __init__(
        self,
        bound: Bound,
        corpus: Corpus,
        feed: BatchFeed,
        checkpoints: Checkpoints,
        log: Log,
        directory: Path,
        signals: StopSignals,
        check_lease: Callable[[], None],
    ) -> None:
        self.bound, self.corpus, self.log, self.directory = bound, corpus, log, directory
        self.check_lease = check_lease
        """Raises RunError where another process took the run directory over."""
        self.counters, self.signals = Counters(), signals
        self.feed = feed
        self.resumed_from: int | None = None
        self.stopped: str | None = None
        """Why a hook asked the run to end before its last step."""
        self.given: tuple[TrainState, dict[str, Any]] | None = None
        """The state of a run without a checkpoint that starts from another one's weights, and the record of that."""
        self.origin: dict[str, Any] | None = None
        """The checkpoint whose weights the run began with, recorded in its checkpoints."""
        self.state: TrainState
        self._checkpoints, self._order = checkpoints, CheckpointOrder(bound)

    @property
    def step(self) -> int:
        """Steps done."""
        return self.counters.step

    @property
    def last(self) -> bool:
        """Whether no step follows."""
        return self.stopped is not None or self.step >= self.bound.config.train.steps

    def stop(self, reason: str) -> None:
        """End the run after this step: it is checkpointed, and the same command resumes it."""
        self.stopped = reason

    def event(self, kind: str, **values: Any) -> None:
        """Append to events.jsonl (process 0 only)."""
        if self.log.primary:
            record_event(self.directory, kind, **values)

    @contextmanager
    def recorded_end(self) -> Iterator[None]:
        """Record how the run ended: status 0, or that of the exception, which passes."""
        try:
            yield
        except BaseException as error:
            status = error.status if isinstance(error, ConfigError | RunError | Interrupted) else 1
            self.event("end", step=self.step, status=status, cause=f"{type(error).__name__}: {error}")
            raise
        self.event("end", step=self.step, status=0, cause=self.stopped or "the last step is done")

    def restore(self) -> None:
        """Restore the newest intact checkpoint, or initialise the state.

        Raises ConfigError where corpus or tokenizer are not those of the checkpoint.
        """
        report_phase("restore")
        begin = time.perf_counter()
        found = self._checkpoints.restore(self._order.checkpoint_layout)
        if found is None:
            self._begin()
            return
        config = self.bound.config
        old = config_of_meta(found.meta, f"checkpoint {found.step} of {self.directory}")
        for line in check_same_data(self.directory, config, found.meta, self.corpus):
            self.log.info(line)
        self.state = carry_over(self._order.from_checkpoint(found.state), old, config)
        self.origin = found.meta.get("origin")
        self.feed.set_state(found.data)
        self.resumed_from = found.step
        tokens = counter_int(jax.device_get(self.state["tokens"]))
        self.counters = Counters(found.step, tokens, found.meta["skipped"])
        self.log.resume_at(self.step)
        self.event("restored", step=self.step, seconds=time.perf_counter() - begin, bytes=found.bytes)
        self.log.info(f"resumed at step {self.step} of {self.bound.config.train.steps}, {tokens:,} tokens trained")
        for line in learning_rate_change(old, config, int(self.state["steps"]), tokens):
            self.log.info(line)

    def _begin(self) -> None:
        """The state at step 0: initialised, or with the weights of the run's source."""
        if self.given is None:
            self.state = self.bound.init_state()
        else:
            (self.state, origin), self.given = self.given, None
            what = "weights and optimizer state" if origin["optimizer"] else "weights"
            self.log.info(f"started with the {what} of step {origin['step']} of {origin['run']}")
            self.origin = origin
        self.log.resume_at(0)

    def save_and_stop(self, signal: str) -> None:
        """Save this step durably for a signal; raises StoppedError."""
        begin = time.perf_counter()
        self.save()
        self.wait_for_checkpoints()
        self.event("stopped", step=self.step, signal=signal)
        raise StoppedError(
            f"{signal}: step {self.step} of {self.bound.config.train.steps} is saved "
            f"({time.perf_counter() - begin:.1f} s); the same command resumes there"
        )

    def save(self) -> None:
        """Save a checkpoint of this step; raises RunError where another process took the run directory over."""
        report_phase("checkpoint", self.step)
        self.check_lease()
        counters, bound = self.counters, self.bound
        meta = checkpoint_meta(
            bound.config, bound.topology.sizes, self.corpus, counters.step, int(self.state["steps"]), counters.tokens,
            counters.skipped, self.origin,
        )  # fmt: skip
        # What the retention of checkpoints reads (checkpoint/retention.py).
        meta["good"] = counters.good
        if counters.eval_loss is not None and counters.eval_loss[0] == self.step:
            meta["eval_loss"] = counters.eval_loss[1]
        self._checkpoints.save(self.step, self._order.to_checkpoint(self.state), self.feed.get_state(), meta)

    def checkpoint_due(self) -> bool:
        """Whether a checkpoint is due after this step; all processes must ask at every step."""
        return self._checkpoints.due(self.step)

    def wait_for_checkpoints(self) -> int | None:
        """Wait until every checkpoint is written; the newest step that has one."""
        report_phase("checkpoint", self.step)
        self._checkpoints.wait()
        return self._checkpoints.latest()
