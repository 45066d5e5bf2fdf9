"""Records as other tools write them: read where that is right, else refused in one message with what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from jaxtrain.config import ConfigError, validate
from jaxtrain.data.corpus import prepare
from jaxtrain.data.tf_example import read_example


def corpus_of(folder: Path, source: dict[str, Any]) -> list[str]:
    data = {"sources": [source], "tokenizer": {"vocab_size": 258}, "held_out": 0.0, "cache": str(folder / "cache")}
    corpus = prepare(validate({"model": {"vocab_size": 300}, "data": data}))
    return [corpus.tokenizer.decode(corpus.train[i].tolist()) for i in range(len(corpus.train))]


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2]) + varint(len(data)) + data


def example(**features: bytes | list[int]) -> bytes:
    """A serialized tf.train.Example, by the wire format of protocol buffers."""

    def feature(value: bytes | list[int]) -> bytes:
        if isinstance(value, bytes):
            return field(1, field(1, value))
        return field(3, field(1, b"".join(varint(number) for number in value)))

    entries = (field(1, field(1, name.encode()) + field(2, feature(value))) for name, value in features.items())
    return field(1, b"".join(entries))


@pytest.mark.parametrize("texts", [["a short text", "another"], ["word " * 60]])
def test_features_of_examples_are_read(tmp_path: Path, texts: list[str]) -> None:
    """google/array_record#106: protocol bytes are no text."""
    writer = ArrayRecordWriter(str(tmp_path / "a.array_record"), "group_size:1")
    for text in texts:
        writer.write(example(text=text.encode(), length=[len(text), 300]))
    writer.close()
    for more in ({}, {"field": "text"}):
        assert sorted(corpus_of(tmp_path, {"arrayrecord": str(tmp_path / "a.array_record"), **more})) == sorted(texts)
    with pytest.raises(ConfigError, match=r"there is no field 'body'.*it has text, length"):
        corpus_of(tmp_path, {"arrayrecord": str(tmp_path / "a.array_record"), "field": "body"})


def test_what_is_no_example() -> None:
    whole = example(ids=[1, 300, 70000], text=b"x")
    found = read_example(whole)
    assert found is not None and found["ids"].tolist() == [1, 300, 70000] and found["text"] == b"x"
    for data in (b"", b"\n", b"plain text", b"\n\x05hello", whole[:-1], whole + b"\n", b'{"text": "a"}'):
        assert read_example(data) is None


def test_marks_and_other_encodings(tmp_path: Path) -> None:
    """A mark is no part of a text, and no document; CRLF is kept as it is in text files and ends a line of JSON."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    (tmp_path / "in" / "b.txt").write_bytes(b"\xef\xbb\xbf\n")
    (tmp_path / "in" / "c.txt").write_bytes(b"")
    assert corpus_of(tmp_path, {"text": str(tmp_path / "in")}) == ["one\r\ntwo"]
    (tmp_path / "in" / "d.txt").write_bytes("text".encode("utf-16"))
    with pytest.raises(ConfigError, match=r"d\.txt is UTF-16 text, by its byte order mark: convert it \(iconv"):
        corpus_of(tmp_path, {"text": str(tmp_path / "in")})
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\r\n{"text": "two"}\r\n')
    assert sorted(corpus_of(tmp_path, {"jsonl": str(tmp_path / "a.jsonl")})) == ["one", "two"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (json.dumps([{"text": "a"}]), "a JSON array, not one object a line"),
        (json.dumps([{"text": "a"}], indent=2), "a JSON array"),
        (json.dumps({"text": "a"}, indent=2), "a JSON object over several lines"),
    ],
)
def test_json_that_is_not_one_object_a_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=rf"a\.jsonl is {words}.*jq -c"):
        corpus_of(tmp_path, {"jsonl": str(tmp_path / "a.jsonl")})
