"""Values are read by the type of their setting, from overrides and from YAML files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtrain.config import ConfigError, dump_config, load_config, replace, validate
from jaxtrain.config.values import parse_yaml

BASE = validate({})


def value_at(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


def from_file(tmp_path: Path, key: str, text: str) -> Any:
    lines = [f"{'  ' * depth}{part}:" for depth, part in enumerate(key.split("."))]
    (tmp_path / "run.yaml").write_text("\n".join(lines) + f" {text}\n")
    return value_at(load_config(tmp_path / "run.yaml"), key)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("train.sample_prompt", "def ", "def "),
        ("train.sample_prompt", "foo # bar", "foo # bar"),
        ("train.sample_prompt", "", ""),
        ("train.sample_prompt", "'quoted'", "'quoted'"),
        ("train.sample_prompt", "null", "null"),
        ("train.sample_prompt", "a: [b", "a: [b"),
        ("observe.wandb_project", "null", None),
        ("xla.xla_foo", "a,b # c", "a,b # c"),
        ("mesh.data", " 2 ", 2),
        ("data.sources", "[{text: /a b}]", "/a b"),
    ],
)
def test_text_of_an_override_is_taken_as_it_is(key: str, text: str, value: Any) -> None:
    read = value_at(replace(BASE, f"{key}={text}"), key)
    assert (read[0].text if isinstance(read, list) else read) == value


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("cluster.name", "123", "123"),
        ("cluster.name", "no", "no"),
        ("cluster.name", "2024-01-01", "2024-01-01"),
        ("cluster.name", "1e3", "1e3"),
        ("cluster.device", "null", None),
        ("cluster.device", "~", None),
        ("train.steps", "010", 10),
        ("train.steps", "1_000", 1000),
        ("train.steps", "1e4", 10_000),
        ("train.z_loss", "5", 5.0),
        ("optimizer.learning_rate", "3e-4", 3e-4),
        ("optimizer.learning_rate", "1_0.5e-1", 1.05),
        ("optimizer.clip_norm", "null", None),
        ("checkpoint.asynchronous", "false", False),
        ("checkpoint.asynchronous", "no", False),
        ("data.schedule_unit", "tokens", "tokens"),
        ("mesh.allow_cross_domain", "[tensor]", ["tensor"]),
        ("rules.mlp", "[tensor, seq]", ["tensor", "seq"]),
        ("rules.mlp", "null", None),
        ("rules.preset", "fsdp", ["fsdp"]),
        ("pipeline.stages", "[2, 02]", [2, 2]),
        ("pipeline.stages", "auto", "auto"),
        ("model.windows", "[null, 8]", [None, 8]),
        ("model.rope", "{theta: 5e5}", 5e5),
        ("xla.xla_foo", "true", True),
        ("xla.xla_foo", "no", "no"),
        ("xla.xla_foo", "1e3", 1000.0),
        ("xla.xla_foo", "12", 12),
    ],
)
def test_files_and_overrides_read_alike(tmp_path: Path, key: str, text: str, value: Any) -> None:
    for read in (value_at(replace(BASE, f"{key}={text}"), key), from_file(tmp_path, key, text)):
        one = read.theta if key == "model.rope" else read
        assert one == value and type(one) is type(value)


@pytest.mark.parametrize(
    ("key", "text", "words"),
    [
        ("train.steps", "true", "train.steps is 'true': input should be a valid integer"),
        ("train.steps", "yes", "train.steps is 'yes'"),
        ("train.steps", "60:30", "train.steps is '60:30'"),
        ("train.steps", "0x10", "train.steps is '0x10'"),
        ("train.steps", "1.5", "train.steps is 1.5"),
        ("train.steps", "1" * 5000, "train.steps is"),
        ("optimizer.learning_rate", "true", "optimizer.learning_rate is 'true'"),
        ("optimizer.learning_rate", "inf", "finite number"),
        ("optimizer.learning_rate", ".inf", "optimizer.learning_rate is '.inf'"),
        ("optimizer.learning_rate", "nan", "finite number"),
        ("optimizer.learning_rate", "1e400", "finite number"),
        ("model.windows", "[true]", "model.windows"),
        ("train", "5", "train is 5: it is a section"),
        ("train", "null", "train is 'null': it is a section"),
    ],
)
def test_what_is_no_number(tmp_path: Path, key: str, text: str, words: str) -> None:
    for read in (lambda: replace(BASE, f"{key}={text}"), lambda: from_file(tmp_path, key, text)):
        with pytest.raises(ConfigError) as error:
            read()
        assert words in str(error.value).replace(f"{key} is '5'", f"{key} is 5")


def test_values_of_a_mapping_without_types_are_read_as_yaml_1_2() -> None:
    text = "{n: 010, flag: true, name: no, none: null, nested: [1.5, {t: '5'}]}"
    config = replace(BASE, f"data.sources=[{{registered: docs, options: {text}}}]")
    expected = {"n": 10, "flag": True, "name": "no", "none": None, "nested": [1.5, {"t": "5"}]}
    assert config.data.sources[0].options == expected


@pytest.mark.parametrize("value", [True, float("inf"), float("nan")])
def test_python_values_obey_the_same_rules(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rate"):
        validate({"optimizer": {"learning_rate": value}})


@pytest.mark.parametrize("base", ["null", "5", "", "[tiny.yaml, null]", "{a: b}"])
def test_a_base_that_names_no_file(tmp_path: Path, base: str) -> None:
    (tmp_path / "run.yaml").write_text(f"base: {base}\n")
    with pytest.raises(ConfigError, match=r"run\.yaml: base is .*: name a YAML file") as error:
        load_config(tmp_path / "run.yaml")
    assert len(str(error.value).splitlines()) == 1


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_an_override_and_a_dump(text: str) -> None:
    config = replace(BASE, f"train.sample_prompt={text}", f"data.cache={text}")
    assert (config.train.sample_prompt, config.data.cache) == (text, text)
    assert validate(parse_yaml(dump_config(config))) == config


@given(
    st.dictionaries(
        st.just("xla_a"),
        st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.sampled_from(["1e3", "true", "010", "null", "1_0", "no", "5"]),
        min_size=1,
    )
)
def test_any_option_of_xla_survives_a_dump(options: dict[str, Any]) -> None:
    config = validate({"xla": options})
    again = validate(parse_yaml(dump_config(config))).xla
    assert again == options and {type(v) for v in again.values()} == {type(v) for v in options.values()}
