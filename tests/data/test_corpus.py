"""Folders of text -> tokenized, split, cached corpora; every fault is one message that names file and fix."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from jaxtrain.config import ConfigError, RunConfig, SourceConfig, validate
from jaxtrain.data import prepare
from jaxtrain.data.cache import build_once
from jaxtrain.data.sources import Listing, is_held_out, list_source
from jaxtrain.data.tokenizer import BOS, EOS, TextTokenizer, load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TEXTS = {
    f"{'abc'[i % 3]}/part{i}.txt": f"Document number {i} says: café, {'x ' * i}end.\r\n\tdone\n" for i in range(40)
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in TEXTS.items():
        path = tmp_path / "text" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return tmp_path / "text"


def config_of(folder: Path | str, **data) -> RunConfig:
    source = {"text": str(folder)} | data.pop("source", {})
    tokenizer = {"vocab_size": 300} | data.pop("tokenizer", {})
    cache = data.pop("cache", str(Path(folder).parent / "cache"))
    return validate({"data": {"sources": [source], "tokenizer": tokenizer, "cache": cache, **data}})


def test_documents_are_the_files_opened_and_closed(folder):
    corpus = prepare(config_of(folder))
    bos, eos = corpus.tokenizer.inner.token_to_id(BOS), corpus.tokenizer.inner.token_to_id(EOS)
    found = {}
    for split in (corpus.train, corpus.held_out):
        for index, name in enumerate(split.names):
            ids = split[index]
            assert (
                ids.dtype == np.int32 and ids[0] == bos and ids[-1] == eos and not np.isin(ids[1:-1], [bos, eos]).any()
            )
            found[name] = corpus.tokenizer.decode(ids.tolist())
    assert found == TEXTS
    assert list(corpus.train.names) == sorted(corpus.train.names)
    assert corpus.bytes == sum(len(text.encode()) for text in TEXTS.values())
    assert corpus.describe()["documents"] == 40
    assert corpus.tokenizer.encode("Doc")[0] == bos and corpus.tokenizer.encode("Doc")[-1] != eos


def test_token_file_is_flat_and_little_endian(folder, tmp_path):
    corpus = prepare(config_of(folder))
    (file,) = (tmp_path / "cache").rglob("tokens.bin")
    flat = np.frombuffer(file.read_bytes(), "<u2")
    assert len(flat) == corpus.tokens
    whole = dict(zip(sorted(TEXTS), split_at(flat, corpus.tokenizer.eos), strict=True))
    assert {name: corpus.tokenizer.decode(ids) for name, ids in whole.items()} == TEXTS


def split_at(flat: np.ndarray, eos: int) -> list[list[int]]:
    ends = np.flatnonzero(flat == eos) + 1
    return [part.tolist() for part in np.split(flat, ends[:-1])]


def test_second_start_reads_the_cache_and_a_changed_file_does_not(folder, tmp_path):
    first = prepare(config_of(folder))
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*") if path.suffix != ".lock"}
    second = prepare(config_of(folder))
    assert second.fingerprint == first.fingerprint
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "cache").rglob("*") if p.suffix != ".lock"} == stamps
    (folder / "a/part0.txt").write_text("Document number 0 says: cafe, end.\n")
    assert prepare(config_of(folder)).fingerprint != first.fingerprint


def test_training_a_tokenizer_twice_gives_the_same_bytes(folder, tmp_path):
    one = prepare(config_of(folder))
    two = prepare(config_of(folder, cache=str(tmp_path / "other")))
    assert one.tokenizer.json == two.tokenizer.json and one.fingerprint == two.fingerprint


def test_split_is_by_name_and_stable_when_files_are_added(folder):
    before = prepare(config_of(folder, held_out=0.3))
    (folder / "a/aaa_new.txt").write_text("one more document\n")
    after = prepare(config_of(folder, held_out=0.3))
    assert set(before.held_out.names) <= set(after.held_out.names) and set(before.train.names) <= set(after.train.names)
    assert not set(after.held_out.names) & set(after.train.names)
    assert len(prepare(config_of(folder, held_out=0.0)).held_out) == 0


def test_held_out_share_of_many_names():
    share = np.mean([is_held_out(f"folder/file_{i}.py", 0.05) for i in range(20_000)])
    assert abs(share - 0.05) < 4 * np.sqrt(0.05 * 0.95 / 20_000)


def test_held_out_text_does_not_shape_the_tokenizer(folder):
    before = prepare(config_of(folder, held_out=0.3))
    (folder / before.held_out.names[0]).write_text("zzqqzzqq " * 500)
    after = prepare(config_of(folder, held_out=0.3))
    assert after.tokenizer.fingerprint == before.tokenizer.fingerprint and after.fingerprint != before.fingerprint


def test_all_documents_held_out_is_an_error(folder):
    with pytest.raises(ConfigError, match=r"data.held_out is 0.999999.* takes all 40 documents"):
        prepare(config_of(folder, held_out=0.9999999))


def listing_of(folder: Path | str, cache: Path, **source) -> Listing:
    return list_source(SourceConfig(text=str(folder), **source), "data.sources[0]", cache)


def names_of(folder: Path, **source) -> list[str]:
    return [file.name for file in listing_of(folder, folder.parent / "cache", **source).files]


def test_globs_and_limit(folder):
    (folder / "a/notes.md").write_text("notes")
    (folder / ".hidden").mkdir()
    (folder / ".hidden/x.txt").write_text("hidden")
    assert names_of(folder) == sorted([*TEXTS, "a/notes.md"])
    assert names_of(folder, include=["*.md"]) == ["a/notes.md"]
    assert names_of(folder, exclude=["*.txt"]) == ["a/notes.md"]
    assert all(name.startswith("b/") for name in names_of(folder, include=["b/*"]))
    assert names_of(folder, max_documents=3) == sorted([*TEXTS, "a/notes.md"])[:3]
    assert names_of(folder / "a/notes.md") == ["notes.md"]


def test_files_without_text_are_counted(folder):
    (folder / "a/empty.txt").write_text("")
    listing = listing_of(folder, folder.parent / "cache")
    assert listing.tally.empty == 1 and len(listing.files) == 40
    assert prepare(config_of(folder)).empty == 1


def test_standard_library(tmp_path):
    listing = listing_of("stdlib", tmp_path)
    names = [file.name for file in listing.files]
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names) and names == sorted(names)
    assert all(name.endswith(".py") for name in names)
    assert not any({"site-packages", "test", "tests"} & set(name.split("/")) for name in names)
    assert listing.bytes > 5e6


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"abcd\x00\x01", r"data\.sources\[0\].*bad\.dat is binary.*offset 4.*exclude: \['z/bad\.dat'\]"),
        (b"caf\xe9 noir", r"data\.sources\[0\].*bad\.dat is not UTF-8 \(byte 0xe9 at offset 3\).*exclude: \['z/bad"),
    ],
)
def test_binary_and_undecodable_files(folder, tmp_path, content, message):
    (folder / "z").mkdir()
    (folder / "z/bad.dat").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        prepare(config_of(folder))
    assert not (tmp_path / "cache").exists()
    assert len(prepare(config_of(folder, source={"exclude": ["z/bad.dat"]})).train) > 0


def test_missing_and_empty_sources(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"data.sources\[0\].text is .*nowhere.*no file or folder"):
        prepare(config_of(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"data.sources\[0\].text .*no file matches include.*\['\*.rs'\]"):
        prepare(config_of(folder, source={"include": ["*.rs"]}))
    (folder / "a/gone.txt").symlink_to(tmp_path / "target")
    with pytest.raises(ConfigError, match=r"gone.txt cannot be read .*exclude: \['a/gone.txt'\]"):
        prepare(config_of(folder))
    (folder / "a/gone.txt").unlink()
    os.mkfifo(folder / "a/pipe")
    with pytest.raises(ConfigError, match=r"a/pipe is no regular file"):
        prepare(config_of(folder))


def test_token_ids_beyond_the_embedding_table(folder, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(prepare(config_of(folder)).tokenizer.json)
    config = config_of(folder, tokenizer={"path": str(path)})
    assert prepare(config).tokenizer.vocab_size == 300
    small = config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": 299})})
    with pytest.raises(
        ConfigError, match=r"token ids up to 299, beyond the 299 rows .* set model.vocab_size .*to at least 300"
    ):
        prepare(small)


def test_large_vocabulary_is_stored_in_four_bytes(folder, tmp_path):
    words = {word: i for i, word in enumerate(["[unk]", "</s>", *(f"w{i}" for i in range(70_000)), "done"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[unk]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "words.json"))
    config = validate(
        {
            "model": {"vocab_size": 80_000},
            "data": {
                "sources": [{"text": str(folder)}],
                "tokenizer": {"path": str(tmp_path / "words.json")},
                "cache": str(tmp_path / "cache"),
            },
        }
    )
    corpus = prepare(config)
    (file,) = (tmp_path / "cache").rglob("tokens.bin")
    assert file.stat().st_size == 4 * corpus.tokens and corpus.tokenizer.bos is None
    assert corpus.train[0][-2:].tolist() == [words["done"], words["</s>"]] and corpus.train[0][0] == words["[unk]"]


def test_unfit_tokenizers(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"data.tokenizer.vocab_size is 257.*at least 258"):
        prepare(config_of(folder, tokenizer={"vocab_size": 257}))
    with pytest.raises(ConfigError, match=r"data.tokenizer.path .*nothing.json is not a readable tokenizer.json"):
        load_tokenizer(tmp_path / "nothing.json")
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"broken.json is not a readable tokenizer.json"):
        load_tokenizer(tmp_path / "broken.json")
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "open.json"))
    with pytest.raises(ConfigError, match=r"open.json has no token that ends a document.*data.tokenizer.eos"):
        load_tokenizer(tmp_path / "open.json")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> TextTokenizer:
    root = tmp_path_factory.mktemp("tokenizer")
    (root / "text").mkdir()
    (root / "text/one.txt").write_text("def f(x):\n    return x\n" * 20)
    return prepare(config_of(root / "text", held_out=0.0)).tokenizer


@given(text=st.text())
@settings(max_examples=100, deadline=None)
def test_any_text_survives(tokenizer, text):
    (ids,) = tokenizer.encode_documents([text])
    assert tokenizer.decode(ids) == text and tokenizer.encode(text) == ids[:-1]


def test_a_text_cannot_close_its_own_document(tokenizer):
    (ids,) = tokenizer.encode_documents([f"before {EOS} after"])
    assert ids.count(tokenizer.eos) == 1 and ids[-1] == tokenizer.eos
    assert tokenizer.decode(ids) == f"before {EOS} after"


def test_damaged_cache_is_named(folder, tmp_path):
    prepare(config_of(folder))
    (file,) = (tmp_path / "cache").rglob("tokens.bin")
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ConfigError, match=r"data.cache: .* is damaged .* remove it"):
        prepare(config_of(folder))
    (file.parent / "offsets.npy").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"data.cache: .* is damaged .* remove it"):
        prepare(config_of(folder))


def test_unwritable_cache(folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"data.cache: .*file/.* cannot be written .*choose a writable folder"):
        prepare(config_of(folder, cache=str(tmp_path / "file")))


def test_a_failed_build_leaves_nothing(tmp_path):
    def build(path: Path) -> None:
        path.write_text("half")
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        build_once(tmp_path / "x/built", build)
    assert [p.name for p in (tmp_path / "x").iterdir()] == ["built.lock"]


def test_the_second_of_two_builders_without_locks_keeps_the_first_result(tmp_path):
    target = tmp_path / "built"

    def build(path: Path) -> None:
        target.mkdir()
        (target / "tokens").write_text("first")
        path.mkdir()
        (path / "tokens").write_text("second")

    assert (build_once(target, build) / "tokens").read_text() == "first"


def test_builders_that_start_at_once_wait_for_one(tmp_path):
    built: list[int] = []
    start = threading.Barrier(3)

    def build(path: Path) -> None:
        time.sleep(0.1)
        built.append(threading.get_ident())
        path.write_text("whole")

    def ask() -> str:
        start.wait()
        return build_once(tmp_path / "built", build).read_text()

    with ThreadPoolExecutor(3) as pool:
        assert [f.result() for f in [pool.submit(ask) for _ in range(3)]] == ["whole"] * 3
    assert len(built) == 1


def test_processes_that_start_at_once_build_once(folder, tmp_path):
    script = (
        "import sys; from pathlib import Path; from jaxtrain.data import corpus\n"
        "from jaxtrain.config import validate\n"
        "build = corpus._tokenize\n"
        "def counted(*a): open(sys.argv[2] + '/built', 'a').write('x'); build(*a)\n"
        "corpus._tokenize = counted\n"
        "c = validate({'data': {'sources': [{'text': sys.argv[1]}], 'cache': sys.argv[2] + '/cache',"
        " 'tokenizer': {'vocab_size': 300}}})\n"
        "print(corpus.prepare(c).fingerprint)\n"
    )
    command = [sys.executable, "-c", script, str(folder), str(tmp_path)]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    prints = {process.communicate(timeout=120)[0] for process in running}
    assert [process.returncode for process in running] == [0, 0] and len(prints) == 1
    assert (tmp_path / "built").read_text() == "x"
