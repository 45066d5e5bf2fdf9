"""How config.json maps to model settings: each field reads and writes one correspondence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxtrain.config import ConfigError, ModelConfig

Json = dict[str, Any]
Settings = dict[str, Any]
"""Dotted model setting -> value."""

REQUIRED: Any = object()
LAYER_TYPES = {"full_attention": False, "sliding_attention": True}


@dataclass(frozen=True)
class Field:
    """The `keys` of config.json that this field handles, and the conversion in both directions."""

    keys: tuple[str, ...]
    read: Callable[[Json], Settings]
    write: Callable[[ModelConfig], Json]


def equal(key: str | tuple[str, ...], settings: str | tuple[str, ...], default: Any = REQUIRED) -> Field:
    """A hub key and a setting of equal value. Of several keys or settings the first is the one written or read back."""
    keys = (key,) if isinstance(key, str) else key
    names = (settings,) if isinstance(settings, str) else settings

    def read(hub: Json) -> Settings:
        return dict.fromkeys(names, _value(hub, keys, default))

    return Field(keys, read, lambda model: {keys[0]: model_setting(model, names[0])})


def fixed(key: str, value: Any, *synonyms: Any) -> Field:
    """A hub key that must be absent or have this value, or one that means the same."""

    def read(hub: Json) -> Settings:
        if hub.get(key, value) not in (value, *synonyms):
            raise ConfigError(f"config.json: {key} is {hub[key]!r}, only {value!r} is supported")
        return {}

    return Field((key,), read, lambda model: {key: value})


def implied(**settings: Any) -> Field:
    """Settings that are the same for every model of the family."""
    return Field((), lambda hub: dict(settings), lambda model: {})


def one_of(key: str, name: str, values: Mapping[Any, Any], default: Any = REQUIRED) -> Field:
    """A setting whose values have other names in the hub: `values` is {hub value: setting}; writes the first match."""

    def read(hub: Json) -> Settings:
        value = _value(hub, (key,), default)
        if value not in [*values]:
            raise ConfigError(f"config.json: {key} is {value!r}, only {', '.join(map(repr, values))} are supported")
        return {name: values[value]}

    def write(model: ModelConfig) -> Json:
        value = model_setting(model, name)
        for hub_value, converted in values.items():
            if converted == value:
                return {key: hub_value}
        raise ConfigError(f"model.{name} {value!r} is none of {', '.join(map(repr, dict.fromkeys(values.values())))}")

    return Field((key,), read, write)


def rope(theta: float, complete: bool = False) -> Field:
    """RoPE settings in both formats of transformers; `theta` is the family's default.

    complete: refuse files without rope parameters or YaRN's original length, whose defaults depend on the version of
    transformers. Raises ConfigError for kinds and parameters that are not supported, and missing ones that
    transformers requires.
    """

    def read(hub: Json) -> Settings:
        found = rope_parameters(hub)
        kind: Any = found.get("rope_type", found.get("type", "default"))
        if complete and not found.keys() - {"rope_theta"}:
            raise ConfigError("config.json has neither rope_parameters nor rope_scaling, which this family needs")
        _check_rope(kind, found, hub)
        rounded = bool(found.get("truncate", True))
        out = {
            "rope.theta": found.get("rope_theta", hub.get("rope_theta", theta)),
            "rope.scaling": next(name for name, hub_type in ROPE_TYPES.items() if hub_type == (kind, rounded)),
        }
        original = "original_max_position_embeddings"
        if original in ROPE_KEYS[kind]:
            if complete and original not in found:
                raise ConfigError(f"config.json: rope parameters of {kind} have no {original}, which is required")
            lengths = [values[original] for values in (hub, found) if values.get(original) is not None]
            out["rope.original_seq_len"] = lengths[0] if lengths else hub.get("max_position_embeddings")
        # Like transformers, 0 is the default for every parameter but the attention factor.
        names = {key: name for key, name in ROPE_KEYS[kind].items() if key != original}
        out |= {f"rope.{name}": found[key] for key, name in names.items() if found.get(key)}
        mscale, mscale_all_dim = found.get("mscale"), found.get("mscale_all_dim")
        if kind == "yarn" and found.get("attention_factor") is None and mscale and mscale_all_dim:
            factor = found["factor"]
            out["rope.attention_factor"] = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
        return out

    def write(model: ModelConfig) -> Json:
        kind, rounded = ROPE_TYPES[model.rope.scaling]
        values = {key: getattr(model.rope, name) for key, name in ROPE_KEYS[kind].items()}
        if kind == "yarn":
            values["truncate"] = rounded
        scaling = {"rope_type": kind, **values} if values or complete else None
        return {"rope_theta": model.rope.theta, "rope_scaling": scaling}

    keys = (
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "original_max_position_embeddings",
    )
    return Field(keys, read, write)


def rope_parameters(hub: Json) -> Json:
    """The rope parameters of a config.json, wherever its version of transformers writes them.

    Raises ConfigError where two places disagree, or layers have parameters of their own.
    """
    places = [hub[name] for name in ("rope_scaling", "rope_parameters") if hub.get(name)]
    for found in places:
        if not isinstance(found, dict):
            raise ConfigError(f"config.json: rope parameters are {found!r}, not an object")
        if found != places[0]:
            raise ConfigError(f"config.json: rope_scaling {places[0]} and rope_parameters {found} differ: remove one")
    found = places[0] if places else {}
    nested = {name: value for name, value in found.items() if isinstance(value, dict)}
    if nested:
        first, *others = nested.values()
        if len(nested) != len(found) or any(other != first for other in others):
            raise ConfigError(f"config.json: rope_parameters differ by layer ({', '.join(found)}): not supported")
        found = first
    base = hub.get("rope_theta", found.get("rope_theta"))
    if found.get("rope_theta", base) != base:
        raise ConfigError(
            f"config.json: rope_theta is {base!r} and, in the rope parameters, {found['rope_theta']!r}: remove one"
        )
    return dict(found)


def _check_rope(kind: Any, found: Json, hub: Json) -> None:
    if kind not in [*ROPE_KEYS]:
        hint = ROPE_HINTS.get(str(kind), "")
        raise ConfigError(f"config.json: rope_type is {kind!r}, only {', '.join(ROPE_KEYS)} are supported{hint}")
    known = {"rope_type", "type", "rope_theta", *ROPE_KEYS[kind], *EXTRA_ROPE_KEYS[kind]}
    unknown = {key for key in found.keys() - known if found[key] is not None}
    if any(values.get("partial_rotary_factor") not in (None, 1) for values in (found, hub)):
        unknown.add("partial_rotary_factor")
    if unknown:
        names = ", ".join(sorted(unknown))
        raise ConfigError(f"config.json: rope parameters of {kind} have {names}, which are not supported")
    if missing := [key for key in REQUIRED_ROPE_KEYS[kind] if not found.get(key)]:
        raise ConfigError(f"config.json: rope parameters of {kind} have no {', '.join(missing)}, which are required")
    for key in known - {"rope_type", "type", "truncate"}:
        if not isinstance(found.get(key, 1.0), int | float | None):
            raise ConfigError(f"config.json: {key} of the rope parameters is {found[key]!r}, not a number")
    original = "original_max_position_embeddings"
    both = {values[original] for values in (hub, found) if values.get(original) is not None}
    if original in ROPE_KEYS[kind] and len(both) == 2:
        raise ConfigError(f"config.json: {original} is both {' and '.join(map(str, sorted(both)))}: remove one")


# {model.rope.scaling: (the hub's rope_type, whether YaRN's ramp is rounded to whole pairs)}
ROPE_TYPES = {"none": ("default", True), "linear": ("linear", True), "llama3": ("llama3", True), "yarn": ("yarn", True),
         "yarn_unrounded": ("yarn", False)}  # fmt: skip
ROPE_KEYS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_seq_len",
    },
    "yarn": {
        "factor": "factor", "original_max_position_embeddings": "original_seq_len", "beta_fast": "beta_fast",
        "beta_slow": "beta_slow", "attention_factor": "attention_factor",
    },
}  # fmt: skip
EXTRA_ROPE_KEYS = {kind: {"partial_rotary_factor"} for kind in ROPE_KEYS} | {
    "yarn": {"partial_rotary_factor", "truncate", "mscale", "mscale_all_dim"}
}
REQUIRED_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (), "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}  # fmt: skip
ROPE_HINTS = {
    "dynamic": "; its frequencies depend on the length of each text: up to max_position_embeddings tokens they are "
    "those of the default type, so remove rope_scaling to train on such texts"
}


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's attention factor for a context extended by `factor` (Peng et al. 2023, section 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def one_window(default: int | None) -> Field:
    """One sliding window for all layers, or none (Mistral); `default` is that of a file without the key."""
    return Field(
        ("sliding_window",),
        lambda hub: {"windows": [hub.get("sliding_window", default)]},
        lambda model: {"sliding_window": model.windows[0]},
    )


def layer_windows(switch: bool, default: int) -> Field:
    """A window for the layers that layer_types names; with `switch` only if use_sliding_window is true (Qwen).

    `default` is the window of a file without sliding_window.
    """

    def read(hub: Json) -> Settings:
        window, layers = hub.get("sliding_window", default), hub["num_hidden_layers"]
        if (switch and not hub.get("use_sliding_window", False)) or window is None:
            return {"windows": [None]}
        # Without layer_types, Qwen's first max_window_layers have no window, and gpt-oss alternates, starting with one.
        first = hub.get("max_window_layers", 28)
        windowed = [i >= first if switch else i % 2 == 0 for i in range(layers)]
        types = hub.get("layer_types") or ["sliding_attention" if flag else "full_attention" for flag in windowed]
        if len(types) != layers:
            raise ConfigError(f"config.json: layer_types has {len(types)} entries for num_hidden_layers {layers}")
        for kind in types:
            if kind not in [*LAYER_TYPES]:
                raise ConfigError(f"config.json: layer_types has {kind!r}, only {', '.join(LAYER_TYPES)} are supported")
        return {"windows": shortest_period([window if LAYER_TYPES[kind] else None for kind in types])}

    def write(model: ModelConfig) -> Json:
        windows = windows_of(model)
        size = next((window for window in windows if window), None)
        types = ["sliding_attention" if window else "full_attention" for window in windows]
        switches = {"use_sliding_window": size is not None, "max_window_layers": len(windows)} if switch else {}
        return {"sliding_window": size, "layer_types": types, **switches}

    keys = ("sliding_window", "layer_types", *(("use_sliding_window", "max_window_layers") if switch else ()))
    return Field(keys, read, write)


def windows_of(model: ModelConfig) -> list[int | None]:
    """The window of every layer."""
    return [model.windows[i % len(model.windows)] for i in range(model.n_layers)]


def shortest_period(values: list[Any]) -> list[Any]:
    """The shortest prefix that, repeated, gives the list."""
    lengths = range(1, len(values) + 1)
    return next(values[:n] for n in lengths if all(v == values[i % n] for i, v in enumerate(values)))


def model_setting(model: ModelConfig, name: str) -> Any:
    """A dotted model setting, with defaults that follow from other settings resolved."""
    resolved = {"n_kv_heads": model.kv_heads, "head_dim": model.width_of_head}
    if name in resolved:
        return resolved[name]
    value: Any = model
    for part in name.split("."):
        value = getattr(value, part)
    return value


def required(hub: Json, key: str) -> Any:
    """A key's value; raises ConfigError if there is none."""
    return _value(hub, (key,), REQUIRED)


def _value(hub: Json, keys: tuple[str, ...], default: Any) -> Any:
    for key in keys:
        if key in hub:
            return hub[key]
    if default is REQUIRED:
        raise ConfigError(f"config.json has no {keys[0]}, which is required")
    return default
