"""What carries over when a run goes on with changed settings, and when a new run starts from another one's weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.checkpoint import CheckpointReader
from jaxtrain.checkpoint.order import CheckpointOrder
from jaxtrain.config import ConfigError, RunConfig, check_schema, validate
from jaxtrain.data import TextTokenizer
from jaxtrain.numerics import scaling
from jaxtrain.observe.files import write_atomic
from jaxtrain.optim import learning_rate
from jaxtrain.train.reading import run_config
from jaxtrain.train.resolve import Bound
from jaxtrain.train.run_dir import has_checkpoints, tokenizer_of_path, tokenizer_of_run
from jaxtrain.train.state import TrainState

FROM = "from.json"
"""File of a run directory: the run that this one starts from, until its first checkpoint records it."""


@dataclass(frozen=True)
class Source:
    """Where a new run starts: a run directory or one of its checkpoints, with or without the optimizer's state."""

    path: Path
    optimizer: bool = False

    @property
    def run(self) -> Path:
        """The run directory."""
        return self.path.parent.parent if self._is_checkpoint else self.path

    @property
    def step(self) -> int | None:
        """The step of a checkpoint that is named; None is the newest intact one of the run."""
        return int(self.path.name) if self._is_checkpoint else None

    @property
    def _is_checkpoint(self) -> bool:
        return self.path.name.isdecimal() and self.path.parent.name == "checkpoints"


def source_of(directory: Path, given: Source | None) -> Source | None:
    """The source of a run that has no checkpoint yet: `given`, else the one that an earlier start recorded.

    None for a run that resumes. Raises ConfigError where the run was not started from `given`, or where that is no run.
    """
    recorded = _recorded(directory)
    if given is not None:
        given = Source(given.path.absolute(), given.optimizer)
        if given.run == directory.absolute():
            raise ConfigError(f"--from {given.path} is this run itself: name another --run directory for the new run")
        if has_checkpoints(directory) and given != recorded:
            began = "from its own initialisation" if recorded is None else f"from {recorded.path}"
            optimizer = " with another --from-optimizer" if recorded and recorded.path == given.path else ""
            raise ConfigError(
                f"{directory} is a run that started {began}{optimizer}, it cannot start from {given.path}: leave "
                "--from out to resume it, or name another --run directory"
            )
    if has_checkpoints(directory):
        return None
    source = given or recorded
    if source is not None:
        run_config(source.run)
        if source.step is not None and not source.path.is_dir():
            raise ConfigError(f"--from {source.path} is not there: name a run, or one of its checkpoints")
    return source


def write_source(directory: Path, source: Source) -> None:
    """Record the source, so that a start without --from before the first checkpoint begins with it too."""
    tree = {"path": str(source.path), "optimizer": source.optimizer}
    write_atomic(directory / FROM, json.dumps(tree).encode())


def source_tokenizer(source: Source, config: RunConfig) -> TextTokenizer:
    """The tokenizer of the run that a new one starts from: its weights know no other token ids.

    Raises ConfigError where it has no readable checkpoint, or data.tokenizer.path of the new run names another one.
    """
    reader = CheckpointReader(source.run / "checkpoints")
    steps = reader.steps() if source.step is None else [source.step]
    if not steps:
        raise ConfigError(f"--from {source.path} has no checkpoint yet: train it first")
    meta = reader.read_meta(steps[-1])
    found = tokenizer_of_run(source.run, run_config(source.run), meta["tokenizer"])
    named = config.data.tokenizer.path
    if named is not None and tokenizer_of_path(config).fingerprint != found.fingerprint:
        raise ConfigError(
            f"data.tokenizer.path {named} is another tokenizer than that of {source.run}, whose weights the run starts "
            "from: leave it out, the new run takes the other's tokenizer"
        )
    return found


def state_from(source: Source, bound: Bound, tokenizer: TextTokenizer) -> tuple[TrainState, dict[str, Any]]:
    """The state of a new run at step 0 with the source's weights, and its record for the run's checkpoints.

    Counts, schedule and loss scale begin anew, the optimizer's state too unless the source says otherwise. A
    collective. Raises ConfigError where the source holds another model, optimizer or tokenizer.
    """
    order, reader = CheckpointOrder(bound), CheckpointReader(source.run / "checkpoints")
    if source.optimizer and (name := run_config(source.run).optimizer.name) != bound.config.optimizer.name:
        raise ConfigError(
            f"--from-optimizer: {source.run} was trained with optimizer.name {name}, this run has "
            f"{bound.config.optimizer.name}: use the same optimizer, or start from the weights alone"
        )
    parts = ("params", "opt") if source.optimizer else ("params",)
    found = reader.restore({part: order.checkpoint_layout[part] for part in parts}, subset=True, only=source.step)
    if found is None:
        raise ConfigError(f"--from {source.path} has no checkpoint: name another one")
    if found.meta["tokenizer"] != tokenizer.fingerprint:
        raise ConfigError(f"step {found.step} of {source.run} was trained with another tokenizer: name another one")
    state = order.initial(found.state["params"])
    if source.optimizer:
        state["opt"] = found.state["opt"]
    record = {
        "run": str(source.run), "step": found.step, "tokens": found.meta["tokens"], "optimizer": source.optimizer,
        "corpus": found.meta["corpus"], "origin": found.meta.get("origin"),
    }  # fmt: skip
    return order.from_model_order(state), record


def config_of_meta(meta: dict[str, Any], source: str) -> RunConfig:
    """The configuration that a checkpoint was saved under, of any schema; raises ConfigError for one of a later."""
    check_schema(meta.get("schema", 1), source)
    return validate(meta["config"], source, hints=False)


def carry_over(state: TrainState, old: RunConfig, new: RunConfig) -> TrainState:
    """The state under changed settings: another dtype or scale_init starts the loss scale anew, and its counts."""
    if (old.precision.compute, old.precision.scale_init) == (new.precision.compute, new.precision.scale_init):
        return state
    scaler = state["scaler"]
    fresh = {**scaling.init(new.precision), "total_skipped": scaler["total_skipped"]}
    placed = {key: jax.device_put(jnp.asarray(value), scaler[key].sharding) for key, value in fresh.items()}
    return {**state, "scaler": placed}


def learning_rate_change(old: RunConfig, new: RunConfig, steps: int, tokens: int) -> list[str]:
    """One line where changed settings change the learning rate of the next step, after `steps` applied steps."""
    try:
        before, after = (float(learning_rate(c.optimizer, c.train.steps, steps, tokens)) for c in (old, new))
    except ConfigError:
        # A schedule of user code that is not registered any more.
        return []
    if abs(after - before) <= 0.01 * max(before, after):
        return []
    line = f"the learning rate of the next step is {after:.3g}, with the settings before it was {before:.3g}"
    if before > 0:
        line += f" (x {after / before:.3g})"
    implied = new.optimizer.total is None and old.optimizer.total is None and old.train.steps != new.train.steps
    if implied:
        line += (
            f": the {new.optimizer.schedule} schedule ends at train.steps, {old.train.steps} before and "
            f"{new.train.steps} now; optimizer.total {old.train.steps} keeps the schedule as it was"
        )
    return [line]


def _recorded(directory: Path) -> Source | None:
    path = directory / FROM
    if not path.is_file():
        return None
    try:
        tree = json.loads(path.read_bytes())
        return Source(Path(tree["path"]), bool(tree["optimizer"]))
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} is damaged: remove it and name --from again") from None
