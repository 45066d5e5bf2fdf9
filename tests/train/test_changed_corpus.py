"""A corpus or tokenizer that changed under a run is refused, unless told; token shards and masks train end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_resume import config_tree, write_corpus

from jaxtrain.config import ConfigError, validate
from jaxtrain.data import prepare
from jaxtrain.data.tokenize import tokenize
from jaxtrain.train.loop import train


def tree_of(folder: Path, **data: Any) -> dict[str, Any]:
    tree = config_tree(folder)
    tree["train"] |= {"steps": 2, "global_batch": 8}
    tree["data"] |= data
    tree["eval"] = {"every": None}
    return tree


def test_a_changed_corpus_is_refused_unless_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    fixed = tmp_path / "tokenizer.json"
    fixed.write_text(prepare(validate(tree_of(tmp_path))).tokenizer.json)
    tree = tree_of(tmp_path, tokenizer={"path": str(fixed)})
    train(validate(tree), tmp_path / "run", quiet=True)

    (corpus / "file41.py").write_text("def added(x):\n    return x\n" * 9)
    tree["train"]["steps"] = 4
    with pytest.raises(
        ConfigError, match=r"the corpus changed since this run began \(\w+ -> \w+\).*data\.allow_changed"
    ):
        train(validate(tree), tmp_path / "run", quiet=True)
    tree["data"]["allow_changed"] = True
    result = train(validate(tree), tmp_path / "run")
    assert result["updates"] == 4 and result["resumed_from"] == 2
    assert "the corpus changed since this run began" in capsys.readouterr().out

    # Another tokenizer gives the same ids another meaning: the run goes on with its own.
    fixed.write_text(fixed.read_text().replace('"type": "ByteLevel"', '"type":  "ByteLevel"', 1))
    tree["train"]["steps"] = 5
    held = tmp_path / "run" / "tokenizer.json"
    with pytest.raises(
        ConfigError, match=rf"the tokenizer changed since this run began.*set data\.tokenizer\.path to {held}"
    ):
        train(validate(tree), tmp_path / "run", quiet=True)
    tree["data"]["tokenizer"]["path"] = str(held)
    assert train(validate(tree), tmp_path / "run", quiet=True)["resumed_from"] == 4
    # The file may be gone: the run does not need it.
    fixed.unlink()
    tree["data"]["tokenizer"]["path"] = str(fixed)
    tree["train"]["steps"] = 6
    assert train(validate(tree), tmp_path / "run", quiet=True)["resumed_from"] == 5


def test_token_shards_with_masks_train_end_to_end(tmp_path: Path) -> None:
    records = [{"q": f"def f{i}(x):", "a": f" return x + {i}"} for i in range(80)]
    (tmp_path / "in.jsonl").write_text("{broken\n" + "".join(json.dumps(record) + "\n" for record in records))
    source = {"jsonl": str(tmp_path / "in.jsonl"), "prompt_field": "q", "response_field": "a"}
    tree = tree_of(tmp_path, sources=[source], on_bad_record="skip", tokenizer={"vocab_size": 300})
    direct = train(validate(tree), tmp_path / "direct", quiet=True)
    assert direct["skipped_records"] == 1
    rows = [json.loads(line) for line in (tmp_path / "direct/metrics.jsonl").read_text().splitlines()]
    assert [row["records_skipped"] for row in rows] == [1, 1]
    tokenize(validate(tree), tmp_path / "shards")
    tree["data"] |= {"sources": [{"tokens": str(tmp_path / "shards")}]}
    shards = train(validate(tree), tmp_path / "mapped", quiet=True)
    assert shards["skipped_records"] == 0 and shards["tokens_total"] > 0
    corpus = prepare(validate(tree))
    assert corpus.train.scored is not None and shards["loss_last"] < 7
