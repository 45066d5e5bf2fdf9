"""Uses of weights during and after training: held-out loss, sampling, restoring a finished run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint import CheckpointReader
from jaxtrain.checkpoint.order import CheckpointOrder
from jaxtrain.config import ConfigError, load_config
from jaxtrain.data import Corpus, held_out_batches, prepare
from jaxtrain.nn.generate import sample
from jaxtrain.train.agreement import agree_on_start
from jaxtrain.train.batch import shard_batch
from jaxtrain.train.resolve import Bound, bind
from jaxtrain.train.step import Batch, jit_evaluate

EvaluateFunction = Callable[[Any, Batch], tuple[jax.Array, jax.Array]]


@dataclass(frozen=True)
class Opened:
    """A run restored from its newest intact checkpoint."""

    setup: Bound
    corpus: Corpus
    params: Any
    step: int


def open_run(directory: Path, overrides: Sequence[str] = ()) -> Opened:
    """Restore a run's weights on this machine's devices; overrides such as mesh.data=-1 change its settings.

    Raises ConfigError where the directory is not a run, or has no intact checkpoint.
    """
    if not (directory / "config.yaml").is_file():
        raise ConfigError(
            f"{directory} is not a run (it has no config.yaml): name the --run directory of a training run"
        )
    config = load_config(directory / "config.yaml", overrides, hints=False)
    agree_on_start(config, read=directory)
    setup, corpus = bind(config), prepare(config)
    order = CheckpointOrder(setup)
    found = CheckpointReader(directory / "checkpoints").restore(order.params_layout, subset=True)
    if found is None:
        raise ConfigError(f"{directory} has no checkpoint yet: train it first")
    if found.meta["tokenizer"] != corpus.tokenizer_fingerprint:
        raise ConfigError(
            f"the tokenizer of {directory} is not the one it was trained with: restore data.tokenizer.path"
        )
    return Opened(setup, corpus, order.params_from_checkpoint(found.state), found.step)


def held_out(setup: Bound, corpus: Corpus) -> list[Batch]:
    """The run's evaluation batches, on their devices; raises ConfigError where no document is held out."""
    config = setup.config
    if not len(corpus.held_out):
        raise ConfigError(
            f"data.held_out {config.data.held_out} leaves no document for evaluation: raise it, bring more files, "
            "or set eval.every: null"
        )
    # One document a sequence where training has it so: the attention backend may rely on it.
    packing = "none" if config.data.packing == "none" else "first_fit"
    batches = held_out_batches(
        corpus.held_out, config.data.seq_len, config.train.global_batch, config.eval.batches, packing=packing
    )
    return [shard_batch(batch, 0, setup.batch_shape, setup.batch_sharding) for batch in batches]


def mean_loss(evaluate: EvaluateFunction, params: Any, batches: Sequence[Batch]) -> tuple[float, int]:
    """Loss in nats a scored token over all batches together, and their number of scored tokens."""
    parts = [evaluate(params, batch) for batch in batches]
    scored = sum(int(count) for _, count in parts)
    return sum(float(total) for total, _ in parts) / max(scored, 1), scored


def evaluate(directory: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Held-out loss of a run's newest checkpoint: step, eval_loss (nats a scored token), scored_tokens.

    Raises ConfigError like `open_run`, and where no document is held out.
    """
    opened = open_run(Path(directory), overrides)
    loss, scored = mean_loss(jit_evaluate(opened.setup.step), opened.params, held_out(opened.setup, opened.corpus))
    return {"step": opened.step, "eval_loss": loss, "scored_tokens": scored}


def generate(
    directory: Path,
    prompt: str,
    tokens: int = 96,
    temperature: float = 0.7,
    seed: int = 0,
    overrides: Sequence[str] = (),
) -> str:
    """The prompt and up to `tokens` more, drawn with a run's newest checkpoint; temperature 0 is greedy.

    Raises ConfigError like `open_run`, and for a prompt that fills data.seq_len.
    """
    if tokens < 1 or temperature < 0:
        raise ConfigError(
            f"--tokens {tokens} --temperature {temperature}: use at least 1 token and a temperature of at least 0"
        )
    opened = open_run(Path(directory), overrides)
    return continue_text(opened.setup, opened.corpus, opened.params, prompt, tokens, temperature, seed)


def continue_text(
    setup: Bound, corpus: Corpus, params: Any, prompt: str, tokens: int, temperature: float, seed: int
) -> str:
    """The prompt and up to `tokens` more, at most data.seq_len in all; temperature 0 is greedy."""
    ids = corpus.tokenizer.encode(prompt)
    room = setup.config.data.seq_len - len(ids)
    if room < 1:
        raise ConfigError(
            f"the prompt has {len(ids)} tokens and data.seq_len is {setup.config.data.seq_len}: shorten the prompt"
        )
    drawn = sample(setup.model, params, ids, min(tokens, room), temperature, jax.random.key(seed))
    return corpus.tokenizer.decode(list(drawn))
