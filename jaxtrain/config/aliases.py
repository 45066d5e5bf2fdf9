"""Old names and values of settings, accepted with a hint until the version that refuses them.

Applied to YAML files, overrides, and config.yaml of run directories, before settings are validated.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from jaxtrain.config.errors import ConfigError

REFUSED_IN = "0.3"
"""Version of jaxtrain that refuses the old names, except the permanent ones."""

# Old key -> new key. Entries of a list share the path of the list.
KEYS = {
    "attention.context": "attention.context_parallel",
    "data.length": "data.seq_len",
    "data.long": "data.overlong",
    "data.schedule.length": "data.schedule.seq_len",
    "mesh.allow_torn": "mesh.allow_cross_domain",
    "model.max_length": "model.max_seq_len",
    "model.moe.groups_kept": "model.moe.top_groups",
    "model.rope.original_length": "model.rope.original_seq_len",
    "rules.length": "rules.seq_len",
    "rules.residual_length": "rules.residual_seq",
    "train.updates": "train.steps",
}
PERMANENT = {"train.updates"}
"""Old keys that stay accepted."""

# New key -> old value -> new value. An entry of rules.allow is 'kind:name'; the table replaces the name.
VALUES = {
    "data.schedule_unit": {"updates": "steps"},
    "optimizer.unit": {"updates": "steps"},
    "rules.allow": {"length": "seq_len", "residual_length": "residual_seq"},
}

_hinted: set[str] = set()


def migrate(tree: Mapping[str, Any], source: str, hints: bool = True) -> dict[str, Any]:
    """A copy of a tree of settings in which old keys and values are replaced by new ones.

    Prints one hint per old name and process on stderr, unless `hints` is False. Raises ConfigError where a setting is
    given under both names.
    """
    out = _migrated(tree, "", source, hints)
    assert isinstance(out, dict)
    return out


def new_key(key: str, source: str) -> str:
    """The current name of a dotted key, with a hint where `key` is an old name."""
    new = KEYS.get(key, key)
    if new != key:
        until = "the old name stays accepted" if key in PERMANENT else f"the old name is refused from {REFUSED_IN} on"
        hint(f"{source}: {key} is now named {new}; {until}", key)
    return new


def migrate_value(value: Any, key: str, source: str, hints: bool = True) -> Any:
    """`value` of the setting `key` (a current name), old keys and values inside it replaced."""
    return _migrated(value, key, source, hints)


def _migrated(value: Any, path: str, source: str, hints: bool) -> Any:
    if isinstance(value, Mapping):
        return _migrated_section(value, path, source, hints)
    if isinstance(value, list):
        return [_migrated(item, path, source, hints) for item in value]
    if isinstance(value, str) and path in VALUES:
        kind, colon, name = value.rpartition(":")
        if (new := VALUES[path].get(name)) is not None:
            if hints:
                text = f"{source}: {path} {value!r} is now {kind + colon + new!r}"
                hint(f"{text}; the old value is refused from {REFUSED_IN} on", f"{path}={value}")
            return kind + colon + new
    return value


def _migrated_section(section: Mapping[Any, Any], path: str, source: str, hints: bool) -> dict[Any, Any]:
    out: dict[Any, Any] = {}
    for key, value in section.items():
        old = f"{path}.{key}" if path else str(key)
        new = KEYS.get(old, old)
        name = key if new == old else new.rpartition(".")[2]
        if new != old and name in section:
            raise ConfigError(f"{source}: {old} is the old name of {new}, and both are set: remove {old}")
        if hints:
            new_key(old, source)
        out[name] = _migrated(value, new, source, hints)
    return out


def hint(text: str, name: str) -> None:
    """Print a line on stderr, once in a process for each `name`."""
    if name not in _hinted:
        _hinted.add(name)
        print(f"jaxtrain: {text}", file=sys.stderr)
