"""Old names of settings: accepted everywhere, one hint each, refused beside the new name."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from jaxtrain.config import ConfigError, aliases, dump_config, load_config, to_tree, validate
from jaxtrain.train.run_dir import check_same_run

OLD = """
model: {max_length: 64, moe: {groups_kept: 1}, rope: {original_length: 32}}
mesh: {allow_torn: [tensor]}
rules: {length: seq, residual_length: [seq, tensor], allow: ["indivisible:length", "activation:mlp"]}
data: {length: 16, long: drop, schedule_unit: updates, schedule: [{start: 0, length: 8}]}
train: {updates: 5}
attention: {context: ulysses}
optimizer: {unit: updates}
"""
NEW = """
model: {max_seq_len: 64, moe: {top_groups: 1}, rope: {original_seq_len: 32}}
mesh: {allow_cross_domain: [tensor]}
rules: {seq_len: seq, residual_seq: [seq, tensor], allow: ["indivisible:seq_len", "activation:mlp"]}
data: {seq_len: 16, overlong: drop, schedule_unit: steps, schedule: [{start: 0, seq_len: 8}]}
train: {steps: 5}
attention: {context_parallel: ulysses}
optimizer: {unit: steps}
"""


@pytest.fixture(autouse=True)
def no_hint_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aliases, "_hinted", set())


def test_old_file_equals_new_file_and_each_old_name_has_one_hint(tmp_path: Path, capsys) -> None:
    (tmp_path / "old.yaml").write_text(OLD)
    expected = to_tree(validate(yaml.safe_load(NEW)))
    assert capsys.readouterr().err == ""
    for _ in range(2):
        assert to_tree(load_config(tmp_path / "old.yaml")) == expected
    hints = capsys.readouterr().err.splitlines()
    assert len(hints) == len(set(hints)) == len(aliases.KEYS) + 3
    assert "old.yaml: data.length is now named data.seq_len; the old name is refused from" in "\n".join(hints)
    assert any("train.updates is now named train.steps; the old name stays accepted" in hint for hint in hints)


def test_old_names_as_overrides(capsys) -> None:
    lists = ["data.schedule=[{start: 0, length: 8}]", "rules.allow=['indivisible:residual_length']"]
    config = load_config("tiny", ["train.updates=40", "data.long=drop", "optimizer.unit=updates", *lists])
    assert (config.train.steps, config.data.overlong, config.optimizer.unit) == (40, "drop", "steps")
    assert (config.data.schedule[0].seq_len, config.rules.allow) == (8, ["indivisible:residual_seq"])
    assert len(capsys.readouterr().err.splitlines()) == 5


def test_an_override_of_either_name_wins_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("train: {updates: 5}")
    (tmp_path / "b.yaml").write_text("base: a.yaml\ntrain: {steps: 6}")
    assert load_config(tmp_path / "b.yaml").train.steps == 6
    for key in ("train.steps", "train.updates"):
        assert load_config(tmp_path / "a.yaml", [f"{key}=7"]).train.steps == 7


def test_both_names_at_once_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("train: {updates: 5, steps: 6}")
    with pytest.raises(ConfigError, match=r"train\.updates is the old name of train\.steps, and both are set"):
        load_config(tmp_path / "a.yaml")
    with pytest.raises(ConfigError, match=r"overrides train\.updates and train\.steps set the same setting"):
        load_config("tiny", ["train.updates=5", "train.steps=6"])


def test_every_alias_leads_to_a_setting() -> None:
    """A renamed or removed setting must not leave a dead entry behind."""
    validate(yaml.safe_load(OLD))
    paths = {key: key.split(".") for key in aliases.KEYS}
    tree = yaml.safe_load(OLD)
    for key, parts in paths.items():
        node = tree
        for part in parts:
            node = node[0] if isinstance(node, list) else node
            assert part in node, f"OLD does not use {key}"
            node = node[part]


def test_a_run_directory_of_the_old_names_resumes(tmp_path: Path, capsys) -> None:
    config = validate(yaml.safe_load(NEW))
    text = dump_config(config)
    for old, new in aliases.KEYS.items():
        text = text.replace(f" {new.rpartition('.')[2]}:", f" {old.rpartition('.')[2]}:")
    text = text.replace(": steps", ": updates")
    assert text != dump_config(config) and "updates: 5" in text
    (tmp_path / "config.yaml").write_text(text)
    capsys.readouterr()
    assert check_same_run(tmp_path, config) == []
    assert capsys.readouterr().err == ""
