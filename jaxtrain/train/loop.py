"""The training loop: restore; for each step a batch, a train step, a record; hooks between steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint import Checkpoints, LocalTier
from jaxtrain.checkpoint.local import run_identity
from jaxtrain.config import RunConfig, to_tree
from jaxtrain.data import prepare
from jaxtrain.launch.agreement import agree_on_directory
from jaxtrain.launch.heartbeat import report_phase
from jaxtrain.observe.environment import environment
from jaxtrain.observe.events import read_events, record_event
from jaxtrain.observe.log import Log
from jaxtrain.train.agreement import agree_on_corpus, agree_on_start
from jaxtrain.train.feed import BatchFeed
from jaxtrain.train.hooks import Evaluate, Hook
from jaxtrain.train.lease import hold, storage_errors
from jaxtrain.train.phase_steps import PhaseSteps
from jaxtrain.train.recorder import Recorder
from jaxtrain.train.resolve import Bound, bind
from jaxtrain.train.resume import Source, source_of, source_tokenizer, state_from, write_source
from jaxtrain.train.run import Run
from jaxtrain.train.run_dir import (
    check_same_run,
    describe_sharding,
    held_tokenizer,
    write_run,
    write_tokenizer,
)
from jaxtrain.train.signals import StopSignals
from jaxtrain.train.startup import startup_report, unscored_notes
from jaxtrain.train.summary import check_prompt, finish, finished_summary, summarize


def train(
    config: RunConfig, directory: Path, quiet: bool = False, hooks: Sequence[Hook] = (), source: Source | None = None
) -> dict[str, Any]:
    """Train a run to its last step in `directory`, resuming from its newest intact checkpoint; returns the summary.

    `hooks` act between steps, after the held-out evaluation and before the checkpoint (train/hooks.py). SIGTERM, SIGINT
    and SIGUSR1 save a checkpoint and end the run (train/signals.py). `source`: a run or checkpoint whose weights a new
    run starts with. Raises ConfigError for any setting, corpus or checkpoint that a user can fix, before anything is
    written; StoppedError after a signal; DivergedError where the last steps were skipped (train/skipped.py).
    """
    started, began, directory = time.perf_counter(), time.time(), Path(directory)
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(StopSignals(directory).handled())
        agree_on_start(config)
        bound, primary = bind(config), jax.process_index() == 0
        check_same_run(directory, config)
        agree_on_directory(directory)
        log = stack.enter_context(contextlib.closing(Log(directory, config.observe, primary, to_tree(config), quiet)))
        check_lease = stack.enter_context(hold(directory, log.info))
        # Another process may have begun the run before this one held it.
        changes = check_same_run(directory, config)
        report_phase("data")
        source = source_of(directory, source)
        held = source_tokenizer(source, config) if source else held_tokenizer(directory, config)
        corpus = prepare(config, held)
        check_prompt(config, corpus.tokenizer)
        # Nothing was written so far. No process may look at the directory while another fills it.
        report_phase("barrier")
        agree_on_corpus(corpus)
        feed = stack.enter_context(contextlib.closing(BatchFeed(bound, corpus)))
        hooks = (*([Evaluate(bound, corpus)] if config.eval.every else []), *hooks)
        given = state_from(source, bound, corpus.tokenizer) if source else None
        checkpoints = Checkpoints(
            directory / "checkpoints", config.checkpoint, partial(record_event, directory, "checkpoint")
        )
        stack.enter_context(contextlib.closing(checkpoints))
        run = Run(bound, corpus, feed, checkpoints, log, directory, signals, check_lease)
        run.given, given = given, None
        stack.enter_context(run.recorded_end())
        stack.enter_context(storage_errors(directory))
        if primary:
            write_files(bound, directory, source)
        run.local = open_local_tier(stack, bound, directory)
        print_startup(run, changes)
        run.restore()
        if primary:
            write_tokenizer(directory, corpus.tokenizer)
        record_start(run, began, changes)
        if run.last and (finished := finished_summary(run)):
            return finished
        phases = run_steps(run, hooks)
        signals.end_steps()
        result = summarize(run, phases, run.finish_checkpoints(), time.perf_counter() - started)
        report_phase("end", run.step)
        return finish(run, result, primary, quiet)


def write_files(bound: Bound, directory: Path, source: Source | None) -> None:
    """The files of a run that say what it is."""
    write_run(directory, bound.config, describe_sharding(bound), environment())
    if source:
        write_source(directory, source)


def print_startup(run: Run, changes: Sequence[str]) -> None:
    """Everything that was resolved, the local checkpoints, changed settings, and records that were skipped."""
    local = run.local.notes() if run.local else []
    skipped = (f"record skipped: {why}" for why in run.corpus.reasons)
    unscored = unscored_notes(run.bound.config, run.corpus)
    for line in (*startup_report(run.bound, run.corpus), *local, *changes, *skipped, *unscored):
        run.log.info(line)


def record_start(run: Run, began: float, changes: Sequence[str]) -> None:
    """The event of a start; `began` on the wall clock."""
    run.event(
        "start", began=began, step=run.step, resumed_from=run.resumed_from, processes=jax.process_count(),
        mesh=run.bound.topology.sizes, changes=list(changes), origin=run.origin,
    )  # fmt: skip


def open_local_tier(stack: contextlib.ExitStack, bound: Bound, directory: Path) -> LocalTier | None:
    """The local checkpoints of a run, closed with `stack`; None where there are none."""
    config = bound.config.checkpoint.local
    if config.directory is None:
        return None
    record = partial(record_event, directory, "local_checkpoint")
    return stack.enter_context(contextlib.closing(LocalTier(config, run_identity(directory), bound.abstract, record)))


def run_steps(run: Run, hooks: Sequence[Hook]) -> PhaseSteps:
    """All steps that are left, with hooks and checkpoints between them."""
    config, counters = run.bound.config, run.counters
    phases = PhaseSteps(run.bound)
    if run.last:
        phases.read(run.log.rows(), {e["step"] + 1 for e in read_events(run.directory) if e["kind"] == "compiled"})
        return phases
    enter_phase(run, phases)
    recorder = Recorder(run.bound, run.corpus, phases, run.log, counters, run.event)
    if run.step == 0:
        recorder.before_first(call_hooks(run, [hook for hook in hooks if hook.due(run)]))
    run.signals.begin_steps()
    with run.log.progress(config.train.steps, run.step) as advance:
        recorder.show_progress(advance)
        recorder.restart_clock()
        while not run.last:
            if phases.begins(run.step):
                recorder.flush()
                enter_phase(run, phases)
                recorder.restart_clock()
            report_phase("input", run.step + 1)
            batch, wait = run.feed.next(phases.phase)
            report_phase("step", run.step + 1)
            run.state, metrics = phases.train_step(run.state, batch, run.step + 1)
            counters.step += 1
            recorder.push(run.step, metrics, wait)
            due = [hook for hook in hooks if hook.due(run)]
            if due:
                recorder.flush(lambda due=due: call_hooks(run, due))  # type: ignore[misc]
            if config.guard.action == "rollback":
                # A rollback must not depend on how far the record lags.
                recorder.flush()
                if counters.spike is not None:
                    run.roll_back(counters.spike)
                    recorder.restart_clock()
            if run.local_due():
                recorder.flush()
                run.save_local()
            if run.checkpoint_due() or run.last:
                recorder.flush()
                run.save()
            if not run.last and (signal := run.signals.stop_at(run.step)):
                recorder.flush()
                run.save_and_stop(signal)
    return phases


def enter_phase(run: Run, phases: PhaseSteps) -> None:
    """Compile the phase of data.schedule that begins here."""
    report_phase("compile", run.step)
    before = phases.compile_s
    phases.enter(run.step)
    run.event("compiled", step=run.step, seconds=phases.compile_s - before)


def call_hooks(run: Run, hooks: Sequence[Hook]) -> Mapping[str, Any]:
    """Call each hook in order; the values that they return, together."""
    report_phase("evaluation", run.step)
    values: dict[str, Any] = {}
    for hook in hooks:
        values |= hook(run) or {}
    return values
