"""Every kind of source gives the same documents; every fault names file and line; skipped records are counted."""

import gzip
import json
import os
import time
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.cli import main
from jaxtrain.config import ConfigError, RunConfig, load_config, validate
from jaxtrain.data import Corpus, prepare
from jaxtrain.data import sources as sources_module
from jaxtrain.data.readers import FILE_KINDS
from jaxtrain.data.sources import is_record_held_out, list_source, records_held_out

TEXTS = [f"Text {i}: café {'x ' * (i % 5)}\nsecond line {i}" for i in range(60)]


def config_of(tmp_path: Path, source: dict, **data) -> RunConfig:
    tokenizer = {"vocab_size": 300} | data.pop("tokenizer", {})
    return validate(
        {
            "data": {
                "sources": [source],
                "tokenizer": tokenizer,
                "cache": str(tmp_path / "cache"),
                "held_out": 0.0,
                **data,
            }
        }
    )


def corpus_of(tmp_path: Path, source: dict, **data) -> Corpus:
    return prepare(config_of(tmp_path, source, **data))


def texts_of(corpus: Corpus) -> list[str]:
    return [corpus.tokenizer.decode(corpus.train[i].tolist()) for i in range(len(corpus.train))]


def lines(records: list) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def write(kind: str, folder: Path, texts: list[str], name: str = "text") -> dict:
    """The texts in files of one kind, and the source that reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    records = [{name: text, "id": i} for i, text in enumerate(texts)]
    half = len(texts) // 2
    if kind == "text":
        for i, text in enumerate(texts):
            (folder / f"{i:03d}.txt").write_bytes(text.encode())
    elif kind == "jsonl":
        (folder / "a.jsonl").write_bytes(lines(records[:half]))
        (folder / "b.jsonl").write_bytes(lines(records[half:]))
    elif kind == "gz":
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines(records[:half])) + gzip.compress(lines(records[half:])))
    elif kind == "zst":
        packed = (pa.compress(lines(part), codec="zstd", asbytes=True) for part in (records[:half], records[half:]))
        (folder / "a.jsonl.zst").write_bytes(b"".join(packed))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(records), folder / "a.parquet", row_group_size=7)
    elif kind == "hf":
        table = pa.Table.from_pylist(records)
        with pa.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=9)
        state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_indices_data_files": None}
        (folder / "state.json").write_text(json.dumps(state))
    elif kind == "arrayrecord":
        writer = ArrayRecordWriter(str(folder / "a.array_record"), "group_size:1")
        for record in records:
            writer.write(json.dumps(record).encode() if name != "text" else record[name].encode())
        writer.close()
    return {kind if kind in FILE_KINDS else "jsonl": str(folder)}


KIND_NAMES = ["text", "jsonl", "gz", "zst", "parquet", "hf", "arrayrecord"]


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_every_kind_gives_the_same_documents(tmp_path, kind):
    corpus = corpus_of(tmp_path, write(kind, tmp_path / "in", TEXTS))
    assert texts_of(corpus) == TEXTS
    assert corpus.bytes == sum(len(text.encode()) for text in TEXTS) and corpus.text_tokens == corpus.tokens
    bos, eos = corpus.tokenizer.bos, corpus.tokenizer.eos
    assert all(corpus.train[i][0] == bos and corpus.train[i][-1] == eos for i in range(len(TEXTS)))
    assert len(set(corpus.train.names)) == len(TEXTS)
    again = corpus_of(tmp_path, write(kind, tmp_path / "in", TEXTS))
    assert again.tokenizer.json == corpus.tokenizer.json


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hf", "arrayrecord"])
def test_a_field_or_column_by_name(tmp_path, kind):
    source = write(kind, tmp_path / "in", TEXTS, "body")
    assert texts_of(corpus_of(tmp_path, source | {"field": "body", "max_documents": 7})) == TEXTS[:7]


def test_globs_single_files_and_objects(tmp_path):
    source = write("jsonl", tmp_path / "in", TEXTS)
    assert texts_of(corpus_of(tmp_path, {"jsonl": str(tmp_path / "in/b.jsonl")})) == TEXTS[30:]
    assert texts_of(corpus_of(tmp_path, {"jsonl": str(tmp_path / "i*/[ab].jsonl")})) == TEXTS
    assert texts_of(corpus_of(tmp_path, source | {"exclude": ["a.*"]})) == TEXTS[30:]
    store = fsspec.filesystem("memory")
    store.pipe({"/bucket/x/a.jsonl": (tmp_path / "in/a.jsonl").read_bytes(), "/bucket/x/b.jsonl": b""})
    for url in ("memory://bucket/x", "memory://bucket/*/*.jsonl", "memory://bucket/x/a.jsonl"):
        remote = corpus_of(tmp_path, {"jsonl": url})
        assert texts_of(remote) == TEXTS[:30] and remote.empty == (not url.endswith("a.jsonl"))
    with pytest.raises(ConfigError, match=r"data.sources\[0\].jsonl is 'memory://nowhere/\*': no file matches"):
        corpus_of(tmp_path, {"jsonl": "memory://nowhere/*"})
    with pytest.raises(ConfigError, match=r"jsonl is 'nosuch://x': no driver reads it"):
        corpus_of(tmp_path, {"jsonl": "nosuch://x"})


@pytest.mark.parametrize("kind", ["parquet", "arrayrecord", "text"])
def test_kinds_on_object_storage(tmp_path, kind):
    (key,) = source = write(kind, tmp_path / "in", TEXTS)
    store = fsspec.filesystem("memory")
    store.pipe({f"/store-{kind}/{path.name}": path.read_bytes() for path in (tmp_path / "in").iterdir()})
    assert source and texts_of(corpus_of(tmp_path, {key: f"memory://store-{kind}"})) == TEXTS


def test_token_files_on_object_storage(tmp_path):
    import test_tokenfiles

    (tmp_path / "tokens").mkdir()
    test_tokenfiles.write_foreign(tmp_path / "tokens/a", [[[5, 6, 1]], [[7, 1]]], 8)
    store = fsspec.filesystem("memory")
    store.pipe({f"/tokens/{p.name}": p.read_bytes() for p in (tmp_path / "tokens").iterdir()})
    found = test_tokenfiles.corpus_of(tmp_path, {"tokens": "memory://tokens"})
    assert list(test_tokenfiles.documents_of(found).values()) == [[5, 6, 1], [7, 1]]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hf", "arrayrecord"])
def test_token_columns_are_taken_as_they_are(tmp_path, kind):
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 250, rng.integers(1, 30)).tolist() for _ in range(40)]
    folder, source = tmp_path / "in", {kind: str(tmp_path / "in")}
    if kind == "arrayrecord":
        folder.mkdir()
        writer = ArrayRecordWriter(str(folder / "a.array_record"), "group_size:1")
        for ids in documents:
            writer.write(np.array(ids, "<u2").tobytes())
        writer.close()
        source["dtype"] = "uint16"
    else:
        write(kind, folder, documents, "ids")
        source["field"] = "ids"
    corpus = corpus_of(tmp_path, source)
    assert [corpus.train[i].tolist() for i in range(40)] == documents
    assert corpus.text_tokens == 0 and "bytes a token" not in corpus.describe()


@given(texts=st.lists(st.text(max_size=30), min_size=1, max_size=30), size=st.integers(1, 400))
@settings(max_examples=25, deadline=None)
def test_spans_of_any_size_give_the_same_records(tmp_path_factory, texts, size):
    folder = tmp_path_factory.mktemp("spans")
    texts = [*texts, "at least one"]
    for kind in ("jsonl", "parquet", "hf"):
        config = config_of(folder, write(kind, folder / kind, texts))
        listing = list_source(config.data.sources[0], "data.sources[0]", folder / "cache")
        whole, parts = (
            [
                (r.file.name, r.index, r.content)
                for r in listing.records(listing.spans(cut), "fail", sources_module.Tally(), folder)
            ]
            for cut in (None, size)
        )
        assert whole == parts and [content for _, _, content in whole] == [t for t in texts if t.strip()]


def bad_jsonl(tmp_path: Path, line: bytes) -> dict:
    (tmp_path / "in").mkdir(exist_ok=True)
    (tmp_path / "in/a.jsonl").write_bytes(
        lines([{"text": "one"}, {"text": "two"}]) + line + b"\n" + lines([{"text": "six"}])
    )
    return {"jsonl": str(tmp_path / "in")}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', r"a\.jsonl, line 3: not JSON \(.*column 14\).*exclude: \['a.jsonl'\].*on_bad_record: skip"),
        (b'{"text": "caf\xe9"}', r"a\.jsonl, line 3: not UTF-8 \(byte 0xe9 at offset 13\)"),
        (b'{"text": "\x00"}', r"a\.jsonl, line 3: binary, not text \(a zero byte at offset 10\)"),
        (
            b'{"txt": "a", "id": 3}',
            r"a\.jsonl, line 3: there is no field 'text' \(did you mean txt\?\); it has txt, id",
        ),
        (b'{"text": 5}', r"a\.jsonl, line 3: the field 'text' is 5, neither text nor a list of token ids"),
        (b'{"text": null}', r"a\.jsonl, line 3: the field 'text' is None"),
        (b'{"text": [1, "a"]}', r"a\.jsonl, line 3: the field 'text' is \[1, 'a'\]"),
        (b'{"text": [1, 300]}', r"a\.jsonl, document 3: token id 300 at token 1 is beyond the .*vocabulary of 258"),
        (b'{"text": "\\ud800"}', r"a\.jsonl, line 3: the field 'text' has a lone surrogate at character 0"),
        (b"[" * 100_000, r"a\.jsonl, line 3: not JSON"),
        (b"7", r"a\.jsonl, line 3: a int, not an object"),
    ],
)
def test_a_bad_json_line_is_placed_or_skipped_and_counted(tmp_path, line, message):
    source = bad_jsonl(tmp_path, line)
    with pytest.raises(ConfigError, match=rf"data\.sources\[0\]: .*{message}"):
        corpus_of(tmp_path, source, tokenizer={"vocab_size": 258})
    corpus = corpus_of(tmp_path, source, tokenizer={"vocab_size": 258}, on_bad_record="skip")
    assert texts_of(corpus) == ["one", "two", "six"] and corpus.skipped == 1
    assert list(corpus.train.names) == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:4"]
    assert len(corpus.reasons) == 1 and "a.jsonl" in corpus.reasons[0]
    assert corpus.describe()["unreadable records skipped"] == 1


def test_skipped_text_files_are_counted(tmp_path):
    source = write("text", tmp_path / "in", TEXTS)
    (tmp_path / "in/bad.bin").write_bytes(b"\x00\x01")
    (tmp_path / "in/dangling").symlink_to(tmp_path / "nowhere")
    corpus = corpus_of(tmp_path, source, on_bad_record="skip")
    assert corpus.skipped == 2 and texts_of(corpus) == TEXTS


def test_rows_that_are_no_text(tmp_path):
    (tmp_path / "in").mkdir()
    raw = [b"one", b"caf\xe9", b"two"]
    strings = pa.array(raw, pa.binary())
    # Writers that do not check leave such bytes in columns of text.
    unchecked = pa.Array.from_buffers(pa.string(), 3, strings.buffers())
    for column in (unchecked, strings):
        pq.write_table(pa.table({"text": column}), tmp_path / "in/a.parquet")
        source = {"parquet": str(tmp_path / "in")}
        with pytest.raises(ConfigError, match=r"a\.parquet, row 1: not UTF-8 \(byte 0xe9 at offset 3\)"):
            corpus_of(tmp_path, source)
        corpus = corpus_of(tmp_path, source, on_bad_record="skip")
        assert texts_of(corpus) == ["one", "two"] and corpus.skipped == 1
        assert list(corpus.train.names) == ["a.parquet:0", "a.parquet:2"]
    pq.write_table(pa.table({"text": pa.array([[1, 2], None, [3, None]])}), tmp_path / "in/a.parquet")
    with pytest.raises(ConfigError, match=r"row 1: the field 'text' is None"):
        corpus_of(tmp_path, source)
    corpus = corpus_of(tmp_path, source, on_bad_record="skip")
    assert [corpus.train[i].tolist() for i in range(len(corpus.train))] == [[1, 2]] and corpus.skipped == 2


def test_wrong_column_names_the_nearest(tmp_path):
    for kind in ("parquet", "hf"):
        source = write(kind, tmp_path / kind, TEXTS, "body")
        with pytest.raises(
            ConfigError, match=r"has no column 'bdy' \(did you mean body\?\); it has body, id: set field"
        ):
            corpus_of(tmp_path, source | {"field": "bdy"}, on_bad_record="skip")


@pytest.mark.parametrize("kind", ["gz", "zst", "parquet", "hf", "arrayrecord"])
def test_a_shard_cut_short(tmp_path, kind):
    source = write(kind, tmp_path / "in", [f"{i} {os.urandom(40).hex()}" for i in range(400)])
    (path,) = [p for p in (tmp_path / "in").iterdir() if p.name != "state.json"]
    # Not in the middle: there one gzip or zstd member may end, and the file is whole.
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 5])
    with pytest.raises(ConfigError, match=rf"data\.sources\[0\]: .*{path.name}.*on_bad_record: skip"):
        corpus_of(tmp_path, source)
    (tmp_path / "in/state.json").unlink(missing_ok=True)
    good = write(kind, tmp_path / "more", TEXTS)
    (whole,) = [p for p in (tmp_path / "more").iterdir() if p.name != "state.json"]
    whole.rename(tmp_path / "in" / f"z{whole.name}")
    corpus = corpus_of(tmp_path, source | good | {next(iter(source)): str(tmp_path / "in")}, on_bad_record="skip")
    # What lies before the break may still be read.
    assert corpus.skipped == 1 and texts_of(corpus)[-len(TEXTS) :] == TEXTS and path.name in corpus.reasons[0]


def test_nothing_to_read(tmp_path):
    (tmp_path / "in").mkdir()
    with pytest.raises(
        ConfigError, match=r"data\.sources\[0\]\.jsonl is '.*in': no file matches .* ends in \.jsonl or"
    ):
        corpus_of(tmp_path, {"jsonl": str(tmp_path / "in")})
    (tmp_path / "in/a.jsonl").write_bytes(b"\n\n")
    with pytest.raises(ConfigError, match=r"data\.sources\[0\]\.jsonl .*its 1 files hold no document"):
        corpus_of(tmp_path, {"jsonl": str(tmp_path / "in")})
    (tmp_path / "in/a.jsonl").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"no file with text .*1 empty"):
        corpus_of(tmp_path, {"jsonl": str(tmp_path / "in")})


def test_folders_of_the_datasets_library(tmp_path):
    source = write("hf", tmp_path / "in/train", TEXTS)
    (tmp_path / "in/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ConfigError, match=r"holds the splits train, test: name one of them, such as .*in/train"):
        corpus_of(tmp_path, {"hf": str(tmp_path / "in")})
    (tmp_path / "in/train/cache-0123.arrow").write_bytes(b"what map() leaves behind")
    assert texts_of(corpus_of(tmp_path, source)) == TEXTS
    state = tmp_path / "in/train/state.json"
    state.write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}, {"filename": "data-00001.arrow"}]}')
    with pytest.raises(ConfigError, match=r"lacks data-00001\.arrow, which state\.json lists"):
        corpus_of(tmp_path, source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({}, "has none of text, jsonl"),
        ({"text": "a", "jsonl": "b"}, "has text and jsonl of"),
        ({"jsonl": "a", "prompt_field": "p"}, "prompt_field and response_field of a source go together"),
        ({"text": "a", "field": "f"}, "field means nothing for a source of text"),
        ({"jsonl": "a", "field": "f", "messages_field": "m", "template": {"user": ["", ""]}}, "set only one"),
        ({"jsonl": "a", "messages_field": "m"}, "messages_field and template of a source go together"),
        ({"jsonl": "a", "weight": 0}, "weight is 0"),
    ],
)
def test_sources_that_contradict_themselves(source, message):
    with pytest.raises(ConfigError, match=message):
        validate({"data": {"sources": [source]}})


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        ("~/books", '[{text: ~/books}] in the configuration, or --data.sources "[{text: ~/books}]"'),
        ("books/*.jsonl.gz", "[{jsonl: books/*.jsonl.gz}]"),
        ("tokens.bin", "[{tokens: tokens.bin}]"),
        (["a.parquet", {"text": "b"}], "[{parquet: a.parquet}, {text: b}]"),
        ({"hf": "folder"}, "[{hf: folder}]"),
        (None, "[{text: ~/books, include: ['*.txt']}]"),
        ("$HOME/a", "--data.sources '[{text: $HOME/a}]'"),
    ],
)
def test_a_bare_path_gets_the_mapping_to_write(value, fix):
    with pytest.raises(ConfigError, match=r"data.sources is .*: it must be a list of mappings") as error:
        validate({"data": {"sources": value}})
    assert fix in str(error.value)


def test_without_sources_what_reads_data_is_refused_and_the_rest_works(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(f"data: {{cache: {tmp_path / 'cache'}}}\n")
    name, out = str(tmp_path / "run.yaml"), str(tmp_path / "out")
    for command in (["train", name, "--run", out], ["data", name], ["tokenize", name, "--out", out]):
        assert main(command) == 2
        message = " ".join(capsys.readouterr().err.split())
        assert "data.sources is not set" in message and "--data.sources" in message and "[{text: ~/books" in message
        assert not (tmp_path / "out").exists() and not (tmp_path / "cache").exists()
    assert main(["inspect", name]) == 0
    assert (
        load_config("tiny").data.sources
        == load_config("moe_tiny").data.sources
        != load_config("llama3_8b").data.sources
    )


def test_mixed_sources_are_joined_and_numbered(tmp_path):
    kinds = ["text", "jsonl", "parquet"]
    sources = [write(kind, tmp_path / kind, [f"{kind} {i}" for i in range(5)]) for kind in kinds]
    config = validate(
        {
            "data": {
                "sources": sources,
                "tokenizer": {"vocab_size": 300},
                "cache": str(tmp_path / "cache"),
                "held_out": 0,
            }
        }
    )
    corpus = prepare(config)
    assert texts_of(corpus) == [f"{kind} {i}" for kind in kinds for i in range(5)]
    assert corpus.train.source is not None and corpus.train.source.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert corpus.train.names[7] == "b.jsonl:1"
    order = prepare(
        config.model_copy(update={"data": config.data.model_copy(update={"sources": config.data.sources[::-1]})})
    )
    assert order.fingerprint != corpus.fingerprint


def test_held_out_numbers(tmp_path):
    numbers = np.arange(50_000)
    out = records_held_out("a.jsonl", numbers, 0.05)
    assert abs(out.mean() - 0.05) < 4 * np.sqrt(0.05 * 0.95 / 50_000)
    assert [is_record_held_out("a.jsonl", int(i), 0.05) for i in numbers[:200]] == out[:200].tolist()
    other = records_held_out("b.jsonl", numbers, 0.05)
    assert abs((out & other).mean() - 0.0025) < 4 * np.sqrt(0.0025 / 50_000)
    assert records_held_out("a", numbers, 0.0).sum() == 0


def test_a_settled_corpus_is_listed_by_stat_alone(tmp_path, monkeypatch):
    source = write("jsonl", tmp_path / "in", TEXTS)
    text = write("text", tmp_path / "text", TEXTS)
    config = config_of(tmp_path, source)
    config = validate(config.model_dump(mode="json") | {"data": config.data.model_dump() | {"sources": [source, text]}})
    long_ago = time.time() - 100
    for path in (*(tmp_path / "in").iterdir(), *(tmp_path / "text").iterdir()):
        os.utime(path, (long_ago, long_ago))
    first = prepare(config)

    def refuse(file):
        raise AssertionError(f"{file} read again")

    monkeypatch.setattr("jaxtrain.data.files.File.open", refuse)
    monkeypatch.setattr("jaxtrain.data.files.File.read", refuse)
    assert prepare(config).fingerprint == first.fingerprint
    monkeypatch.undo()
    (tmp_path / "in/b.jsonl").write_bytes(lines([{"text": "changed"}]))
    assert prepare(config).fingerprint != first.fingerprint


def test_a_file_that_changes_while_it_is_read(tmp_path):
    source = write("jsonl", tmp_path / "in", TEXTS)
    listing = list_source(config_of(tmp_path, source).data.sources[0], "data.sources[0]", tmp_path / "cache")
    (tmp_path / "in/a.jsonl").write_bytes(lines([{"text": "other"}]))
    with pytest.raises(ConfigError, match=r"a\.jsonl changed while the corpus was being built"):
        list(listing.records(listing.spans(), "fail", sources_module.Tally(), tmp_path))
