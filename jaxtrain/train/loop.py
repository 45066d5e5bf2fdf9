"""The loop: the only room where data, step, checkpoint and observe meet."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint import Checkpoints, gather_json
from jaxtrain.checkpoint.order import CheckpointOrder
from jaxtrain.config import ConfigError, RunConfig, to_tree
from jaxtrain.data import (
    Corpus,
    open_stream,
    phase_at,
    prepare,
    resolve_virtual_shards,
    shards_of_rows,
    tokens_read,
)
from jaxtrain.launch.distributed import barrier
from jaxtrain.mesh.param import show_axes
from jaxtrain.numerics.counter import counter_int
from jaxtrain.observe.environment import environment
from jaxtrain.observe.experts import draw_experts
from jaxtrain.observe.log import Log
from jaxtrain.observe.meter import Meter
from jaxtrain.observe.report import draw_curve, summary
from jaxtrain.train.batch import owned_rows, shard_batch
from jaxtrain.train.experts import traffic_metrics
from jaxtrain.train.resolve import Bound, bind
from jaxtrain.train.run_dir import check_same_run, checkpoint_meta, describe_sharding, read_summary, write_run
from jaxtrain.train.state import state_bytes_per_device
from jaxtrain.train.step import Batch, compile_step, jit_evaluate
from jaxtrain.train.use import continue_text, held_out, mean_loss


def train(config: RunConfig, directory: Path, quiet: bool = False) -> dict[str, Any]:
    """Train a run to its last update in `directory`, resuming from its newest whole checkpoint; returns the summary.

    Raises ConfigError for any setting, corpus or checkpoint that a user can mend; nothing is written before the
    configuration is known to be sound.
    """
    started = time.perf_counter()
    setup = bind(config)
    changes = check_same_run(directory, config)
    shards = resolve_virtual_shards(config.data, *(phase.global_batch for phase in setup.phases))
    corpus = prepare(config)
    batches = held_out(setup, corpus) if config.eval.every else []
    primary = jax.process_index() == 0
    # No process may look at the directory while another fills it.
    barrier("checked")
    if primary:
        write_run(directory, config, describe_sharding(setup), environment())
    checkpoints = Checkpoints(directory / "checkpoints", config.checkpoint)
    with (
        contextlib.closing(checkpoints),
        contextlib.closing(Log(directory, config.observe, primary, to_tree(config), quiet)) as log,
    ):
        runner = _Runner(setup, corpus, shards, batches, checkpoints, log, directory, started)
        reasons = (f"record skipped: {reason}" for reason in corpus.reasons)
        for line in (*startup_report(setup, corpus), *changes, *reasons):
            log.info(line)
        runner.restore()
        if runner.done >= config.train.steps and (finished := read_summary(directory)):
            log.info(f"this run has its {runner.done} updates: nothing left to train (train.steps goes on from there)")
            return finished
        runner.compile()
        runner.run()
        result = runner.result()
    if primary:
        result["picture"] = str(draw_curve(directory))
        result["experts_picture"] = draw_experts(directory)
        summary(directory, result, quiet)
    return result


def startup_report(setup: Bound, corpus: Corpus) -> list[str]:
    """Lines that say what is about to run: model, mesh, batch, notes of the layout, corpus."""
    sizes = {axis: size for axis, size in setup.topology.sizes.items() if size > 1}
    mesh = " x ".join(f"{axis} {size}" for axis, size in sizes.items()) or "one device"
    numbers = ", ".join(f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}"
                        for name, value in corpus.describe().items())  # fmt: skip
    return [
        f"model: {setup.model.count():,} parameters, {setup.config.precision.compute}; mesh: {mesh}; "
        f"rules: {', '.join(setup.config.rules.preset)}",
        *(
            f"batch{f' from update {phase.start + 1} on' if phase.start else ''}: {plan.global_batch} rows = "
            f"{plan.microbatch} a microbatch x {plan.replicas} replicas x {plan.accumulation} microbatches, "
            f"{phase.seq_len} tokens each"
            for phase, plan in zip(setup.phases, setup.batch_shapes, strict=True)
        ),
        *dict.fromkeys(
            f"rows lie over {show_axes(setup.layout.sequence_axes)} in zig-zag order, attention.context_parallel "
            f"{setup.config.attention.context_parallel}: {plan.show_stored(phase.seq_len)}"
            for phase, plan in zip(setup.phases, setup.batch_shapes, strict=True)
            if plan.sequence_devices > 1
        ),
        *(
            f"attention{f' of rows of {length}' if len(setup.attention) > 1 else ''}: {choice}"
            for length, choice in setup.attention.items()
        ),
        *(
            f"balancing loss over the global batch: each update of {plan.accumulation} microbatches counts the load of "
            "experts in a forward pass of its own before the first one"
            for plan in dict.fromkeys(setup.batch_shapes)
            if setup.step.counts_first(plan.accumulation)
        ),
        f"corpus: {numbers}",
        *(f"layout: {note}" for note in setup.notes),
    ]


class _Runner:
    """The moving parts of one run between two kills."""

    def __init__(
        self,
        setup: Bound,
        corpus: Corpus,
        shards: int,
        batches: list[Batch],
        checkpoints: Checkpoints,
        log: Log,
        directory: Path,
        started: float,
    ) -> None:
        self.order = CheckpointOrder(setup)
        self.setup, self.corpus, self.checkpoints, self.log = setup, corpus, checkpoints, log
        self.held_out = batches
        self.config, self.directory, self.started = setup.config, directory, started
        first = setup.phases[0]
        # The same shards in every phase: a process holds the same share of every global batch.
        lo, hi = owned_rows(setup.batch_shapes[0], setup.batch_sharding, first.seq_len)
        self.owned = shards_of_rows(lo, hi, first.global_batch, shards)
        self.stream = open_stream(corpus.train, self.config, self.owned)
        self.phase = -1
        self.compiled_at = 0
        self.compile_s = 0.0
        self.meters: dict[int, Meter] = {}
        self.done = 0
        self.tokens = 0
        self.skipped = 0
        self.resumed_from: int | None = None
        self.evaluations: dict[int, float] = {}
        self.evaluate = jit_evaluate(setup.step)
        self.pending: tuple[int, dict[str, jax.Array], float] | None = None
        self.mark = time.perf_counter()

    def restore(self) -> None:
        """Take up the newest whole checkpoint, or give birth to the state."""
        found = self.checkpoints.restore(self.order.checkpoint_layout)
        if found is None:
            self.state = self.setup.init_state()
            self.log.resume_at(0)
            return
        self.done, self.state, data, meta = found._replace(state=self.order.from_checkpoint(found.state))
        self._check_meta(meta)
        self.stream.set_state(data)
        self.resumed_from = self.done
        self.tokens = counter_int(jax.device_get(self.state["tokens"]))
        self.skipped = meta["skipped"]
        self.log.resume_at(self.done)
        self.log.info(f"resumed at update {self.done} of {self.config.train.steps}, {self.tokens:,} tokens trained")

    def compile(self) -> None:
        """Compile the update of the phase that begins, once; every process waits for the slowest compiler."""
        begin = time.perf_counter()
        self.phase, self.compiled_at = phase_at(self.setup.phases, self.done), self.done
        self.train_step = compile_step(self.setup.step, self.setup.abstract, self.setup.phase_batch(self.phase))
        self.compile_s += time.perf_counter() - begin
        self.meters[self.phase] = Meter(
            self.config.model,
            self.setup.phases[self.phase].seq_len,
            jax.devices()[0].device_kind,
            self.setup.topology.devices.size,
            self.config.precision.compute,
            jax.config.jax_default_matmul_precision,
        )
        barrier("compiled")

    def run(self) -> None:
        """All updates that are left, with evaluation and checkpoints at their borders."""
        total, every, save = self.config.train.steps, self.config.eval.every, self.config.checkpoint.every
        if self.done == 0 and every:
            self._evaluate(0)
        self.mark = time.perf_counter()
        with self.log.progress(total, self.done) as advance:
            self.advance = advance
            while self.done < total:
                if phase_at(self.setup.phases, self.done) != self.phase:
                    self._settle()
                    self.compile()
                    self.mark = time.perf_counter()
                batch, wait = self._next_batch()
                self.state, metrics = self.train_step(self.state, batch)
                self.done += 1
                self._settle()
                self.pending = (self.done, metrics, wait)
                last = self.done == total
                due = bool(every) and (self.done % (every or 1) == 0 or last)
                if due or last or self.done % save == 0:
                    self._settle(evaluate=due)
                if last or self.done % save == 0:
                    self._save()
        self.checkpoints.wait()

    def result(self) -> dict[str, Any]:
        """Numbers of the finished run; `summary.json` holds them."""
        rows = self.log.rows()
        losses = [row["loss"] for row in rows if row.get("loss") is not None]
        shares = self._shares()
        self.log.info("read: " + ", ".join(
            f"{each['source']} {each['tokens']:,} tokens, {each['share']:.1%}, {each['epochs']:.3g} epochs"
            for each in shares
        ))  # fmt: skip
        evals = {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}
        first_eval = next((row["eval_loss_before"] for row in rows if "eval_loss_before" in row), None)
        return {
            "updates": self.done,
            "parameters": self.setup.model.count(),
            "tokens_total": self.tokens,
            "skipped_updates": self.skipped,
            "skipped_records": self.corpus.skipped,
            "loss_first": losses[0] if losses else None,
            "loss_last": losses[-1] if losses else None,
            "eval_loss_first": first_eval,
            "eval_loss_last": evals[max(evals)] if evals else None,
            "resumed_from": self.resumed_from,
            "compile_s": self.compile_s,
            "wall_s": time.perf_counter() - self.started,
            "checkpoint": self.checkpoints.latest(),
            "mesh": {axis: size for axis, size in self.setup.topology.sizes.items() if size > 1} or {"data": 1},
            "state_bytes_per_device": state_bytes_per_device(self.setup.abstract),
            "sample": self._sample(),
            "sources": shares,
            **({"phases": self._phases()} if len(self.setup.phases) > 1 else {}),
            **self.meters[self.phase].summary(),
        }

    def _shares(self) -> list[dict[str, Any]]:
        """What each source gave since the run began: tokens, share of all tokens, epochs."""
        read, targets = tokens_read(gather_json(self.stream.get_state())), self.stream.pieces.targets.tolist()
        return [
            {"source": f"{source.kind}: {source.path}", "tokens": tokens, "share": tokens / max(sum(read), 1),
             "epochs": tokens / epoch}
            for source, tokens, epoch in zip(self.config.data.sources, read, targets, strict=True)
        ]  # fmt: skip

    def _phases(self) -> list[dict[str, Any]]:
        """The phases of this start, each with its own rates (those of the summary are the last one's)."""
        return [dataclasses.asdict(self.setup.phases[index]) | meter.summary() for index, meter in self.meters.items()]

    def _next_batch(self) -> tuple[Batch, float]:
        begin = time.perf_counter()
        rows = next(self.stream)
        wait = time.perf_counter() - begin
        plan = self.setup.batch_shapes[self.phase]
        first_row = self.owned.start * plan.global_batch // self.stream.virtual_shards
        return shard_batch(rows, first_row, plan, self.setup.batch_sharding), wait

    def _settle(self, evaluate: bool = False) -> None:
        """Wait for the update in flight and log it; metrics lag one update so that the device never waits for them."""
        if self.pending is None:
            return
        step, device_metrics, wait = self.pending
        self.pending = None
        values = {name: value.tolist() for name, value in jax.device_get(device_metrics).items()}
        now = time.perf_counter()
        elapsed, self.mark = now - self.mark, now
        applied = bool(values.pop("applied"))
        in_a_row = int(values.pop("skipped_in_a_row"))
        self.tokens += values["scored_tokens"] if applied else 0
        self.skipped += not applied
        row: dict[str, Any] = {"step": step, **values, "tokens_total": self.tokens, "skipped_total": self.skipped}
        row["records_skipped"] = self.corpus.skipped
        row |= self._experts(step, row.pop("expert_traffic", None), values.get("overflowed", 0))
        meter = self.meters[self.phase]
        row |= meter.record(values["scored_tokens"], elapsed, wait, compiled=step == self.compiled_at + 1)
        if step == 1 and 0 in self.evaluations:
            row["eval_loss_before"] = self.evaluations[0]
        if evaluate:
            row["eval_loss"] = self._evaluate(step)
            self.mark = time.perf_counter()
        self.log.record(row)
        self.advance(row)
        if not applied:
            why = "no token was scored" if values["scored_tokens"] == 0 else "a gradient was not finite"
            self.log.info(f"update {step} skipped: {why} (loss scale {values['loss_scale']:g}, {in_a_row} in a row)")
        if in_a_row >= self.config.precision.max_skipped:
            raise ConfigError(
                f"{in_a_row} updates in a row had non-finite gradients (precision.max_skipped "
                f"{self.config.precision.max_skipped}): lower optimizer.learning_rate "
                "or use precision.compute bfloat16"
            )

    def _experts(self, step: int, traffic_PP: list[list[float]] | None, overflowed: int) -> dict[str, float]:
        """Bytes of an update's traffic between experts; what did not fit a bounded buffer is said aloud."""
        if traffic_PP is None:
            return {}
        if overflowed:
            self.log.info(
                f"update {step}: {overflowed:,} choices of experts did not fit the receive buffer and count as zero "
                f"(model.moe.buffer {self.config.model.moe.buffer}): raise it, or null for the worst case"
            )
        return traffic_metrics(traffic_PP, self.setup.expert_token_bytes, self.setup.expert_crossings)

    def _evaluate(self, step: int) -> float:
        loss, scored = mean_loss(self.evaluate, self.state["params"], self.held_out)
        self.evaluations[step] = loss
        self.log.info(f"held-out loss after update {step}: {loss:.4f} over {scored:,} tokens")
        return loss

    def _save(self) -> None:
        sizes, updates = self.setup.topology.sizes, int(self.state["steps"])
        meta = checkpoint_meta(self.config, sizes, self.corpus, self.done, updates, self.tokens, self.skipped)
        self.checkpoints.save(
            self.done, self.order.to_checkpoint(self.state), gather_json(self.stream.get_state()), meta
        )

    def _check_meta(self, meta: dict[str, Any]) -> None:
        for key, value in (("corpus", self.corpus.fingerprint), ("tokenizer", self.corpus.tokenizer_fingerprint)):
            if meta[key] == value:
                continue
            changed = f"the {key} changed since this run began ({meta[key][:12]} -> {value[:12]})"
            if key == "corpus" and self.config.data.allow_changed:
                self.log.info(f"{changed}: data.allow_changed, the run goes on at the same place of another order")
                continue
            mend = (
                "restore data.sources, start another --run, or set data.allow_changed"
                if key == "corpus"
                else f"set data.tokenizer.path to the tokenizer of {self.directory}, or start another --run"
            )
            raise ConfigError(f"{changed}: the data position of {self.directory} means nothing for it; {mend}")

    def _sample(self) -> str | None:
        train = self.config.train
        if not train.sample_prompt:
            return None
        return continue_text(
            self.setup,
            self.corpus,
            self.state["params"],
            train.sample_prompt,
            train.sample_tokens,
            train.sample_temperature,
            train.seed,
        )
