"""YAML files and overrides -> RunConfig; dump and diff of settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from jaxtrain.config.aliases import hint, migrate, migrate_value, new_key
from jaxtrain.config.errors import ConfigError, nearest
from jaxtrain.config.settings import ClusterConfig, RunConfig
from jaxtrain.config.suggest import suggest_key
from jaxtrain.config.values import (
    NULLS,
    Plain,
    RepeatedKeyError,
    dump_yaml,
    find_annotation,
    parse_override,
    parse_yaml,
    read_number,
)

_PACKAGE = Path(__file__).resolve().parents[1]
CONFIG_ROOT = _PACKAGE / "configs" if (_PACKAGE / "configs").is_dir() else _PACKAGE.parent / "configs"
"""Shipped configurations: in the package where it is installed, beside it in the repository."""
RUN_FILE = "config.yaml"
"""Settings of a run, in its directory."""
SCHEMA = 2
"""Version of the settings and of a checkpoint's metadata, as runs record it; 1 is that of runs without a record.

It grows when settings are renamed or removed, or when what they mean changes. tests/data/runs has a run of each.
"""


def load_config(path: str | Path, overrides: Iterable[str] = (), hints: bool = True) -> RunConfig:
    """Read a YAML file (its `base:` files merged below it), apply `section.key=value` overrides, validate.

    The name of a shipped configuration (such as tiny) and a run directory are accepted for `path`. `hints=False` reads
    old names of settings silently, for files that jaxtrain wrote. Raises ConfigError naming the setting, the value and
    the nearest right key.
    """
    hints = hints and not is_run(path)
    return validate(apply_overrides(read_yaml(Path(path), hints=hints), overrides), source=str(path))


def named_cluster(name: str | Path, overrides: Iterable[str] = ()) -> ClusterConfig:
    """The cluster of a YAML file or of a name in configs/clusters; raises ConfigError with the nearest name."""
    if Path(name).suffix:
        return load_config(name, overrides).cluster
    known = sorted(path.stem for path in (CONFIG_ROOT / "clusters").glob("*.yaml"))
    if str(name) not in known:
        raise ConfigError(
            f"cluster {str(name)!r} is unknown{nearest(str(name), known)}; clusters: {', '.join(known)}, or a YAML file"
        )
    return load_config(Path("clusters") / name, overrides).cluster


def is_run(path: str | Path) -> bool:
    """Whether a path is a run directory, or its config.yaml."""
    folder = Path(path).parent if Path(path).name == RUN_FILE else Path(path)
    return (folder / RUN_FILE).is_file() and (folder / "environment.json").is_file()


def read_yaml(path: Path, seen: tuple[Path, ...] = (), hints: bool = True) -> dict[str, Any]:
    """Read one YAML mapping; the files of `base:` (one or a list, relative to this one) are merged below it.

    Later files win. Raises ConfigError for a missing file, bad YAML and a circle of bases.
    """
    path = _find(path)
    if path in seen:
        raise ConfigError(f"{path}: base files form a circle, break it: {' -> '.join(p.name for p in (*seen, path))}")
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not readable YAML: {' '.join(str(error).split())}") from None
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds no sections of settings: write lines such as train: {{steps: 100}}")
    tree = migrate(_without_schema(tree, str(path)), str(path), hints)
    merged: dict[str, Any] = {}
    for base in _bases(path, tree.pop("base", [])):
        merged = _merge(merged, read_yaml(path.parent / base, (*seen, path), hints))
    return _merge(merged, tree)


def apply_overrides(tree: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Set `a.b=value` entries on a tree of settings; the type of the setting says how the value is read.

    Raises ConfigError for an entry of another form, and where a setting is given under its old and its new name.
    """
    out = _merge({}, tree)
    spelled: dict[str, str] = {}
    for override in overrides:
        given, equals, text = override.partition("=")
        given = given.strip()
        if not equals or not all(given.split(".")):
            raise ConfigError(f"override {override!r} is not of the form section.key=value")
        key = new_key(given, "override")
        if key in spelled:
            hint(
                f"override {given} is given more than once: the last one holds, {override.strip()}", f"twice:{override}"
            )
        if spelled.setdefault(key, given) != given:
            raise ConfigError(f"overrides {spelled[key]} and {given} set the same setting: use {key} alone")
        parts = key.split(".")
        node = out
        for part in parts[:-1]:
            child = node.setdefault(part, {})
            if not isinstance(child, dict):
                raise ConfigError(
                    f"override {override!r}: {part} is one value, it has no key {parts[-1]!r}; set {part}"
                )
            node = child
        try:
            value = parse_override(text, find_annotation(RunConfig, key))
        except RepeatedKeyError as error:
            raise ConfigError(f"override {override!r}: {error}") from None
        node[parts[-1]] = migrate_value(value, key, "override")
    return out


def check_schema(value: Any, source: str) -> None:
    """Raise ConfigError where a file or checkpoint is of a later schema than this version of jaxtrain knows."""
    schema = value if isinstance(value, int) else read_number(str(value))
    if not isinstance(schema, int) or not 1 <= schema <= SCHEMA:
        raise ConfigError(
            f"{source} has schema {value}, this version of jaxtrain reads 1 to {SCHEMA}: use the version that wrote it"
        )


def _without_schema(tree: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The settings of a tree whose schema, where it records one, this version reads."""
    check_schema(tree.get("schema", 1), source)
    return {key: value for key, value in tree.items() if key != "schema"}


def validate(tree: Mapping[str, Any], source: str = "config", hints: bool = True) -> RunConfig:
    """A RunConfig from a tree of plain values; raises one ConfigError that lists all faults."""
    tree = migrate(_without_schema(tree, source), source, hints)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{source}: {_explain(e)}" for e in _distinct(error))) from None


def dump_config(config: RunConfig) -> str:
    """YAML of the schema and of every setting; a sharding rule appears only if it was set (unset is not null)."""
    return dump_yaml({"schema": SCHEMA, **to_tree(config)})


def to_tree(config: RunConfig) -> dict[str, Any]:
    """Plain values of every setting, without the schema; the inverse of `validate`."""
    tree = config.model_dump(mode="json")
    tree["rules"] = config.rules.model_dump(mode="json", include=config.rules.model_fields_set | {"preset"})
    return tree


def diff_configs(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    """(dotted key, old value, new value) where two trees of settings differ; 'unset' where a key is absent."""
    rows: list[tuple[str, Any, Any]] = []
    for key in sorted({*old, *new}):
        a, b = old.get(key, "unset"), new.get(key, "unset")
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            rows += diff_configs(a, b, f"{prefix}{key}.")
        elif a != b:
            rows.append((f"{prefix}{key}", a, b))
    return rows


def replace(config: RunConfig, *overrides: str) -> RunConfig:
    """A copy of a config with `section.key=value` overrides applied; raises ConfigError as `load_config`."""
    return validate(apply_overrides(to_tree(config), overrides), source="override")


def _bases(path: Path, bases: Any) -> list[str]:
    """The files that `base:` of a YAML file names."""
    names = bases if isinstance(bases, list) else [bases]
    for name in names:
        if not isinstance(name, str) or (isinstance(name, Plain) and (name in NULLS or read_number(name) is not None)):
            raise ConfigError(
                f"{path}: base is {str(name) or 'empty'}: name a YAML file or a list of files, relative to this file"
            )
    return names


def _find(path: Path) -> Path:
    shipped = CONFIG_ROOT / path, CONFIG_ROOT / path.with_suffix(".yaml")
    for candidate in (path, path.with_suffix(".yaml"), *shipped, path / RUN_FILE):
        if candidate.is_file():
            return candidate.resolve()
    if path.is_dir():
        raise ConfigError(f"{path} is a folder without {RUN_FILE}: name a YAML file, a run directory or a shipped one")
    known = sorted(str(p.relative_to(CONFIG_ROOT)) for p in CONFIG_ROOT.rglob("*.yaml"))
    near = nearest(path.name, known) or nearest(path.name, [Path(name).stem for name in known])
    raise ConfigError(f"config file {path} does not exist{near}; jaxtrain --help lists the shipped configurations")


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    out = {k: _merge(v, {}) if isinstance(v, Mapping) else v for k, v in below.items()}
    for key, value in above.items():
        if isinstance(value, Mapping):
            lower = out.get(key)
            out[key] = _merge(lower if isinstance(lower, Mapping) else {}, value)
        else:
            out[key] = value
    return out


def _distinct(error: ValidationError) -> list[Any]:
    """One entry per setting. A union reports each of its branches under a path with a type such as list[...]."""
    seen: dict[tuple[Any, ...], Any] = {}
    for entry in error.errors():
        loc = tuple(part for part in entry["loc"] if isinstance(part, int) or "[" not in part)
        seen.setdefault(loc, {**entry, "loc": loc})
    return list(seen.values())


def _explain(entry: Any) -> str:
    loc = entry["loc"]
    name = ".".join(str(part) for part in loc)
    if entry["type"] == "extra_forbidden":
        # Of an unknown section, the setting in it is what was meant.
        inner = (
            f".{next(iter(entry['input']))}"
            if len(loc) == 1 and isinstance(entry["input"], dict) and entry["input"]
            else ""
        )
        near = suggest_key(".".join(str(part) for part in loc if not isinstance(part, int)) + inner, RunConfig)
        return f"unknown setting {name}{inner}" + (f" (did you mean {near}?)" if near else "")
    if entry["type"] == "missing":
        return f"{name} is not set and has no default: set it"
    if entry["type"] in ("model_type", "dict_type"):
        return f"{name} is {entry['input']!r}: it is a section, write settings below it or remove it"
    if entry["type"] == "value_error":
        return str(entry["ctx"]["error"])
    return f"{name} is {entry['input']!r}: {entry['msg'][0].lower()}{entry['msg'][1:]}"
