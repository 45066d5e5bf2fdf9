"""Token files against an independent reader and writer of Megatron's format; flat files; what can be wrong."""

import json
import mmap
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from jaxtrain.config import ConfigError, RunConfig, validate
from jaxtrain.data import Corpus, prepare
from jaxtrain.data.tokenfiles import TokenWriter, write_index

EOS = 1
WORDS = 300


# Written from the format's description alone, with struct and no array code of the package.
class IndexedDataset:
    """Sequences and documents of NAME.bin, NAME.idx."""

    CODES = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}  # noqa: RUF012

    def __init__(self, prefix: Path) -> None:
        raw = prefix.with_suffix(".idx").read_bytes()
        assert raw[:9] == b"MMIDIDX\x00\x00"
        (version,) = struct.unpack_from("<Q", raw, 9)
        assert version == 1
        self.letter = self.CODES[raw[17]]
        sequences, borders = struct.unpack_from("<QQ", raw, 18)
        at = 34
        self.sizes = struct.unpack_from(f"<{sequences}i", raw, at)
        self.pointers = struct.unpack_from(f"<{sequences}q", raw, at + 4 * sequences)
        self.documents = struct.unpack_from(f"<{borders}q", raw, at + 12 * sequences)
        assert len(raw) == at + 12 * sequences + 8 * borders
        with prefix.with_suffix(".bin").open("rb") as file:
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def sequence(self, i: int) -> list[int]:
        return list(struct.unpack_from(f"<{self.sizes[i]}{self.letter}", self.data, self.pointers[i]))


def write_foreign(prefix: Path, documents: list[list[list[int]]], code: int) -> None:
    """Documents of several sequences each, as Megatron's builder leaves them."""
    letter = IndexedDataset.CODES[code]
    sizes, pointers, borders = [], [], [0]
    with prefix.with_suffix(".bin").open("wb") as file:
        for document in documents:
            for sequence in document:
                pointers.append(file.tell())
                sizes.append(len(sequence))
                file.write(struct.pack(f"<{len(sequence)}{letter}", *sequence))
            borders.append(len(sizes))
    n = len(sizes)
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, n, len(borders))
        + struct.pack(f"<{n}i", *sizes)
        + struct.pack(f"<{n}q", *pointers)
        + struct.pack(f"<{len(borders)}q", *borders)
    )


def word_tokenizer(path: Path, words: int = WORDS) -> Path:
    vocabulary = {"[unk]": 0, "</s>": EOS, **{f"w{i}": i for i in range(2, words)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[unk]"))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(path))
    return path


def corpus_of(folder: Path, source: dict | None = None, **data) -> Corpus:
    return prepare(config_of(folder, source, **data))


def config_of(folder: Path, source: dict | None = None, **data) -> RunConfig:
    path = folder / "words.json"
    tokenizer = {"path": str(path if path.exists() else word_tokenizer(path))}
    sources = [{"tokens": str(folder / "tokens")} | (source or {})]
    return validate(
        {"data": {"sources": sources, "cache": str(folder / "cache"), "tokenizer": tokenizer, "held_out": 0.0, **data}}
    )


def documents_of(corpus: Corpus) -> dict[str, list[int]]:
    return {name: corpus.train[i].tolist() for i, name in enumerate(corpus.train.names)}


documents_of_ids = st.lists(st.lists(st.integers(0, WORDS - 1), min_size=1, max_size=40), min_size=1, max_size=12)


@given(documents=documents_of_ids, dtype=st.sampled_from(["uint16", "int32", "int64"]))
@settings(max_examples=25, deadline=None)
def test_what_is_written_is_read_by_an_independent_reader(tmp_path_factory, documents, dtype):
    prefix = tmp_path_factory.mktemp("out") / "shard"
    with TokenWriter(prefix, dtype, scored=False) as writer:
        for document in documents:
            writer.write(np.array(document), None)
    found = IndexedDataset(prefix)
    assert [found.sequence(i) for i in range(len(found.sizes))] == documents
    assert found.documents == tuple(range(len(documents) + 1))
    assert np.dtype(dtype).itemsize == struct.calcsize(found.letter)
    assert sorted(p.name for p in prefix.parent.iterdir()) == ["shard.bin", "shard.idx"]


@given(
    documents=st.lists(
        st.lists(st.lists(st.integers(0, 100), min_size=1, max_size=9), min_size=1, max_size=4), min_size=1, max_size=8
    ),
    code=st.sampled_from([1, 3, 4, 5, 8]),
)
@settings(max_examples=25, deadline=None)
def test_what_megatron_writes_is_read(tmp_path_factory, documents, code):
    folder = tmp_path_factory.mktemp("in")
    (folder / "tokens").mkdir()
    write_foreign(folder / "tokens/one", documents, code)
    corpus = corpus_of(folder)
    joined = [[token for sequence in document for token in sequence] for document in documents]
    assert documents_of(corpus) == {f"one.bin:{i}": document for i, document in enumerate(joined)}


def test_several_files_are_joined_without_a_copy(tmp_path):
    (tmp_path / "tokens/sub").mkdir(parents=True)
    for number, name in enumerate(["a", "b", "sub/c"]):
        write_foreign(tmp_path / "tokens" / name, [[[number + 2, 5, EOS]], [[number + 2, EOS]]], 8)
    corpus = corpus_of(tmp_path)
    assert documents_of(corpus)["sub/c.bin:1"] == [4, EOS]
    assert list(documents_of(corpus)) == [f"{n}.bin:{i}" for n in ("a", "b", "sub/c") for i in (0, 1)]
    assert not list((tmp_path / "cache").rglob("tokens.bin"))
    only = corpus_of(tmp_path, {"max_documents": 3})
    assert len(only.train) == 3 and only.fingerprint != corpus.fingerprint


def test_flat_file_is_cut_after_the_closing_token(tmp_path):
    (tmp_path / "tokens").mkdir()
    flat = np.array([5, 6, EOS, 7, EOS, 8, 9, 10], "<u2")
    flat.tofile(tmp_path / "tokens/train.bin")
    assert list(documents_of(corpus_of(tmp_path)).values()) == [[5, 6, EOS], [7, EOS], [8, 9, 10]]
    flat.astype("<i4").tofile(tmp_path / "tokens/train.bin")
    assert list(documents_of(corpus_of(tmp_path, {"dtype": "int32"})).values())[1] == [7, EOS]


def test_documents_after_the_header_of_llm_c(tmp_path):
    """karpathy/llm.c#736: the end token stands before each document; the first one ends none."""
    (tmp_path / "tokens").mkdir()
    path = tmp_path / "tokens/train.bin"
    for tokens, documents in (
        ([EOS, 5, 6, EOS, 7, EOS, 8], [[5, 6, EOS], [7, EOS], [8]]),
        ([6, EOS, 7], [[6, EOS], [7]]),  # a shard that begins within a document
        ([EOS], [[EOS]]),
    ):
        head = struct.pack("<3i", 20240520, 1, len(tokens)) + bytes(1012)
        path.write_bytes(head + np.array(tokens, "<u2").tobytes())
        corpus = corpus_of(tmp_path, {"dtype": "uint16"})
        assert list(documents_of(corpus).values()) == documents
    with pytest.raises(ConfigError, match=r"holds uint16, its header says, and dtype of the source is int32: remove"):
        corpus_of(tmp_path, {"dtype": "int32"})
    path.write_bytes(struct.pack("<3i", 20240522, 1, 1) + bytes(1014))
    with pytest.raises(ConfigError, match=r"is an evaluation of llm\.c, no token file"):
        corpus_of(tmp_path)


def test_cuts_of_a_flat_file_fall_on_block_borders(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxtrain.data.tokenfiles.READ_BLOCK", 1)  # blocks of 8 tokens
    (tmp_path / "tokens").mkdir()
    rng = np.random.default_rng(0)
    flat = rng.integers(1, 6, 1000).astype("<u2")
    flat.tofile(tmp_path / "tokens/train.bin")
    found = list(documents_of(corpus_of(tmp_path)).values())
    assert [token for document in found for token in document] == flat.tolist()
    assert all(document.count(EOS) == 1 and document[-1] == EOS for document in found[:-1])


def test_fingerprint_follows_content_not_place_or_time(tmp_path):
    def one(name: str, token: int) -> str:
        folder = tmp_path / name
        (folder / "tokens").mkdir(parents=True)
        write_foreign(folder / "tokens/a", [[[5, token, EOS]]], 8)
        return corpus_of(folder).fingerprint

    assert one("here", 7) == one("there", 7) != one("other", 8)


def test_held_out_documents_stay_when_files_are_added(tmp_path):
    (tmp_path / "tokens").mkdir()
    write_foreign(tmp_path / "tokens/m", [[[i % 200 + 2, EOS]] for i in range(4000)], 8)
    before = corpus_of(tmp_path, held_out=0.1)
    share = len(before.held_out) / 4000
    assert abs(share - 0.1) < 4 * np.sqrt(0.1 * 0.9 / 4000)
    write_foreign(tmp_path / "tokens/a", [[[9, EOS]]] * 10, 8)
    after = corpus_of(tmp_path, held_out=0.1)
    assert set(before.held_out.names) <= set(after.held_out.names) and set(before.train.names) <= set(after.train.names)


@pytest.fixture
def good(tmp_path) -> Path:
    (tmp_path / "tokens").mkdir()
    write_foreign(tmp_path / "tokens/a", [[[5, 6, EOS]], [[7, EOS]]], 8)
    return tmp_path


def test_truncated_bin(good):
    path = good / "tokens/a.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ConfigError, match=r"a\.bin has 8 bytes where its index describes 5 tokens of uint16, 10 bytes"):
        corpus_of(good)


def test_truncated_flat_bin(good):
    (good / "tokens/a.idx").unlink()
    (good / "tokens/a.bin").write_bytes(b"123")
    with pytest.raises(ConfigError, match=r"a\.bin is truncated or not of uint16: 3 bytes.*set dtype"):
        corpus_of(good)
    (good / "tokens/a.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"a\.bin is truncated.*0 bytes"):
        corpus_of(good)


def test_index_that_is_none_cut_short_or_of_another_file(good):
    index = good / "tokens/a.idx"
    raw = index.read_bytes()
    index.write_bytes(b"XX" + raw[2:])
    with pytest.raises(ConfigError, match=r"a\.idx is no Megatron index .*magic"):
        corpus_of(good)
    index.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"a\.idx is no Megatron index"):
        corpus_of(good)
    index.write_bytes(raw[:-4])
    with pytest.raises(ConfigError, match=r"a\.idx is cut short: \d+ bytes where 2 sequences need \d+"):
        corpus_of(good)
    index.write_bytes(raw[:34] + struct.pack("<2i", 2, 3) + raw[42:])
    with pytest.raises(ConfigError, match=r"a\.idx is damaged: its offsets, lengths and documents contradict"):
        corpus_of(good)
    index.write_bytes(raw[:17] + b"\x06" + raw[18:])
    with pytest.raises(ConfigError, match=r"dtype 6.*known are"):
        corpus_of(good)


@pytest.mark.parametrize(("code", "bad"), [(8, WORDS), (4, -3)])
def test_id_beyond_the_vocabulary_is_placed(good, code, bad):
    write_foreign(good / "tokens/a", [[[5, 6, EOS]], [[7, bad, EOS]]], code)
    with pytest.raises(ConfigError, match=rf"a\.bin has token id {bad} at token 4, beyond .* vocabulary of {WORDS}"):
        corpus_of(good)


def test_token_ids_without_a_tokenizer(good):
    config = validate({"data": {"sources": [{"tokens": str(good / "tokens")}], "cache": str(good / "cache")}})
    with pytest.raises(
        ConfigError, match=r"no tokens.json beside them names their tokenizer: set data\.tokenizer\.path"
    ):
        prepare(config)


def test_shards_that_are_not_all_written_or_damaged(good):
    (good / "tokens/tokens.partial.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"not all written: run jaxtrain tokenize"):
        corpus_of(good)
    (good / "tokens/tokens.json").write_text(json.dumps({"format": "bin"}))
    with pytest.raises(ConfigError, match=r"tokens\.json is damaged"):
        corpus_of(good)


def anonymous_mb() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) // 1024


@pytest.mark.parametrize("indexed", [True, False])
def test_a_large_file_is_not_read_into_memory(tmp_path, indexed):
    (tmp_path / "tokens").mkdir()
    count, length = 400, 200_000  # 160 MB
    block = np.full(length, 7, np.uint16)
    block[-1] = EOS
    with (tmp_path / "tokens/a.bin").open("wb") as file:
        for _ in range(count):
            block.tofile(file)
    if indexed:
        write_index(tmp_path / "tokens/a.idx", "uint16", np.full(count, length))
    before = anonymous_mb()
    corpus = corpus_of(tmp_path)
    assert anonymous_mb() - before < 60
    assert len(corpus.train) == count and sum(int(corpus.train[i][-1]) for i in range(count)) == count * EOS
    assert anonymous_mb() - before < 60
