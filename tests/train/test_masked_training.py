"""Loss masks from the data: what is not scored moves neither loss nor gradient by one bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from runs import LENGTH, ROWS, VOCAB, config_of, setup_of

from jaxtrain.data import IGNORE, Documents, Phase, Stream
from jaxtrain.data.packing import PACKERS
from jaxtrain.train.batch import shard_batch

Gradients = Callable[[dict[str, np.ndarray]], list[np.ndarray]]


def prompted(seed: int) -> Documents:
    """Documents of a prompt (2 to 6 tokens, not scored) and an answer; every fourth has no answer at all."""
    rng = np.random.default_rng(seed)
    prompts, answers = rng.integers(2, 7, 200), rng.integers(1, 12, 200)
    answers[::4] = 0
    lengths = prompts + answers
    stops = np.cumsum(lengths)
    within = np.arange(stops[-1]) - np.repeat(stops - lengths, lengths)
    scored = within >= np.repeat(prompts, lengths)
    return Documents(rng.integers(0, VOCAB, stops[-1]), stops - lengths, stops, [""] * 200, scored)


def batch_of(documents: Documents, packing: str) -> dict[str, np.ndarray]:
    stream = Stream(documents, phases=[Phase(0, LENGTH, ROWS)], virtual_shards=ROWS, packing=packing, packing_bins=4)
    batch = next(stream)
    stream.close()
    return batch


def gradients_on(setup: Any) -> Gradients:
    """Batch -> leaves of the gradient and, last, the summed loss, at the weights of birth."""
    params = setup.init_state()["params"]
    step = jax.jit(lambda batch: _with_loss(*setup.step.gradients(params, batch, 1.0)))
    return lambda batch: jax.tree.leaves(
        jax.device_get(step(shard_batch(batch, 0, setup.batch_shape, setup.batch_sharding)))
    )


def _with_loss(gradients: Any, sums: dict[str, Any]) -> Any:
    return gradients, sums["loss"]


@pytest.fixture(scope="module", params=[1, 4], ids=["one", "fsdp-4"])
def gradients(request: pytest.FixtureRequest) -> Gradients:
    # A window of one token: a position sees itself alone, so of a prompt only the last token reaches the answer.
    rules = {"preset": ["fsdp"]} if request.param > 1 else {}
    return gradients_on(setup_of(config_of(model={"windows": [1], "n_layers": 2}, rules=rules), request.param))


def test_randomised_prompts_and_paddings_change_no_bit(gradients: Gradients) -> None:
    rng = np.random.default_rng(1)
    documents = prompted(0)
    scored = np.asarray(documents.scored)
    # The token before a scored one is the input that predicts it: it stays.
    free = ~scored & ~np.append(scored[1:], False)
    tokens = np.where(free, rng.integers(0, VOCAB, len(scored)), np.asarray(documents.tokens))
    assert (tokens != documents.tokens).sum() > 200
    for packing in sorted(PACKERS):
        before, after = batch_of(documents, packing), batch_of(replace(documents, tokens=tokens), packing)
        padding = after["segments"] == 0
        after["tokens"][padding] = rng.integers(0, VOCAB, padding.sum())
        after["positions"][padding] = rng.integers(0, LENGTH, padding.sum())
        assert (before["tokens"] != after["tokens"]).any() and (before["labels"] == after["labels"]).all()
        for got, want in zip(*(gradients(batch) for batch in (after, before)), strict=True):
            np.testing.assert_array_equal(got, want)


def test_the_last_prompt_token_and_the_first_answer_token_do_count(gradients: Gradients) -> None:
    documents = prompted(0)
    scored = np.asarray(documents.scored)
    first_answer = np.flatnonzero(scored & ~np.append(False, scored[:-1]))
    plain = gradients(batch_of(documents, "first_fit"))[-1]
    for at in (first_answer - 1, first_answer):
        tokens = np.array(documents.tokens)
        tokens[at] = (tokens[at] + 1) % VOCAB
        assert gradients(batch_of(replace(documents, tokens=tokens), "first_fit"))[-1] != plain


def test_documents_without_an_answer_change_nothing_even_when_all_is_seen() -> None:
    gradients = gradients_on(setup_of(config_of(model={"n_layers": 2}), 1))
    documents = prompted(0)
    bare = np.repeat(np.arange(200) % 4 == 0, documents.lengths)
    tokens = np.where(bare, np.random.default_rng(2).integers(0, VOCAB, len(bare)), np.asarray(documents.tokens))
    before, after = (batch_of(replace(documents, tokens=each), "first_fit") for each in (documents.tokens, tokens))
    assert (before["tokens"] != after["tokens"]).any() and (before["labels"] != IGNORE).any()
    for got, want in zip(*(gradients(batch) for batch in (after, before)), strict=True):
        np.testing.assert_array_equal(got, want)
