"""Uses of weights during and after training: held-out loss, sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxtrain.config import ConfigError
from jaxtrain.data import IGNORE, Corpus, TextTokenizer, held_out_batches, prepare
from jaxtrain.data.ends import stop_ids
from jaxtrain.data.records import Turn
from jaxtrain.nn.generate import sample
from jaxtrain.train.batch import shard_batch
from jaxtrain.train.reading import open_run, say
from jaxtrain.train.resolve import Bound
from jaxtrain.train.step import Batch, jit_evaluate

EvaluateFunction = Callable[[Any, Batch], tuple[jax.Array, jax.Array]]


def held_out(setup: Bound, corpus: Corpus) -> list[Batch]:
    """The run's evaluation batches, on their devices; raises ConfigError where no scored token is held out."""
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
    if not any((batch["labels"] != IGNORE).any() for batch in batches):
        # A mean over nothing would be printed as a loss of 0.
        raise ConfigError(
            f"data.held_out {config.data.held_out} holds out {len(corpus.held_out)} documents without a scored token: "
            "raise it, bring documents with an answer, or set eval.every: null"
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
    chat: bool = False,
    special: bool = False,
) -> str:
    """The prompt and up to `tokens` more, drawn with a run's newest checkpoint; temperature 0 is greedy.

    chat: the prompt is a user's turn in the template of data.sources, and the answer alone is returned. special: names
    of special tokens in the prompt are special tokens. The text ends where the model ends it, which is printed. Raises
    ConfigError like `open_run`, for a prompt that fills data.seq_len, and for a chat without a template.
    """
    if tokens < 1 or temperature < 0:
        raise ConfigError(
            f"--tokens {tokens} --temperature {temperature}: use at least 1 token and a temperature of at least 0"
        )
    opened = open_run(Path(directory), overrides)
    # An imported model's own files are in RUN/hub.
    stops = stop_ids(Path(directory) / "hub", opened.tokenizer.eos)
    given = encode_prompt(opened.setup, opened.tokenizer, prompt, chat, special)
    return continue_text(opened.setup, opened.tokenizer, opened.params, given, tokens, temperature, seed, stops, say)


class Prompt(NamedTuple):
    """Token ids of a prompt."""

    ids: list[int]
    stops: tuple[int, ...] = ()
    """Ids that end the answer, beside those of the model."""
    answer_only: bool = False


def encode_prompt(
    setup: Bound, tokenizer: TextTokenizer, prompt: str, chat: bool = False, special: bool = False
) -> Prompt:
    """A prompt as `generate` reads it; raises ConfigError for a chat where no source has a template for it."""
    if not chat:
        return Prompt(tokenizer.encode_turns([Turn(prompt, False, special)]))
    template = chat_template(setup)
    if template is None:
        raise ConfigError(
            "--chat needs a source whose template has the roles user and assistant (data.sources: template), which "
            "this run has not: leave --chat out, and write the turns into --prompt with --special"
        )
    (before, after), (opening, closing) = template["user"], template["assistant"]
    turns = [Turn(before, False, True), Turn(prompt, False, special), Turn(after + opening, False, True)]
    return Prompt(tokenizer.encode_turns(turns), tuple(tokenizer.special_ids(closing)[:1]), answer_only=True)


def chat_template(setup: Bound) -> dict[str, tuple[str, str]] | None:
    """The template of the first chat source of a run."""
    found = (source.template for source in setup.config.data.sources)
    return next((template for template in found if {"user", "assistant"} <= template.keys()), None)


def continue_text(
    setup: Bound,
    tokenizer: TextTokenizer,
    params: Any,
    prompt: Prompt,
    tokens: int,
    temperature: float,
    seed: int,
    stops: Sequence[int],
    log: Callable[[str], None] = lambda line: None,
) -> str:
    """The prompt and up to `tokens` more, at most data.seq_len in all; temperature 0 is greedy.

    Ends at a token of `stops` or of the prompt's own. `log` is told so, and which special tokens the text leaves out.
    """
    ids, room = prompt.ids, setup.config.data.seq_len - len(prompt.ids)
    if room < 1:
        raise ConfigError(
            f"the prompt has {len(ids)} tokens and data.seq_len is {setup.config.data.seq_len}: shorten the prompt"
        )
    ends, key = {*stops, *prompt.stops}, jax.random.key(seed)
    drawn = sample(setup.model, params, ids, min(tokens, room), temperature, key, sorted(ends)).tolist()
    added = drawn[len(ids) :]
    if added[-1] in ends:
        log(f"ended by the model after {len(added) - 1} tokens, at {tokenizer.inner.id_to_token(added.pop())!r}")
    special = tokenizer.special
    hidden = [str(tokenizer.inner.id_to_token(token)) for token in added if token in special]
    if hidden:
        log(f"special tokens left out of the text: {' '.join(hidden)}")
    return tokenizer.decode(added if prompt.answer_only else [*ids, *added])
