"""Loss masks from data: hand-built examples, no off-by-one; unscored tokens change no loss and no gradient."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from runs import VOCAB, setup_of
from runs import config_of as run_config_of
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from jaxtrain.config import ConfigError, RunConfig, replace, validate
from jaxtrain.data import IGNORE, Corpus, Documents, held_out_batches, prepare
from jaxtrain.data.preview import preview
from jaxtrain.data.records import Turn
from jaxtrain.data.tokenizer import load_tokenizer
from jaxtrain.train.batch import shard_batch
from jaxtrain.train.startup import unscored_notes
from jaxtrain.train.use import held_out

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
    turns = [{"role": "user", "content": "w1 <|model|> w2 </s>"}, {"role": "assistant", "content": "w1"}]
    corpus = corpus_of(tmp_path, [{"turns": turns}], **CHAT)
    ids = corpus.train[0].tolist()
    assert ids[1] == USER and ids.count(MODEL) == 1 and ids.count(EOS) == 1


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


MESSAGES = {"messages_field": "m", "template": {"user": ["<u>", "\n"], "assistant": ["<a>", "\n"]}}


def chat_config(tmp_path: Path, chats: list[list[str]], **source: Any) -> RunConfig:
    """A run over chats, each the roles of its messages, beside a source of text."""
    chats = [[{"role": role, "content": f"{role} {n}"} for role in chat] for n, chat in enumerate(chats)]
    (tmp_path / "text").mkdir(parents=True)
    (tmp_path / "chat.jsonl").write_text("\n".join(json.dumps({"m": chat}) for chat in chats))
    for n in range(4):
        (tmp_path / "text" / f"{n}.txt").write_text(f"text {n}")
    return validate({
        "model": {"vocab_size": 300},
        "data": {
            "sources": [
                {"text": str(tmp_path / "text")},
                {"jsonl": str(tmp_path / "chat.jsonl"), **MESSAGES, **source},
            ],
            "tokenizer": {"vocab_size": 300}, "seq_len": 32, "cache": str(tmp_path / "cache"), "held_out": 0,
        },
        "train": {"global_batch": 4}, "observe": {"progress": False},
    })  # fmt: skip


def test_a_source_without_a_scored_token_is_refused_by_name(tmp_path: Path) -> None:
    # A chat that ends before the answer trains nothing; so does a template whose model has another name.
    config = chat_config(tmp_path, [["user"], ["user", "user"]])
    with pytest.raises(
        ConfigError, match=r"data\.sources\[1\] .*chat\.jsonl.*none of its 2 documents has a scored token"
    ):
        prepare(config)
    with pytest.raises(ConfigError, match="the roles assistant, model, gpt are, its template has user, bot"):
        prepare(chat_config(tmp_path / "b", [["user", "bot"]], template={"user": ["", ""], "bot": ["", ""]}))


def test_documents_without_a_scored_token_are_counted_by_source(tmp_path: Path) -> None:
    config = chat_config(tmp_path, [["user", "assistant"], ["user"], ["user", "assistant", "user"], ["user", "user"]])
    corpus = prepare(config)
    assert corpus.unscored == (0, 2) and corpus.describe()["documents without a scored token"] == 2
    (line,) = unscored_notes(config, corpus)
    assert line.startswith(f"data.sources[1] ({tmp_path}/chat.jsonl): 2 training documents have no scored token")
    assert corpus.train.scored_targets().tolist() == [
        int(corpus.train.scored[start + 1 : stop].sum())
        for start, stop in zip(corpus.train.starts, corpus.train.stops, strict=True)
    ]


def test_the_preview_shows_each_target_once_special_ones_included(tmp_path: Path) -> None:
    template = {"user": ["<|im_start|>", "<|im_end|>"], "assistant": ["<|im_start|>", "<|im_end|>"]}
    config = chat_config(tmp_path, [["user", "assistant"]] * 3, template=template)
    inner = prepare(config).tokenizer.inner
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    (tmp_path / "own").mkdir()
    inner.save(str(tmp_path / "own" / "tokenizer.json"))
    config = replace(config, f"data.tokenizer.path={tmp_path / 'own' / 'tokenizer.json'}", "data.seq_len=64")
    seen = preview(config, 1)
    console = Console(width=400, file=io.StringIO())
    console.print(seen.render())
    plain = console.file.getvalue()
    # The opening of an answer is part of the prompt; its closing token and the document's end are trained.
    assert "⟦<|bos|><|im_start|>user 0<|im_end|><|im_start|>⟧assistant 0<|im_end|><|eos|>" in plain
    assert "⟦<|bos|>⟧text 0<|eos|>" in plain


def test_held_out_documents_without_a_scored_token_are_no_loss_of_zero(tmp_path: Path) -> None:
    config = replace(chat_config(tmp_path, [["user", "assistant"]] * 9), "data.held_out=0.5", "model.d_model=64")
    corpus = prepare(config)
    masked = Documents(
        corpus.held_out.tokens, corpus.held_out.starts, corpus.held_out.stops, corpus.held_out.names,
        np.zeros(len(corpus.held_out.tokens), bool),
    )  # fmt: skip
    setup = setup_of(config, devices=1)
    assert held_out(setup, corpus)
    with pytest.raises(ConfigError, match=r"holds out \d+ documents without a scored token"):
        held_out(setup, dataclasses.replace(corpus, held_out=masked))
