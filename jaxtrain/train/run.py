"""A run between two starts: its state, what it reads and writes, and how it resumes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint import Checkpoints, LocalTier, Restored
from jaxtrain.checkpoint.order import CheckpointOrder
from jaxtrain.config import ConfigError, DivergedError, RunConfig, RunError, StoppedError
from jaxtrain.data import Corpus
from jaxtrain.launch.heartbeat import report_phase
from jaxtrain.numerics.counter import counter_int
from jaxtrain.observe.events import record_event
from jaxtrain.observe.log import Log
from jaxtrain.optim import all_finite
from jaxtrain.train.feed import BatchFeed
from jaxtrain.train.guard import GUARD, new_history, stored_history
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
        self.local: LocalTier | None = None
        """The checkpoints on local disks, if checkpoint.local.directory is set."""
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
        begin = time.perf_counter()
        found, tier = self._load()
        if self.local is not None:
            # Those of later steps are not complete.
            self.local.discard_after(0 if found is None else found.step)
        if found is None:
            self._begin()
            return
        self.given = None
        config, old = self.bound.config, self._config_of(found)
        for line in check_same_data(self.directory, config, found.meta, self.corpus):
            self.log.info(line)
        self.origin = found.meta.get("origin")
        self.feed.set_state(found.data)
        self.resumed_from = self.counters.step = found.step
        self.counters.skipped, self.counters.rollbacks = found.meta["skipped"], found.meta.get("rollbacks", 0)
        self.log.resume_at(self.step)
        tokens = self.counters.tokens
        self.event("restored", step=self.step, seconds=time.perf_counter() - begin, bytes=found.bytes, tier=tier)
        where = " from the local disks" if tier == "local" else ""
        self.log.info(
            f"resumed at step {self.step} of {self.bound.config.train.steps}{where}, {tokens:,} tokens trained"
        )
        for line in (*self.feed.notes(), *learning_rate_change(old, config, int(self.state["steps"]), tokens)):
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
        self.state |= new_history(self.bound.config.guard, self.bound.mesh, {})
        self.log.resume_at(0)

    def roll_back(self, why: str) -> None:
        """After a spike: restore the newest good checkpoint and go on with the next step and the next batch.

        Raises DivergedError after guard.max_rollbacks.
        """
        counters, limit = self.counters, self.bound.config.guard.max_rollbacks
        if counters.rollbacks >= limit:
            raise DivergedError(
                f"step {self.step}: {why}, after {counters.rollbacks} rollbacks (guard.max_rollbacks {limit}): resume "
                "with a lower --optimizer.learning_rate, a larger --guard.spike or --guard.action skip"
            )
        self._checkpoints.wait()
        if self._newest_saved() is None:
            self.log.info(f"step {self.step}: no checkpoint to roll back to, the step is skipped alone")
            return
        # Two states may not fit.
        self.state = {}
        found, _ = self._load()
        assert found is not None, "the newest checkpoint was there"
        # A crash must not resume from the history that ended here.
        self._discard_after(found.step)
        counters.rollbacks += 1
        self.event("rollback", step=self.step, to=found.step, why=why, rollbacks=counters.rollbacks)
        self.log.info(
            f"step {self.step}: {why}; the state is that of step {found.step} again, the batches of steps "
            f"{found.step + 1} to {self.step} are not read again (rollback {counters.rollbacks} of at most {limit}, "
            "guard.action rollback)"
        )

    def _newest_saved(self) -> int | None:
        """The newest step that this run can go back to."""
        local = None if self.local is None else self.local.newest
        return max((step for step in (self._checkpoints.latest(), local) if step is not None), default=None)

    def _discard_after(self, step: int) -> None:
        self._checkpoints.discard_after(step)
        if self.local is not None:
            self.local.discard_after(step)

    def _load(self) -> tuple[Restored | None, str]:
        """Restore state, tokens and history from the newest intact checkpoint, None if there is none; and its tier."""
        report_phase("restore", self.step)
        bound, counters = self.bound, self.counters
        found, tier = self._restore_newest()
        if found is None:
            return None, tier
        state = carry_over(found.state, self._config_of(found), bound.config)
        self.state = state | new_history(bound.config.guard, bound.mesh, found.meta.get(GUARD, {}))
        counters.tokens = counter_int(jax.device_get(state["tokens"]))
        counters.in_a_row, counters.spike = int(state["scaler"]["skipped"]), None
        # The state is the run's own: a step donates it.
        return found._replace(state=None), tier

    def _restore_newest(self) -> tuple[Restored | None, str]:
        """The newest intact checkpoint of both tiers, its state in the order of this mesh, and its tier."""
        newest = self._checkpoints.latest()
        if self.local is not None:
            found = self.local.restore(newer_than=-1 if newest is None else newest)
            if found is not None:
                return found, "local"
        found = self._checkpoints.restore(self._order.checkpoint_layout)
        if self.local is not None and found is not None and newest is not None and found.step < newest:
            # The newest durable one is damaged. Two states may not fit.
            step, found = found.step, None
            found = self.local.restore(newer_than=step)
            if found is not None:
                return found, "local"
            found = self._checkpoints.restore(self._order.checkpoint_layout)
        if found is not None:
            found = found._replace(state=self._order.from_checkpoint(found.state))
        return found, "durable"

    def _config_of(self, found: Restored) -> RunConfig:
        return config_of_meta(found.meta, f"checkpoint {found.step} of {self.directory}")

    def save_and_stop(self, signal: str) -> None:
        """Save this step durably for a signal; raises StoppedError."""
        begin = time.perf_counter()
        self.save()
        self.finish_checkpoints()
        self.event("stopped", step=self.step, signal=signal)
        raise StoppedError(
            f"{signal}: step {self.step} of {self.bound.config.train.steps} is saved "
            f"({time.perf_counter() - begin:.1f} s); the same command resumes there"
        )

    def save(self) -> None:
        """Save a checkpoint of this step.

        Raises DivergedError where the state is not finite, RunError where another process took the run directory over.
        """
        report_phase("checkpoint", self.step)
        self.check_lease()
        counters, state = self.counters, self._plain_state()
        # A step that was applied has tested what it made.
        if counters.in_a_row and not jax.jit(all_finite)(state):
            raise DivergedError(
                f"the state after step {self.step} is not finite and is not saved; {self.signals.resumption()}"
            )
        self._checkpoints.save(self.step, self._order.to_checkpoint(state), self.feed.get_state(), self._meta())

    def save_local(self) -> None:
        """Save this step on the local disks, unless it was skipped; raises RunError like `save`."""
        assert self.local is not None, "local_due said so"
        report_phase("checkpoint", self.step)
        if self.counters.in_a_row:
            return
        self.check_lease()
        self.local.save(self.step, self._plain_state(), self.feed.get_state(), self._meta())

    def local_due(self) -> bool:
        """Whether a save on the local disks is due after this step; the last one is saved durably."""
        return self.local is not None and not self.last and self.local.due(self.step)

    def _plain_state(self) -> TrainState:
        """The state without the history of guard.spike, which checkpoints have in their metadata."""
        return {name: part for name, part in self.state.items() if name != GUARD}

    def _meta(self) -> dict[str, Any]:
        """The record beside the state of a checkpoint."""
        counters, bound = self.counters, self.bound
        meta = checkpoint_meta(
            bound.config, bound.topology.sizes, self.corpus, counters.step, int(self.state["steps"]), counters.tokens,
            counters.skipped, self.origin,
        )  # fmt: skip
        # What the retention of checkpoints reads (checkpoint/retention.py).
        meta |= {"good": counters.in_a_row == 0, "rollbacks": counters.rollbacks}
        if counters.eval_loss is not None and counters.eval_loss[0] == self.step:
            meta["eval_loss"] = counters.eval_loss[1]
        if GUARD in self.state:
            meta[GUARD] = stored_history(self.state[GUARD])
        return meta

    def checkpoint_due(self) -> bool:
        """Whether a checkpoint is due after this step; all processes must ask at every step."""
        return self._checkpoints.due(self.step)

    def finish_checkpoints(self) -> int | None:
        """As `wait_for_checkpoints`, after the last save; the local checkpoints are removed."""
        newest = self.wait_for_checkpoints()
        if self.local is not None:
            self.local.discard_after(-1)
        return newest

    def wait_for_checkpoints(self) -> int | None:
        """Wait until every checkpoint is written; the newest step that has one."""
        report_phase("checkpoint", self.step)
        self._checkpoints.wait()
        return self._checkpoints.latest()
