"""Iterables that user code registers: the same documents, cache, masks and exact resume as files; faults are named."""

import json
import textwrap
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_masks import BOS, EOS, PAIR, w, words_file

from jaxtrain.config import ConfigError, RunConfig, replace, validate
from jaxtrain.data import FIELDS, SOURCES, TokenIds, Turn, open_stream, prepare
from jaxtrain.data import registered as module
from jaxtrain.data.tokenize import tokenize

TEXTS = [f"document {i} " + "and more " * (i % 9) for i in range(120)]


class Documents:
    """Counts how often it is read."""

    reads = 0

    def __init__(self, items: Any = TEXTS, version: str = "1") -> None:
        self.items, self.fingerprint = items, f"documents {version}"

    def __iter__(self) -> Iterator[Any]:
        Documents.reads += 1
        yield from self.items


@pytest.fixture(autouse=True)
def registered() -> Iterator[Callable[[str, Any], None]]:
    names: list[str] = []

    def register(name: str, factory: Any) -> None:
        SOURCES.register(name)(factory)
        names.append(name)

    Documents.reads = 0
    register("documents", Documents)
    yield register
    for name in names:
        SOURCES.unregister(name)


def config_of(folder: Path, *overrides: str, **source: Any) -> RunConfig:
    tree = {
        "model": {"vocab_size": 300, "max_seq_len": 32},
        "data": {
            "sources": [{"registered": "documents"} | source], "tokenizer": {"vocab_size": 300}, "seq_len": 32,
            "cache": str(folder / "cache"), "held_out": 0.1,
        },
        "train": {"global_batch": 4},
    }  # fmt: skip
    return replace(validate(tree), *overrides)


def test_documents_are_read_once_and_cached_under_the_fingerprint(tmp_path):
    corpus = prepare(config_of(tmp_path))
    reads = Documents.reads
    assert len(corpus.train) + len(corpus.held_out) == 120 and 0 < len(corpus.held_out) < 40
    for i, name in enumerate(corpus.train.names):
        assert corpus.tokenizer.decode(corpus.train[i].tolist()) == TEXTS[int(name.removeprefix("documents:"))]
    assert prepare(config_of(tmp_path)).fingerprint == corpus.fingerprint and Documents.reads == reads
    other = prepare(config_of(tmp_path, options={"version": "2"}))
    assert other.fingerprint != corpus.fingerprint and Documents.reads > reads


def test_a_stream_of_an_iterable_and_a_folder_resumes_at_the_same_batches(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("a file of words " * 300)
    config = config_of(tmp_path, max_documents=90)
    both = [*config.model_dump(mode="json")["data"]["sources"], {"text": str(tmp_path / "text"), "weight": 0.3}]
    config = replace(config, f"data.sources={json.dumps(both)}", "data.held_out=0")
    with closing(open_stream(prepare(config).train, config)) as stream:
        for _ in range(3):
            next(stream)
        state = json.loads(json.dumps(stream.get_state()))
        ahead = [next(stream) for _ in range(9)]
    with closing(open_stream(prepare(config).train, config)) as stream:
        stream.set_state(state)
        again = [next(stream) for _ in range(9)]
    assert all(np.array_equal(a[f], b[f]) for a, b in zip(ahead, again, strict=True) for f in FIELDS)


def test_every_form_of_a_document(tmp_path, registered):
    flags = np.array([False, True, True])
    items = [
        "w1 w2", {"q": "w3", "a": "w4"}, np.array([5, 6, 7]), TokenIds(np.array([5, 6, 7]), flags), "  ",
        (Turn("w8", False), Turn("w9", True)),
    ]  # fmt: skip
    registered("mixed", lambda: Documents(items))
    settings = (f"data.tokenizer.path={words_file(tmp_path)}", "data.held_out=0")
    corpus = prepare(config_of(tmp_path, *settings, registered="mixed", **PAIR))
    train = corpus.train
    found = [(train[i].tolist(), train.scored[train.starts[i] : train.stops[i]].tolist()) for i in range(len(train))]
    ids = [[BOS, *w(1, 2), EOS], [BOS, *w(3, 4), EOS], [5, 6, 7], [5, 6, 7], [BOS, *w(8, 9), EOS]]
    assert [each for each, _ in found] == ids and corpus.empty == 1
    assert [scored for _, scored in found] == [
        [True] * 4, [False, False, True, True], [True] * 3, flags.tolist(), [False, False, True, True],
    ]  # fmt: skip
    counts = tokenize(config_of(tmp_path, *settings, registered="mixed", **PAIR), tmp_path / "out", workers=2)
    shards = prepare(validate({"data": {"sources": [{"tokens": str(tmp_path / "out")}], "held_out": 0.0,
                                        "cache": str(tmp_path / "cache")}})).train  # fmt: skip
    assert counts["documents"] == 5 and [shards[i].tolist() for i in range(5)] == ids
    assert shards.scored[shards.starts[3] : shards.stops[3]].tolist() == flags.tolist()


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (7, "registered:bad, document 1: the field 'token ids' is 7, neither text nor a list"),
        (TokenIds(np.array([1, 2]), np.array([True])), r"document 1: 2 token ids have flags of shape \(1,\)"),
        ("a \ud800", "document 1: a document has a lone surrogate at character 2"),
        ({"txt": "a"}, r"document 1: there is no field 'text' \(did you mean txt\?\)"),
        (np.array([9999]), "document 1: token id 9999 at token 0 is beyond the tokenizer's vocabulary of 300"),
    ],
)
def test_an_unfit_document_is_an_error_or_counted(tmp_path, registered, item, message):
    registered("bad", lambda: Documents(["good text", item, *TEXTS]))
    with pytest.raises(ConfigError, match=message):
        prepare(config_of(tmp_path, registered="bad"))
    corpus = prepare(config_of(tmp_path, "data.on_bad_record=skip", registered="bad"))
    assert corpus.skipped == 1 and len(corpus.train) + len(corpus.held_out) == 121


def test_faults_of_a_registration(tmp_path, registered):
    with pytest.raises(ConfigError, match=r"registered is 'docments', .* \(did you mean documents\?\)"):
        prepare(config_of(tmp_path, registered="docments"))
    with pytest.raises(ConfigError, match=r"options of the registered source 'documents' do not fit: .*'n'"):
        prepare(config_of(tmp_path, options={"n": 3}))
    registered("unversioned", lambda: TEXTS)
    with pytest.raises(ConfigError, match="'unversioned' has the fingerprint None: give its objects an attribute"):
        prepare(config_of(tmp_path, registered="unversioned"))
    with pytest.raises(ConfigError, match="options means nothing for a source of text"):
        validate({"data": {"sources": [{"text": "a", "options": {"n": 3}}]}})


def test_the_example_of_the_docs(tmp_path):
    example = textwrap.dedent(module.__doc__.split("names it:")[1].split("config = ")[0])
    exec(example, {})
    try:
        corpus = prepare(config_of(tmp_path, registered="counting", options={"documents": 70}))
        assert len(corpus.train) + len(corpus.held_out) == 70
    finally:
        SOURCES.unregister("counting")
