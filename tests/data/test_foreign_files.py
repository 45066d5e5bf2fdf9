"""Files of other tools under the wrong kind or name: read where it is right, else one message, whose command works."""

from __future__ import annotations

import gzip
import io
import json
import struct
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python.array_record_module import ArrayRecordReader

from jaxtrain.config import ConfigError, validate
from jaxtrain.data.compression import zstd_window
from jaxtrain.data.corpus import Corpus, prepare
from jaxtrain.data.tokenizer import load_tokenizer

CHAT = {"messages_field": "m", "template": {"human": ["<u>", "\n"], "gpt": ["<a>", "\n"], "user": ["<u>", "\n"],
                                            "assistant": ["<a>", "\n"]}}  # fmt: skip


def corpus_of(folder: Path, source: dict[str, Any], vocab: int = 300) -> Corpus:
    tokenizer = {"path": str(saved_tokenizer(folder))} if "tokens" in source else {"vocab_size": 258}
    data = {"sources": [source], "tokenizer": tokenizer, "held_out": 0.0, "cache": str(folder / "cache")}
    return prepare(validate({"model": {"vocab_size": vocab}, "data": data}))


def saved_tokenizer(folder: Path) -> Path:
    """The tokenizer.json of a few texts."""
    path = folder / "texts" / "tokenizer.json"
    if not path.exists():
        path.parent.mkdir()
        (path.parent / "a.txt").write_text("some text")
        corpus_of(folder, {"text": str(path.parent / "a.txt")}).tokenizer.inner.save(str(path))
    return path


def texts_of(folder: Path, source: dict[str, Any]) -> list[str]:
    corpus = corpus_of(folder, source)
    return sorted(corpus.tokenizer.decode(corpus.train[i].tolist()) for i in range(len(corpus.train)))


def tar_file() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo("0001.txt")
        member.size = 4
        archive.addfile(member, io.BytesIO(b"text"))
    return buffer.getvalue()


def tf_record(*records: bytes) -> bytes:
    """TFRecord's frames: length, its masked CRC32-C, data, a checksum that nothing here reads."""

    def crc(data: bytes) -> int:
        value = 0xFFFFFFFF
        for byte in data:
            value ^= byte
            for _ in range(8):
                value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        value ^= 0xFFFFFFFF
        return ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF

    lengths = [struct.pack("<Q", len(record)) for record in records]
    return b"".join(
        size + struct.pack("<I", crc(size)) + record + bytes(4) for size, record in zip(lengths, records, strict=True)
    )


PARQUET = io.BytesIO()
pq.write_table(pa.table({"text": ["a"]}), PARQUET)
NO_ROWS = io.BytesIO()
pq.write_table(pa.table({"text": pa.array([], pa.string())}), NO_ROWS)
LINES = b'{"text": "one"}\n{"text": "two"}\n'
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"


def zstd_frame(data: bytes, window_log: int) -> bytes:
    """One raw block in a frame with this window (RFC 8878)."""
    return b"\x28\xb5\x2f\xfd\x00" + bytes([(window_log - 10) << 3]) + struct.pack("<I", len(data) << 3 | 1)[:3] + data


FOREIGN = [
    ("text", "a.csv", b"id,text\n1,hello\n", r"a table \(CSV\).*csv\.DictReader.*name that under jsonl"),
    ("jsonl", "a.tsv", b"id\ttext\n1\thello\n", r"a table \(TSV\).*delimiter='\\t'"),
    ("text", "a.csv.gz", gzip.compress(b"id,text\n1,hello\n"), r"a table.*gzip -dc"),
    ("text", "a.tar", tar_file(), r"a tar archive, such as WebDataset's: unpack it"),
    ("jsonl", "a.jsonl", tar_file(), r"a tar archive"),
    ("jsonl", "a.tfrecord", tf_record(b"x"), r"a TFRecord file: convert it"),
    ("text", "a.dat", tf_record(b"some text"), r"a TFRecord file"),
    ("tokens", "a.bin", tf_record(b"some text"), r"a TFRecord file"),
    ("text", "a.txt", gzip.compress(b"text"), r"gzip data: decompress it \(gzip -dc"),
    ("text", "a.txt", b"BZh91AY&SY\xff", r"bzip2 data: decompress it"),
    ("jsonl", "a.jsonl", b"PK\x03\x04....", r"zip data: decompress it \(unzip -p"),
    ("jsonl", "a.jsonl", PARQUET.getvalue(), r"a Parquet file: name it under parquet"),
    ("tokens", "a.bin", PARQUET.getvalue(), r"a Parquet file"),
    ("tokens", "a.bin", b"\x93NUMPY\x01\x00v\x00" + bytes(120), r"a file of numpy\.save: strip its header"),
    ("tokens", "a.bin", b"MMIDIDX\x00\x00" + bytes(40), r"the index of a token file: name the \.bin beside it"),
    ("text", "a.txt", POINTER, r"a pointer of Git LFS.*git lfs pull"),
    ("jsonl", "a.jsonl", b'\n\n[{"text": "a"}]', r"a JSON array, not one object a line.*jq -c '\.\[\]'"),
    ("jsonl", "a.jsonl", b'{"data": [{"text": "a"}]}', r"there is no field 'text'.*\(jq -c '\.data\[\]'"),
    ("jsonl", "a.jsonl", b'{\n "data": [\n {"text": "a"}]}', r"a JSON object over several lines.*'\.data\[\]'"),
    ("jsonl", "a.jsonl", b'{"m": [{"from": "human", "value": "hi"}]}', r"m is a chat: set messages_field"),
    ("jsonl", "a.jsonl.gz", gzip.compress(LINES)[:-9], r"cannot be read past line"),
    ("jsonl", "a.jsonl", b'{"da\xff": [{"text": "a"},\n{"text": "b"}]}', r"several lines: convert it \(jq -c \. "),
    ("jsonl", "a.jsonl.gz", gzip.compress(b'[{"text": "a"}]'), r"a JSON array.*\(gzip -dc .* \| jq -c '\.\[\]' > new"),
    ("jsonl", "a.jsonl.gz", gzip.compress(tar_file()), r"a tar archive"),
    ("jsonl", "a.zst", zstd_frame(LINES, 20) + zstd_frame(LINES, 31), r"too much memory.*: compress it again \(zstd"),
    ("jsonl", "a.jsonl", b"\n\n  \n", r"1 empty, 0 unreadable"),
    ("jsonl", "a.jsonl.gz", gzip.compress(b""), r"1 empty, 0 unreadable"),
    ("parquet", "a.parquet", NO_ROWS.getvalue(), r"1 empty, 0 unreadable"),
    ("text", "a.txt", "text".encode("utf-16"), r"UTF-16 text, by its byte order mark: convert it \(iconv.*, leave the"),
    ("jsonl", "a.jsonl", b"", r"no file with text matches.*1 empty"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(FOREIGN)))
def test_what_is_no_file_of_the_kind_is_one_message(tmp_path: Path, number: int) -> None:
    kind, name, content, words = FOREIGN[number]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=words) as error:
        corpus_of(tmp_path, {kind: str(tmp_path / name)})
    message = str(error.value)
    assert name in message and "\n" not in message and message.count("on_bad_record") <= 1


def test_files_without_a_document_are_counted_beside_others(tmp_path: Path) -> None:
    for name, content in (("a.jsonl", LINES.replace(b"\n", b"\r\n")), ("b.jsonl", b"\r\n\n"), ("c.jsonl", b"")):
        (tmp_path / name).write_bytes(content)
    pq.write_table(pa.table({"text": ["one", "two"]}), tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(NO_ROWS.getvalue())
    for kind, empty in (("jsonl", 2), ("parquet", 1)):
        corpus = corpus_of(tmp_path, {kind: str(tmp_path)})
        assert len(corpus.train) == 2 and corpus.empty == empty


def test_a_skipped_file_is_counted_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,text\n1,hello\n")
    (tmp_path / "b.jsonl").write_text('{"m": [{"from": "human", "value": "hi"}]}')
    for kind, name, words in (("text", "a.csv", "convert it"), ("jsonl", "b.jsonl", "set messages_field: m")):
        data = {"sources": [{kind: str(tmp_path / name)}], "on_bad_record": "skip", "cache": str(tmp_path / "cache")}
        with pytest.raises(ConfigError, match=rf"0 empty, 1 unreadable, the first: .*{name}.*{words}"):
            prepare(validate({"data": data}))


def run_command(message: str, folder: Path, end: str) -> None:
    """Run the command that a message gives in parentheses."""
    command = message[message.index("convert it (") + len("convert it (") : message.index(end)]
    subprocess.run(command.replace("python -c", f"{sys.executable} -c"), shell=True, cwd=folder, check=True)


def test_the_commands_convert(tmp_path: Path) -> None:
    (tmp_path / "a b.csv").write_bytes(b'\xef\xbb\xbfid,text\n1,"hello, ""you""\nand more"\n')
    (tmp_path / "c.tfrecord").write_bytes(tf_record(b"one", b"the second"))
    for kind, name, end in (("jsonl", "a b.csv", ") and name that"), ("text", "c.tfrecord", ") and name that")):
        with pytest.raises(ConfigError) as error:
            corpus_of(tmp_path, {kind: str(tmp_path / name)})
        run_command(str(error.value), tmp_path, end)
    assert json.loads((tmp_path / "a b.jsonl").read_text()) == {"id": "1", "text": 'hello, "you"\nand more'}
    reader = ArrayRecordReader(str(tmp_path / "c.array_record"))
    assert [bytes(record) for record in reader.read(0, 2)] == [b"one", b"the second"]
    assert texts_of(tmp_path, {"arrayrecord": str(tmp_path / "c.array_record")}) == ["one", "the second"]


def test_compression_is_recognised_without_its_name(tmp_path: Path) -> None:
    # Two members of gzip are one file; zstd by content; a plain file that is named .gz.
    (tmp_path / "members.jsonl").write_bytes(gzip.compress(LINES[:16]) + gzip.compress(LINES[16:]))
    (tmp_path / "zstd.jsonl").write_bytes(pa.Codec("zstd").compress(LINES, asbytes=True))
    (tmp_path / "plain.jsonl.gz").write_bytes(LINES)
    for name in ("members.jsonl", "zstd.jsonl", "plain.jsonl.gz"):
        assert texts_of(tmp_path, {"jsonl": str(tmp_path / name)}) == ["one", "two"]


def test_a_long_zstd_window_is_named_with_the_command(tmp_path: Path) -> None:
    # A frame header (RFC 8878) whose window descriptor asks for 2 GiB, as `zstd --long=31` writes it.
    head = b"\x28\xb5\x2f\xfd\x00" + bytes([(31 - 10) << 3]) + bytes(20)
    assert zstd_window(head) == 2**31
    (tmp_path / "a.jsonl.zst").write_bytes(head)
    with pytest.raises(ConfigError, match=r"zstd window of 2,147,483,648 bytes: compress it again \(zstd -dc"):
        corpus_of(tmp_path, {"jsonl": str(tmp_path / "a.jsonl.zst")})


def test_a_mark_is_no_part_of_a_value_and_no_document(tmp_path: Path) -> None:
    lines = ["\ufeffone", "\ufeff", "two"]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in lines))
    pq.write_table(pa.table({"text": lines}), tmp_path / "a.parquet")
    for kind in ("jsonl", "parquet"):
        corpus = corpus_of(tmp_path, {kind: str(tmp_path / f"a.{kind}")})
        assert [corpus.tokenizer.decode(corpus.train[i].tolist()) for i in range(len(corpus.train))] == ["one", "two"]
        assert corpus.empty == 1


def test_chats_of_sharegpt_and_of_nested_columns(tmp_path: Path) -> None:
    shared = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"m": shared}))
    nested = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]]
    pq.write_table(pa.table({"m": nested}), tmp_path / "a.parquet")
    for kind in ("jsonl", "parquet"):
        assert texts_of(tmp_path, {kind: str(tmp_path / f"a.{kind}"), **CHAT}) == ["<u>hi\n<a>ho\n"]


def llm_c(tokens: list[int], magic: int = 20240520, version: int = 1, count: int | None = None) -> bytes:
    dtype = "<u2" if magic == 20240520 else "<u4"
    head = np.zeros(256, "<i4")
    head[:3] = magic, version, len(tokens) if count is None else count
    return head.tobytes() + np.array(tokens, dtype).tobytes()


@pytest.mark.parametrize(("magic", "version"), [(20240520, 1), (20240801, 7)])
def test_headers_of_llm_c_are_no_tokens(tmp_path: Path, magic: int, version: int) -> None:
    tokenizer = load_tokenizer(saved_tokenizer(tmp_path))
    begin = tokenizer.eos if tokenizer.bos is None else tokenizer.bos
    (tmp_path / "a.bin").write_bytes(llm_c([begin, 5, 6, 7, begin, 8, 9], magic, version))
    source = {"tokens": str(tmp_path / "a.bin")}
    # The magic numbers are ids of a vocabulary of 65,536: nothing but the header tells them from tokens.
    corpus = corpus_of(tmp_path, source, 65536)
    assert [corpus.train[i].tolist() for i in range(len(corpus.train))] == [[begin, 5, 6, 7], [begin, 8, 9]]
    for content, words in (
        (llm_c([1, 2], magic, version, count=3), "is truncated; fetch it again"),
        (llm_c([1, 2], magic, 99), "llm.c's header with magic .* and version 99; known are"),
        (llm_c([1, 2], 20240326), "is a model of llm.c, no token file"),
    ):
        (tmp_path / "a.bin").write_bytes(content)
        with pytest.raises(ConfigError, match=words):
            corpus_of(tmp_path, source, 65536)


def test_the_files_of_megatron(tmp_path: Path) -> None:
    def tokens(**source: Any) -> Corpus:
        return corpus_of(tmp_path, {"tokens": str(tmp_path / "a_text_document.bin"), **source})

    np.array([5, 6, 7, 8], "<i4").tofile(tmp_path / "a_text_document.bin")
    with pytest.raises(ConfigError, match=r"no index a_text_document\.idx beside it: fetch the index too"):
        tokens()
    sizes, pointers, borders = np.array([3, 1], "<i4"), np.array([0, 12], "<i8"), np.array([0, 1, 2], "<i8")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 4, 2, 3)
    (tmp_path / "a_text_document.idx").write_bytes(head + sizes.tobytes() + pointers.tobytes() + borders.tobytes())
    assert [len(tokens().train[i]) for i in range(2)] == [3, 1]
    with pytest.raises(ConfigError, match=r"holds int32, its index says, and dtype of the source is uint16"):
        tokens(dtype="uint16")
    (tmp_path / "a_text_document.idx").write_bytes(b"TNTIDX\x00\x00" + bytes(40))
    with pytest.raises(ConfigError, match="Megatron's older formats"):
        tokens()
    with pytest.raises(ConfigError, match=r"Megatron's prefix is not enough, name .*a_text_document\.bin"):
        tokens(tokens=str(tmp_path / "a_text_document"))
