"""`jaxtrain tokenize`: shards hold what training would have read; a killed job resumes; tokenizers are compared."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import sentencepiece
from test_masks import CHAT, TEMPLATE, words_file
from test_sources import lines, write
from test_tokenfiles import IndexedDataset, documents_of

from jaxtrain.cli import main
from jaxtrain.config import ConfigError, RunConfig, validate
from jaxtrain.data import prepare
from jaxtrain.data.sentencepiece import convert
from jaxtrain.data.tokenize import tokenize
from jaxtrain.data.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [f"Document {i}: {'some words ' * (i % 7)}end {i * i}" for i in range(200)]


def config_of(folder: Path, *sources: dict, **data) -> RunConfig:
    base = {"sources": list(sources), "cache": str(folder / "cache"), "held_out": 0.0}
    return validate({"data": base | {"tokenizer": {"vocab_size": 320}} | data})


def all_ids(folder: Path, source: dict, **data) -> list[list[int]]:
    return list(documents_of(prepare(config_of(folder, source, **data))).values())


@pytest.mark.parametrize(("format", "workers"), [("bin", 1), ("bin", 2), ("arrayrecord", 1)])
def test_shards_hold_what_training_would_have_read(tmp_path, format, workers):
    sources = [write("jsonl", tmp_path / "jsonl", TEXTS), write("text", tmp_path / "text", TEXTS[:50])]
    config = config_of(tmp_path, *sources)
    counts = tokenize(config, tmp_path / "out", format, workers=workers, unit_bytes=3000)
    direct = prepare(config)
    want = [direct.train[i].tolist() for i in range(len(direct.train))]
    source = {"tokens" if format == "bin" else "arrayrecord": str(tmp_path / "out")}
    corpus = prepare(config_of(tmp_path, source))
    assert list(documents_of(corpus).values()) == want
    assert corpus.tokenizer.fingerprint == direct.tokenizer.fingerprint
    assert counts["documents"] == 250 and counts["tokens"] == direct.tokens and counts["bytes"] == direct.bytes
    assert counts["bytes_per_token"] == pytest.approx(direct.bytes / direct.tokens, abs=1e-4)
    assert counts["shards"] > 5
    if format == "bin":
        assert corpus.bytes == direct.bytes and corpus.describe()["bytes a token"] > 1
        sequences = [IndexedDataset(path) for path in sorted((tmp_path / "out").glob("*.bin"))]
        assert [s.sequence(i) for s in sequences for i in range(len(s.sizes))] == want
    assert not list((tmp_path / "out").glob("*partial*")) and not list((tmp_path / "out").glob("0*.json"))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert tokenize(config, tmp_path / "out", format, unit_bytes=3000)["tokens"] == counts["tokens"]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize("format", ["bin", "arrayrecord"])
def test_masks_travel_with_the_shards(tmp_path, format):
    chats = [
        {"turns": [{"role": "user", "content": f"w{i}"}, {"role": "assistant", "content": f"w{i} w{i + 1}"}]}
        for i in range(20)
    ]
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_bytes(lines(chats))
    tokenizer = {"path": str(words_file(tmp_path))}
    source = {"jsonl": str(tmp_path / "in"), **CHAT}
    assert source["template"] is TEMPLATE
    direct = prepare(config_of(tmp_path, source, tokenizer=tokenizer)).train
    tokenize(config_of(tmp_path, source, tokenizer=tokenizer), tmp_path / "out", format, unit_bytes=400)
    found = prepare(
        config_of(
            tmp_path, {"tokens" if format == "bin" else "arrayrecord": str(tmp_path / "out")}, tokenizer=tokenizer
        )
    ).train
    for i in range(20):
        assert found[i].tolist() == direct[i].tolist()
        masks = [d.scored[d.starts[i] : d.stops[i]].tolist() for d in (found, direct)]
        assert masks[0] == masks[1] and 0 < sum(masks[0]) < len(masks[0])


def test_token_files_become_shards_too(tmp_path):
    config = config_of(tmp_path, write("jsonl", tmp_path / "in", TEXTS))
    tokenize(config, tmp_path / "bin", "bin", unit_bytes=4000)
    again = config_of(tmp_path, {"tokens": str(tmp_path / "bin")})
    tokenize(again, tmp_path / "records", "arrayrecord")
    assert all_ids(tmp_path, {"arrayrecord": str(tmp_path / "records")}) == all_ids(
        tmp_path, {"tokens": str(tmp_path / "bin")}
    )


def test_another_tokenizer_is_refused(tmp_path):
    config = config_of(tmp_path, write("jsonl", tmp_path / "in", TEXTS))
    tokenize(config, tmp_path / "out")
    other = tmp_path / "other.json"
    other.write_text(prepare(config_of(tmp_path, write("jsonl", tmp_path / "in2", TEXTS[:9]))).tokenizer.json)
    with pytest.raises(
        ConfigError, match=r"written with tokenizer [0-9a-f]{12}, data\.tokenizer\.path .*other\.json is"
    ):
        prepare(config_of(tmp_path, {"tokens": str(tmp_path / "out")}, tokenizer={"path": str(other)}))
    with pytest.raises(ConfigError, match=r"--out .* holds shards of other sources, settings or another tokenizer"):
        tokenize(
            config_of(tmp_path, write("jsonl", tmp_path / "in", TEXTS), tokenizer={"path": str(other)}),
            tmp_path / "out",
        )
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match=r"--out .*full holds other files"):
        tokenize(config, tmp_path / "full")


def test_bad_records_and_limits(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_bytes(
        lines([{"text": t} for t in TEXTS]) + b"{broken\n" + lines([{"text": "last"}])
    )
    source = {"jsonl": str(tmp_path / "in")}
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 201: not JSON"):
        tokenize(config_of(tmp_path, source), tmp_path / "fail", workers=2, unit_bytes=3000)
    counts = tokenize(config_of(tmp_path, source, on_bad_record="skip"), tmp_path / "skip", workers=2, unit_bytes=3000)
    assert counts["documents"] == 201 and counts["skipped"] == 1 and "line 201" in counts["reasons"][0]
    few = tokenize(config_of(tmp_path, source | {"max_documents": 7}), tmp_path / "few", unit_bytes=100)
    assert few["documents"] == 7


def test_kill_in_the_middle_and_again(tmp_path):
    rng = np.random.default_rng(0)
    texts = [" ".join(map(str, rng.integers(0, 10**6, 400).tolist())) for _ in range(600)]
    config = config_of(tmp_path, write("jsonl", tmp_path / "in", texts))
    script = (
        "import json, sys; from pathlib import Path; from jaxtrain.config import validate\n"
        "from jaxtrain.data.tokenize import tokenize\n"
        "if __name__ == '__main__':\n"
        "    tokenize(validate(json.loads(sys.argv[1])), Path(sys.argv[2]), workers=2, unit_bytes=60_000)\n"
    )
    (tmp_path / "run.py").write_text(script)
    command = [sys.executable, str(tmp_path / "run.py"), config.model_dump_json(), str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    out = tmp_path / "out"
    while len(list(out.glob("*.json"))) < 5 and process.poll() is None:
        time.sleep(0.005)
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = {path: path.stat().st_mtime_ns for path in out.glob("*.idx") if path.with_suffix(".json").exists()}
    assert done and not (out / "tokens.json").exists()
    with pytest.raises(ConfigError, match=r"not all written: run jaxtrain tokenize"):
        prepare(config_of(tmp_path, {"tokens": str(out)}))
    # The workers go with the process that started them.
    psutil.wait_procs(children, timeout=10)
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    done = {path: path.stat().st_mtime_ns for path in out.glob("*.idx") if path.with_suffix(".json").exists()}
    tokenize(config, out, unit_bytes=60_000)
    assert {path: path.stat().st_mtime_ns for path in done} == done and len(list(out.glob("*.idx"))) > len(done)
    assert not list(out.glob("*partial*"))
    fresh = tokenize(config, tmp_path / "fresh", unit_bytes=60_000)
    assert [path.name for path in sorted(out.iterdir())] == [
        path.name for path in sorted((tmp_path / "fresh").iterdir())
    ]
    assert all(path.read_bytes() == (tmp_path / "fresh" / path.name).read_bytes() for path in out.iterdir())
    assert fresh["documents"] == 600


def test_verb(tmp_path, capsys):
    source = write("jsonl", tmp_path / "in", TEXTS)
    (tmp_path / "run.yaml").write_text(
        json.dumps({"data": {"sources": [source], "cache": str(tmp_path / "cache"), "tokenizer": {"vocab_size": 320}}})
    )
    command = ["tokenize", str(tmp_path / "run.yaml"), "--out", str(tmp_path / "out"), "--workers", "1"]
    assert main([*command, "--json"]) == 0
    counts = json.loads(capsys.readouterr().out)
    sidecar = json.loads((tmp_path / "out/tokens.json").read_text())
    assert counts["documents"] == 200 == sidecar["documents"] and sidecar["tokenizer"] == counts["tokenizer"]
    assert main(command) == 0
    assert "documents: 200" in capsys.readouterr().out
    assert main([*command[:3], str(tmp_path / "in")]) == 2
    assert "holds other files" in capsys.readouterr().err


@pytest.fixture(scope="module")
def prose(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sp") / "prose.txt"
    sentences = [line for name in ("argparse", "json", "threading") for line in _source_of(name).splitlines()]
    path.write_text("\n".join(sentences))
    return path


def _source_of(module: str) -> str:
    return Path(__import__(module).__file__).read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("extra", [{}, {"byte_fallback": True, "normalization_rule_name": "identity",
                                        "remove_extra_whitespaces": False}], ids=["default", "llama"])  # fmt: skip
def test_sentencepiece_models_encode_as_the_sentencepiece_library_does(prose, tmp_path, kind, extra):
    sentencepiece.SentencePieceTrainer.train(
        input=str(prose), model_prefix=str(tmp_path / "m"), vocab_size=900, model_type=kind, minloglevel=2, **extra
    )
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    tokenizer = load_tokenizer(tmp_path / "m.model")
    assert (tokenizer.bos, tokenizer.eos) == (reference.bos_id(), reference.eos_id())
    assert tokenizer.vocab_size == reference.get_piece_size()
    # Runs of one sign are cut in several ways of equal score.
    texts = [line for line in prose.read_text().splitlines() if "--" not in line and "==" not in line]
    texts += ["", " ", "  two  spaces  ", "caf\u00e9 \ufb01ne \u00bd \u65e5\u672c", "tab\there", "say </s> and <s> now"]
    for text in texts:
        assert tokenizer.encode(text)[1:] == reference.encode(text), text
    if extra:
        for text in texts:
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_broken_sentencepiece_model(tmp_path):
    (tmp_path / "m.model").write_bytes(b"\x0a\xff\xff\xff\xff")
    with pytest.raises(ConfigError, match=r"m\.model is not a readable sentencepiece model"):
        load_tokenizer(tmp_path / "m.model")
    with pytest.raises(ValueError, match="0 pieces"):
        convert(b"")
