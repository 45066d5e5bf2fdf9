"""Uses of weights during and after training: held-out loss, sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxtrain.config import ConfigError
from jaxtrain.data import Corpus, TextTokenizer, held_out_batches, prepare
from jaxtrain.nn.generate import sample
from jaxtrain.train.batch import shard_batch
from jaxtrain.train.reading import open_run, say
from jaxtrain.train.resolve import Bound
from jaxtrain.train.step import Batch, jit_evaluate

EvaluateFunction = Callable[[Any, Batch], tuple[jax.Array, jax.Array]]


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


def evaluate(directory: Path, overrides: Sequence[str] = (), log: Callable[[str], None] = say) -> dict[str, Any]:
    """Held-out loss of a run's newest checkpoint: step, eval_loss (nats a scored token), scored_tokens.

    Reads only the held-out documents, with the run's tokenizer; `log` is told when the corpus is not the one that the
    run was trained on, and when another mesh was chosen. Raises ConfigError like `open_run`, and where no document is
    held out.
    """
    opened = open_run(Path(directory), overrides, log)
    corpus = prepare(opened.setup.config, opened.tokenizer, held_out_only=True)
    if corpus.fingerprint != opened.meta["corpus"]:
        before = opened.meta.get("documents", {}).get("held_out")
        log(
            f"the corpus changed since step {opened.step} was saved ({opened.meta['corpus'][:12]} -> "
            f"{corpus.fingerprint[:12]}): evaluated on the {len(corpus.held_out):,} documents that are held out now"
            + (f", {before:,} were then" if before is not None else "")
        )
    loss, scored = mean_loss(jit_evaluate(opened.setup.step), opened.params, held_out(opened.setup, corpus))
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
    return continue_text(opened.setup, opened.tokenizer, opened.params, prompt, tokens, temperature, seed)


def continue_text(
    setup: Bound, tokenizer: TextTokenizer, params: Any, prompt: str, tokens: int, temperature: float, seed: int
) -> str:
    """The prompt and up to `tokens` more, at most data.seq_len in all; temperature 0 is greedy."""
    ids = tokenizer.encode(prompt)
    room = setup.config.data.seq_len - len(ids)
    if room < 1:
        raise ConfigError(
            f"the prompt has {len(ids)} tokens and data.seq_len is {setup.config.data.seq_len}: shorten the prompt"
        )
    drawn = sample(setup.model, params, ids, min(tokens, room), temperature, jax.random.key(seed))
    return tokenizer.decode(list(drawn))
