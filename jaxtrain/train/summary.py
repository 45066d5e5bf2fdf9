"""The end of a run: summary.json first, then a sample and plots, which cannot fail the run."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxtrain.config import ConfigError, RunConfig
from jaxtrain.data import TextTokenizer
from jaxtrain.data.ends import stop_ids
from jaxtrain.observe.files import write_summary
from jaxtrain.report.experts import draw_experts
from jaxtrain.report.training import draw_curve, print_summary
from jaxtrain.train.phase_steps import PhaseSteps
from jaxtrain.train.run import Run
from jaxtrain.train.run_dir import read_summary
from jaxtrain.train.state import state_bytes_per_device
from jaxtrain.train.use import chat_template, continue_text, encode_prompt


def summarize(run: Run, phases: PhaseSteps, checkpoint: int | None, wall_s: float) -> dict[str, Any]:
    """Numbers of the run up to here, as summary.json holds them; every process must call it."""
    bound, counters, rows, sources = run.bound, run.counters, run.log.rows(), run.feed.source_shares()
    run.log.info("read: " + ", ".join(
        f"{each['source']} {each['tokens']:,} tokens, {each['share']:.1%}, {each['epochs']:.3g} epochs"
        for each in sources
    ))  # fmt: skip
    losses = [row["loss"] for row in rows if row.get("loss") is not None]
    evaluations = {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}
    first = next((row["eval_loss_before"] for row in rows if "eval_loss_before" in row), None)
    return {
        "steps": counters.step,
        # The name of the first versions, for scripts that read it.
        "updates": counters.step,
        "parameters": bound.model.count(),
        "tokens_total": counters.tokens,
        "skipped_steps": counters.skipped,
        "skipped_updates": counters.skipped,
        "skipped_records": run.corpus.skipped,
        "loss_first": losses[0] if losses else None,
        "loss_last": losses[-1] if losses else None,
        "eval_loss_first": first,
        "eval_loss_last": evaluations[max(evaluations)] if evaluations else None,
        "resumed_from": run.resumed_from,
        "compile_s": phases.compile_s,
        "wall_s": wall_s,
        "checkpoint": checkpoint,
        "mesh": {axis: size for axis, size in bound.topology.sizes.items() if size > 1} or {"data": 1},
        "state_bytes_per_device": state_bytes_per_device(bound.abstract),
        "sources": sources,
        **phases.summary(),
        **({"stopped": run.stopped} if run.stopped else {}),
    }


def check_prompt(config: RunConfig, tokenizer: TextTokenizer) -> None:
    """Raise ConfigError where train.sample_prompt leaves no room for a token."""
    prompt, length = config.train.sample_prompt, config.data.seq_len
    if prompt and (tokens := len(tokenizer.encode(prompt))) >= length:
        raise ConfigError(
            f"train.sample_prompt has {tokens} tokens and data.seq_len is {length}: shorten it, or set "
            "train.sample_prompt '' for no sample"
        )


def finished_summary(run: Run) -> dict[str, Any] | None:
    """The summary of a run without steps left; None where there is none, or one of fewer steps."""
    run.log.info(f"this run has its {run.step} steps: nothing left to train (raise train.steps to continue it)")
    found = read_summary(run.directory)
    if found is not None and (found.get("steps"), found.get("tokens_total")) == (run.step, run.counters.tokens):
        return found
    why = "is missing" if found is None else f"is that of step {found.get('steps')}"
    run.log.info(f"summary.json {why}: it is written from the checkpoint and metrics.jsonl")
    return None


def finish(run: Run, result: dict[str, Any], primary: bool, quiet: bool) -> dict[str, Any]:
    """Write summary.json, then add sample and plots; one that fails is reported and left out.

    Every process must call it: a sample is computed by all devices of the mesh. Raises RunError where another process
    took the run directory over.
    """
    run.check_lease()
    if primary:
        write_summary(run.directory, result)
    # A process alone may leave; of several, all must compute the sample.
    if run.signals.received is not None and jax.process_count() == 1:
        run.log.info("sample and plots are left out after the signal; the run is complete")
        return result
    result = result | {"sample": _attempt(run, "sample", lambda: _sample(run))}
    if primary:
        plots: dict[str, Callable[[Path], Path | None]] = {"picture": draw_curve, "experts_picture": draw_experts}
        for name, draw in plots.items():
            path = _attempt(run, name, partial(draw, run.directory))
            result[name] = None if path is None else str(path)
        write_summary(run.directory, result)
        if not quiet:
            print_summary(run.directory, result)
    return result


def _attempt(run: Run, name: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        run.log.info(
            f"{name} left out: {type(error).__name__}: {error} ({where.filename.rpartition('/')[2]}:{where.lineno}); "
            "the run itself is complete"
        )
        return None


def _sample(run: Run) -> str | None:
    train = run.bound.config.train
    if not train.sample_prompt:
        return None
    tokenizer, chat = run.corpus.tokenizer, chat_template(run.bound) is not None
    prompt = encode_prompt(run.bound, tokenizer, train.sample_prompt, chat)
    drawn = train.sample_tokens, train.sample_temperature, train.seed, stop_ids(run.directory / "hub", tokenizer.eos)
    text = continue_text(run.bound, tokenizer, run.state["params"], prompt, *drawn)
    return f"{train.sample_prompt}\n{text}" if chat else text
