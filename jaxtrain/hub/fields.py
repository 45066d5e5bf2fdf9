"""How config.json and model settings correspond: one field a correspondence, read and written by the same row."""

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
SLIDES = {"full_attention": False, "sliding_attention": True}


@dataclass(frozen=True)
class Field:
    """`keys` of config.json that this field accounts for, and the two directions."""

    keys: tuple[str, ...]
    read: Callable[[Json], Settings]
    write: Callable[[ModelConfig], Json]


def same(key: str | tuple[str, ...], settings: str | tuple[str, ...], default: Any = REQUIRED) -> Field:
    """One value under two names; the first key and the first setting are those written and read back."""
    keys = (key,) if isinstance(key, str) else key
    ours = (settings,) if isinstance(settings, str) else settings

    def read(hub: Json) -> Settings:
        return dict.fromkeys(ours, _of(hub, keys, default))

    return Field(keys, read, lambda model: {keys[0]: setting(model, ours[0])})


def says(key: str, value: Any) -> Field:
    """The hub has to say `value` there, or nothing."""

    def read(hub: Json) -> Settings:
        if hub.get(key, value) != value:
            raise ConfigError(f"config.json: {key} is {hub[key]!r}, only {value!r} can be read")
        return {}

    return Field((key,), read, lambda model: {key: value})


def given(**settings: Any) -> Field:
    """Settings that every model of the family has."""
    return Field((), lambda hub: dict(settings), lambda model: {})


def choice(key: str, name: str, values: Mapping[Any, Any], default: Any = REQUIRED) -> Field:
    """One of several values, called otherwise by the hub; the first of two hub values for one of ours is written."""

    def read(hub: Json) -> Settings:
        value = _of(hub, (key,), default)
        if value not in values:
            raise ConfigError(f"config.json: {key} is {value!r}, only {', '.join(map(repr, values))} can be read")
        return {name: values[value]}

    def write(model: ModelConfig) -> Json:
        value = setting(model, name)
        for theirs, ours in values.items():
            if ours == value:
                return {key: theirs}
        raise ConfigError(f"model.{name} {value!r} is none of {', '.join(map(repr, dict.fromkeys(values.values())))}")

    return Field((key,), read, write)


def rope(theta: float) -> Field:
    """Rotary positions in both of transformers' spellings; `theta` is the family's where config.json says none."""

    def read(hub: Json) -> Settings:
        said = (hub.get("rope_scaling") or {}) | (hub.get("rope_parameters") or {})
        kind = said.get("rope_type", said.get("type", "default"))
        base: float = said["rope_theta"] if "rope_theta" in said else hub.get("rope_theta", theta)
        if kind not in SCALINGS:
            raise ConfigError(f"config.json: rope_type is {kind!r}, only {', '.join(SCALINGS)} can be read")
        unknown = said.keys() - {"rope_type", "type", "rope_theta"} - SCALINGS[kind].keys() - EXTRA_ROPE[kind]
        if unknown or said.get("partial_rotary_factor", 1) != 1:
            names = ", ".join(sorted(unknown or {"partial_rotary_factor"}))
            raise ConfigError(f"config.json: rope parameters of {kind} have {names}: a model with them cannot be read")
        rounded = said.get("truncate", True)
        out = {"rope.theta": base, "rope.scaling": next(ours for ours, at in KINDS.items() if at == (kind, rounded))}
        out |= {f"rope.{ours}": said[key] for key, ours in SCALINGS[kind].items() if said.get(key) is not None}
        mscale, over_all = said.get("mscale"), said.get("mscale_all_dim")
        if kind == "yarn" and said.get("attention_factor") is None and mscale and over_all:
            factor = said["factor"]
            out["rope.attention_factor"] = yarn_growth(factor, mscale) / yarn_growth(factor, over_all)
        return out

    def write(model: ModelConfig) -> Json:
        kind, rounded = KINDS[model.rope.scaling]
        values = {key: getattr(model.rope, ours) for key, ours in SCALINGS[kind].items()}
        if kind == "yarn":
            values["truncate"] = rounded
        return {"rope_theta": model.rope.theta, "rope_scaling": {"rope_type": kind, **values} if values else None}

    return Field(("rope_theta", "rope_scaling", "rope_parameters"), read, write)


# model.rope.scaling -> the hub's rope_type, and whether YaRN's ramp is rounded to whole pairs.
KINDS = {"none": ("default", True), "linear": ("linear", True), "llama3": ("llama3", True), "yarn": ("yarn", True),
         "yarn_unrounded": ("yarn", False)}  # fmt: skip
SCALINGS: dict[str, dict[str, str]] = {
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
EXTRA_ROPE = {kind: {"partial_rotary_factor"} for kind in SCALINGS} | {
    "yarn": {"partial_rotary_factor", "truncate", "mscale", "mscale_all_dim"}
}


def yarn_growth(factor: float, mscale: float = 1.0) -> float:
    """How much attention is sharpened when context is stretched by `factor` (YaRN, Peng et al. 2023, section 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def one_window() -> Field:
    """One sliding window for all layers, or none (Mistral)."""
    return Field(
        ("sliding_window",),
        lambda hub: {"windows": [hub.get("sliding_window")]},
        lambda model: {"sliding_window": model.windows[0]},
    )


def layer_windows(switch: bool) -> Field:
    """A window for some layers, named by layer_types; `switch`: only where use_sliding_window says so (Qwen)."""

    def read(hub: Json) -> Settings:
        window, layers = hub.get("sliding_window"), hub["num_hidden_layers"]
        if (switch and not hub.get("use_sliding_window", False)) or window is None:
            return {"windows": [None]}
        # Without layer_types Qwen's first max_window_layers see everything, gpt-oss alternates from a window on.
        after = hub.get("max_window_layers", 28)
        narrow = [i >= after if switch else i % 2 == 0 for i in range(layers)]
        types = hub.get("layer_types") or ["sliding_attention" if yes else "full_attention" for yes in narrow]
        for kind in types:
            if kind not in SLIDES:
                raise ConfigError(f"config.json: layer_types has {kind!r}, only {', '.join(SLIDES)} can be read")
        return {"windows": shortest_period([window if SLIDES[kind] else None for kind in types])}

    def write(model: ModelConfig) -> Json:
        windows = windows_of(model)
        size = next((window for window in windows if window), None)
        types = ["sliding_attention" if window else "full_attention" for window in windows]
        used = {"use_sliding_window": size is not None, "max_window_layers": len(windows)} if switch else {}
        return {"sliding_window": size, "layer_types": types, **used}

    keys = ("sliding_window", "layer_types", *(("use_sliding_window", "max_window_layers") if switch else ()))
    return Field(keys, read, write)


def windows_of(model: ModelConfig) -> list[int | None]:
    """The window of every layer."""
    return [model.windows[i % len(model.windows)] for i in range(model.n_layers)]


def shortest_period(values: list[Any]) -> list[Any]:
    """The shortest head of a list that, repeated, gives the list."""
    lengths = range(1, len(values) + 1)
    return next(values[:n] for n in lengths if all(v == values[i % n] for i, v in enumerate(values)))


def setting(model: ModelConfig, name: str) -> Any:
    """A dotted setting of a model, defaults that follow from other settings filled in."""
    resolved = {"n_kv_heads": model.kv_heads, "head_dim": model.width_of_head}
    if name in resolved:
        return resolved[name]
    value: Any = model
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _of(hub: Json, keys: tuple[str, ...], default: Any) -> Any:
    for key in keys:
        if key in hub:
            return hub[key]
    if default is REQUIRED:
        raise ConfigError(f"config.json has no {keys[0]}: it is needed to know the model")
    return default
