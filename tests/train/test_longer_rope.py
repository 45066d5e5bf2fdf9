"""A run that began with short rows goes on with longer ones and stretched positions."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_resume import config_tree, write_corpus

from jaxtrain.config import ConfigError, validate
from jaxtrain.train.loop import train


def test_positions_may_be_stretched_where_longer_rows_begin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_corpus(tmp_path / "corpus")
    tree = config_tree(tmp_path)
    tree["eval"] = {"every": None}
    tree["train"] |= {"steps": 2, "z_loss": 1e-3}
    tree["data"]["schedule"] = [{"start": 0, "seq_len": 16}, {"start": 2, "seq_len": 32}]
    train(validate(tree), tmp_path / "run", quiet=True)

    tree["train"]["steps"] = 4
    tree["model"]["rope"] = {"scaling": "yarn", "factor": 2.0, "original_seq_len": 16}
    tree["attention"] = {"backend": "xla"}
    result = train(validate(tree), tmp_path / "run")
    said = capsys.readouterr().out
    assert result["updates"] == 4 and result["resumed_from"] == 2
    assert "model.rope.scaling changed from 'none' to 'yarn'" in said
    assert "attention of sequences of 32: xla (attention.backend)" in said
    assert '"z_loss"' in (tmp_path / "run" / "metrics.jsonl").read_text()

    tree["model"]["rope"] = {"scaling": "none", "theta": 5000.0}
    tree["model"]["d_ff"] = 96
    with pytest.raises(ConfigError, match=r"model\.d_ff"):
        train(validate(tree), tmp_path / "run", quiet=True)
