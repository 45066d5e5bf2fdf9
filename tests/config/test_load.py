"""YAML, bases, overrides, messages, round trips, and every shipped file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxtrain.config import CONFIG_ROOT, ConfigError, diff_configs, dump_config, load_config, replace, to_tree, validate
from jaxtrain.config import settings as schema
from jaxtrain.config.load import read_yaml
from jaxtrain.config.values import parse_yaml
from jaxtrain.mesh.rules import resolve_rules
from jaxtrain.prove.shrink import shrink

SHIPPED = sorted(str(path.relative_to(CONFIG_ROOT)) for path in CONFIG_ROOT.rglob("*.yaml"))


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_file_loads_and_survives_a_round_trip(name: str) -> None:
    config = load_config(name)
    again = validate(yaml.safe_load(dump_config(config)))
    assert to_tree(again) == to_tree(config)
    assert resolve_rules(again.rules) == resolve_rules(config.rules)


def test_files_win_over_their_bases_and_overrides_over_files(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("model: {d_model: 64, n_heads: 2}\ntrain: {updates: 5}\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\ntrain: {global_batch: 2}\nmodel: {n_heads: 4}\n")
    config = load_config(tmp_path / "b.yaml", ["train.steps=7", "optimizer.learning_rate=3e-4", "rules.mlp=null"])
    assert (config.model.d_model, config.model.n_heads) == (64, 4)
    assert (config.train.steps, config.train.global_batch) == (7, 2)
    assert config.optimizer.learning_rate == 3e-4
    assert "mlp" in config.rules.model_fields_set and "embed" not in config.rules.model_fields_set


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "train: {steps: 3}\nmodel: {d_model: 8}\n\ntrain:\n  global_batch: 4\n",
            "train stands twice, in line 1 and in line 4",
        ),
        ("train:\n  steps: 3\n  # so that\n  steps: 4\n", "steps stands twice, in line 2 and in line 4"),
        ("data: {sources: [{text: a}, {text: b, 'text': c}]}", "text stands twice, in line 1 and in line 1"),
    ],
)
def test_a_key_that_stands_twice_is_refused_with_both_lines(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    (tmp_path / "above.yaml").write_text("base: run.yaml\n")
    for name in ("run.yaml", "above.yaml"):
        with pytest.raises(ConfigError, match=words):
            load_config(tmp_path / name)


def test_merged_keys_may_be_replaced_and_overrides_are_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The keys of `<<` stand once where they are written; a mapping that is read twice stays one mapping."""
    (tmp_path / "run.yaml").write_text("model: &m {d_model: 64, n_layers: 2}\nbase: []\n")
    tree = read_yaml(tmp_path / "run.yaml")
    assert tree["model"] == {"d_model": "64", "n_layers": "2"}
    merged = parse_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: {<<: *a}\nd: {<<: *a, x: 0}\n")
    assert merged["b"] == {"x": "1", "y": "3"} and merged["d"] == {"x": "0", "y": "2"}
    with pytest.raises(ConfigError, match=r"override 'data.sources=.*text stands twice"):
        load_config("tiny", ["data.sources=[{text: a, text: b}]"])
    assert load_config("tiny", ["train.steps=3000", "train.steps=400"]).train.steps == 400
    assert "train.steps is given more than once: the last one holds, train.steps=400" in capsys.readouterr().err


def test_a_circle_of_bases_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base: b.yaml\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\n")
    with pytest.raises(ConfigError, match=r"circle, break it: a.yaml -> b.yaml"):
        load_config(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"modle": {}}, "unknown setting modle (did you mean model?)"),
        ({"model": {"d_modl": 3}}, "unknown setting model.d_modl (did you mean model.d_model?)"),
        ({"model": {"rope": {"thet": 1}}}, "unknown setting model.rope.thet (did you mean model.rope.theta?)"),
        ({"model": 5}, "model is 5"),
        ({"model": {"d_model": "wide"}}, "model.d_model is 'wide'"),
        ({"model": {"d_model": 0}}, "model.d_model is 0: input should be greater than 0"),
        ({"model": {"head_dim": 7}}, "model.head_dim 7 is odd"),
        ({"mesh": {"data": -1, "pipe": -1}}, "mesh.data and mesh.pipe are both -1"),
        ({"mesh": {"tensor": 0}}, "mesh.tensor is 0"),
        ({"rules": {"mlp": "tensr"}}, "rules.mlp is 'tensr': input should be 'data', 'pipe', 'tensor'"),
        ({"data": {"sources": [{"txt": "a"}]}}, "unknown setting data.sources.0.txt (did you mean data.sources.text?)"),
        ({"remat": {"every": 3}}, "remat.every 3 does not divide model.n_layers 4"),
        ({"optimizer": {"unit": "tokens"}}, "set optimizer.total"),
    ],
)
def test_messages_name_setting_value_and_fix(tree: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        validate(tree)
    assert words in str(error.value)


def test_all_faults_come_in_one_message() -> None:
    with pytest.raises(ConfigError) as error:
        validate({"model": {"d_model": -1, "n_heads": "x"}, "train": {"update": 3}})
    assert len(str(error.value).splitlines()) == 3


def test_replace_and_diff() -> None:
    config = validate({})
    other = replace(config, "mesh.tensor=2", "rules.preset=[fsdp, tensor]")
    assert diff_configs(to_tree(config), to_tree(other)) == [
        ("mesh.tensor", 1, 2),
        ("rules.preset", ["ddp"], ["fsdp", "tensor"]),
    ]
    assert replace(config, "rules.preset=fsdp").rules.preset == ["fsdp"]
    assert replace(config, "train.sample_prompt=").train.sample_prompt == ""
    assert replace(config, "optimizer.clip_norm=null").optimizer.clip_norm is None


def test_every_setting_is_documented() -> None:
    undocumented = [
        f"{section.__name__}.{name}"
        for section in schema.Section.__subclasses__()
        if section is not schema.RunConfig
        for name, field in section.model_fields.items()
        if not field.description
    ]
    assert not undocumented


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.vocab_size=300", "model.unpadded_vocab_size=301"], "unpadded_vocab_size 301 exceeds model.vocab_size"),
        (
            ["data.tokenizer.vocab_size=300", "model.unpadded_vocab_size=299"],
            "model.vocab_size 299 without its padding",
        ),
    ],
)
def test_padding_leaves_a_row_for_every_token(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config("tiny.yaml", overrides)
    config = load_config("tiny.yaml", ["data.tokenizer.vocab_size=300", "model.unpadded_vocab_size=300"])
    assert config.model.token_rows == 300
    small = shrink(config).model
    assert small.token_rows == small.vocab_size - 8
