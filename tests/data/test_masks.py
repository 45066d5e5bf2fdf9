"""Loss masks from data: hand-built examples, no off-by-one; unscored tokens change no loss and no gradient."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import VOCAB, setup_of
from runs import config_of as run_config_of
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from jaxtrain.config import ConfigError, validate
from jaxtrain.data import IGNORE, Corpus, held_out_batches, prepare
from jaxtrain.data.readers import Turn
from jaxtrain.data.tokenizer import load_tokenizer
from jaxtrain.train.batch import shard_batch

SPECIAL = ["<s>", "</s>", "<|user|>", "<|model|>", "<|end|>"]
BOS, EOS, USER, MODEL, END = range(51, 56)
FIRST = 1  # the id of w0


def words_file(folder: Path) -> Path:
    vocabulary = {name: i for i, name in enumerate(["[unk]", *(f"w{i}" for i in range(50))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[unk]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer.save(str(folder / "words.json"))
    return folder / "words.json"


def corpus_of(folder: Path, records: list[dict], **source) -> Corpus:
    (folder / "in").mkdir(exist_ok=True)
    (folder / "in/a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    data = {"tokenizer": {"path": str(words_file(folder))}, "cache": str(folder / "cache"), "held_out": 0.0}
    return prepare(validate({"data": {"sources": [{"jsonl": str(folder / "in"), **source}], **data}}))


def w(*numbers: int) -> list[int]:
    return [FIRST + number for number in numbers]


PAIR = {"prompt_field": "q", "response_field": "a"}
TEMPLATE = {"user": ["<|user|>", "<|end|>"], "assistant": ["<|model|>", "<|end|>"], "system": ["", ""]}
CHAT = {"messages_field": "turns", "template": TEMPLATE}


def test_prompt_and_response_by_hand(tmp_path):
    corpus = corpus_of(tmp_path, [{"q": "w1 w2", "a": "w3 w4"}], **PAIR)
    assert corpus.train[0].tolist() == [BOS, *w(1, 2, 3, 4), EOS]
    assert corpus.train.scored[0:6].tolist() == [False, False, False, True, True, True]
    (batch,) = held_out_batches(corpus.train, seq_len=8, global_batch=1, batches=1)
    assert batch["tokens"].tolist() == [[BOS, *w(1, 2, 3, 4), 0, 0, 0]]
    # The label of w2, the prompt's last token, is the response's first: it is the first that is scored.
    assert batch["labels"].tolist() == [[IGNORE, IGNORE, *w(3, 4), EOS, IGNORE, IGNORE, IGNORE]]


def test_chat_by_hand(tmp_path):
    turns = [
        {"role": "user", "content": "w1"},
        {"role": "assistant", "content": "w2 w3"},
        {"role": "user", "content": "w4"},
        {"role": "assistant", "content": "w5"},
    ]
    corpus = corpus_of(tmp_path, [{"turns": turns}, {"turns": turns[:3]}], **CHAT)
    ids = [BOS, USER, *w(1), END, MODEL, *w(2, 3), END, USER, *w(4), END, MODEL, *w(5), END, EOS]
    assert corpus.train[0].tolist() == ids
    scored = corpus.train.scored[0 : len(ids)]
    assert [i for i, s in zip(ids, scored, strict=True) if s] == [*w(2, 3), END, *w(5), END, EOS]
    assert np.flatnonzero(scored).tolist() == [5, 6, 7, 12, 13, 14]
    # A chat that ends with the user's turn has nothing to close.
    lo, hi = corpus.train.starts[1], corpus.train.stops[1]
    assert np.flatnonzero(corpus.train.scored[lo:hi]).tolist() == [5, 6, 7] and hi - lo == 12


def test_a_message_cannot_open_a_turn(tmp_path):
    corpus = corpus_of(tmp_path, [{"turns": [{"role": "user", "content": "w1 <|model|> w2 </s>"}]}], **CHAT)
    ids = corpus.train[0].tolist()
    assert ids[1] == USER and MODEL not in ids and ids.count(EOS) == 1


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"turns": []}, r"line 1: the field 'turns' is \[\], not a list of messages"),
        ({"turns": "hello"}, r"not a list of messages"),
        ({"turns": [{"role": "user"}]}, r"a message is \{'role': 'user'\}, not an object with role and content"),
        ({"turns": [{"role": "asistant", "content": "w1"}]}, r"the role 'asistant' .*did you mean assistant"),
        ({"turns": [{"role": "user", "content": None}]}, r"the field 'content' is None, not text"),
        ({"chat": []}, r"there is no field 'turns'"),
    ],
)
def test_bad_chats(tmp_path, record, message):
    with pytest.raises(ConfigError, match=message):
        corpus_of(tmp_path, [record], **CHAT)


def test_a_response_must_be_there(tmp_path):
    with pytest.raises(ConfigError, match=r"line 1: the field 'a' is empty: there is nothing to score"):
        corpus_of(tmp_path, [{"q": "w1", "a": ""}], **PAIR)


words = st.lists(st.integers(0, 49), min_size=1, max_size=9)


@given(pairs=st.lists(st.tuples(words, words), min_size=1, max_size=8), length=st.integers(2, 16))
@settings(max_examples=25, deadline=None)
def test_every_response_token_is_scored_once_and_no_other(tmp_path_factory, pairs, length):
    records = [{"q": " ".join(f"w{i}" for i in q), "a": " ".join(f"w{i}" for i in a)} for q, a in pairs]
    corpus = corpus_of(tmp_path_factory.mktemp("pairs"), records, **PAIR)
    batches = held_out_batches(corpus.train, seq_len=length, global_batch=1, batches=1000)
    labels = np.concatenate([batch["labels"].ravel() for batch in batches])
    want = [token for _, a in pairs for token in (*w(*a), EOS)]
    assert sorted(labels[labels != IGNORE].tolist()) == sorted(want)


def test_borders_of_turns_are_borders_of_tokens(tmp_path):
    """The answer's first token is the one that follows when the prompt alone is encoded, as in generation."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("the answer is forty two. " * 50)
    data = {"tokenizer": {"vocab_size": 300}, "cache": str(tmp_path / "cache"), "held_out": 0.0}
    tokenizer = prepare(validate({"data": {"sources": [{"text": str(tmp_path / "in")}], **data}})).tokenizer
    ((ids, scored),) = tokenizer.encode_contents([(Turn("the answer is f", False), Turn("orty two.", True))])
    assert scored is not None
    prompt = tokenizer.encode("the answer is f")
    assert ids[: len(prompt)].tolist() == prompt and not scored[: len(prompt)].any() and scored[len(prompt) :].all()
    assert tokenizer.decode(ids[scored].tolist()) == "orty two."


def test_special_names_count_in_templates_alone(tmp_path):
    tokenizer = load_tokenizer(words_file(tmp_path))
    ((ids, _),) = tokenizer.encode_contents([(Turn("<|end|>", True, special=True), Turn("<|end|>", True))])
    assert ids[1] == END and END not in ids[2:].tolist()


def test_unscored_turns_and_padding_leave_loss_and_gradients_bitwise_the_same(tmp_path):
    """Nothing scored follows these tokens in their document, so no attention carries them anywhere."""
    rng = np.random.default_rng(0)
    config = run_config_of()
    setup, length, rows = setup_of(config, 1), config.data.seq_len, config.train.global_batch

    def message(role: str, count: int) -> dict:
        return {"role": role, "content": " ".join(f"w{i}" for i in rng.integers(0, 50, count))}

    chats = [
        [message("user", rng.integers(1, 6)), message("assistant", rng.integers(1, 6)), message("user", 4)]
        for _ in range(60)
    ]
    corpus = corpus_of(tmp_path, [{"turns": chat} for chat in chats], **CHAT)
    (batch,) = held_out_batches(corpus.train, seq_len=length, global_batch=rows, batches=1)
    free = _after_the_last_scored(batch)
    assert free.sum() > 50 and (batch["segments"][free] > 0).any() and (batch["segments"][free] == 0).any()
    altered = {**batch, "tokens": np.where(free, rng.integers(0, VOCAB, free.shape), batch["tokens"]).astype(np.int32)}

    params = setup.init_state()["params"]
    gradients = jax.jit(lambda p, b: setup.step.gradients(p, b, 1.0))
    got, want = (
        gradients(params, shard_batch(b, 0, setup.batch_shape, setup.batch_sharding)) for b in (altered, batch)
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
    shifted = {**batch, "labels": np.where(free, 3, batch["labels"]).astype(np.int32)}
    other = gradients(params, shard_batch(shifted, 0, setup.batch_shape, setup.batch_sharding))
    assert float(other[1]["loss"]) != float(want[1]["loss"])


def _after_the_last_scored(batch: dict[str, np.ndarray]) -> np.ndarray:
    """Positions of padding, and those of each segment behind its last scored one."""
    free = batch["segments"] == 0
    for row in range(len(free)):
        for segment in range(1, batch["segments"][row].max() + 1):
            here = np.flatnonzero(batch["segments"][row] == segment)
            scored = here[batch["labels"][row, here] != IGNORE]
            free[row, here[here > scored[-1]] if len(scored) else here] = True
    return free
