"""The sharding rules as a table: logical dimension name -> mesh axes, from presets and single entries.

A parameter or activation names its dimensions; the table says over which mesh axes a dimension of a name is sharded.
`mesh/resolution.py` reads the table for parameters, `mesh/constraints.py` for activations. Nothing is dropped
silently: a request that cannot be met is a `Finding`, and a finding is an error unless `rules.allow` accepts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from jaxtrain.config import Axis, ConfigError, RulesConfig, nearest
from jaxtrain.mesh.param import DEPTHS, show_axes

Table = Mapping[str, tuple[Axis, ...]]

BASE: Table = {
    "batch": ("data", "expert"),
    "seq_len": ("seq",),
    "residual_seq": ("seq",),
    "layers": ("pipe",),
    "experts": ("expert",),
    # Embedding and head belong to no stage: all stages share their work.
    "vocab": ("pipe",),
}
_TENSOR: Table = {"heads": ("tensor",), "kv_heads": ("tensor",), "mlp": ("tensor",), "vocab": ("tensor", "pipe")}
_FSDP: Table = {"embed": ("data",), "norm": ("data",)}
PRESETS: dict[str, Table] = {
    "ddp": {},
    "zero1": {"optimizer": ("data",)},
    "zero2": {"optimizer": ("data",), "gradients": ("data",)},
    "zero3": _FSDP,
    "fsdp": _FSDP,
    "hybrid_fsdp": {"batch": ("data", "expert", "tensor"), "embed": ("tensor",), "norm": ("tensor",)},
    "tensor": _TENSOR,
    "tensor_sequence": {**_TENSOR, "residual_seq": ("seq", "tensor")},
}

_OPTIONS = {"preset", "replicated_limit", "allow"}
EXTRAS = ("optimizer", "gradients")
NAMES: tuple[str, ...] = tuple(name for name in RulesConfig.model_fields if name not in {*_OPTIONS, *EXTRAS})
WHOLE = "whole"
"""Name of a dimension that no rule can shard."""
UNRULED = (WHOLE, DEPTHS)
"""Names without an entry in the table."""
ACTIVATION_ONLY = {"batch", "seq_len", "residual_seq", "hidden"}
# Activations that the decoder constrains: their names must not use one axis twice either.
CONSTRAINED_ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "residual": ("batch", "residual_seq", "hidden"),
    "half-block input": ("batch", "seq_len", "hidden"),
    "queries": ("batch", "seq_len", "heads", "head_dim"),
    "keys": ("batch", "seq_len", "kv_heads", "head_dim"),
    "feed-forward": ("batch", "seq_len", "mlp"),
    "logits": ("batch", "seq_len", "vocab"),
}


@dataclass(frozen=True)
class Fallback:
    """What happens to a dimension of a name, instead of an error, where its rule cannot be met."""

    replicate_indivisible: bool = False
    """Replicate the dimension, with a note, where the axes do not divide it."""
    yields_to: str | None = None
    """Leave axes to an earlier dimension of this name in the same spec, with a note."""


STRICT = Fallback()
FALLBACKS: dict[str, Fallback] = {
    # Grouped-query attention: each shard of the query heads then holds every key/value head.
    "kv_heads": Fallback(replicate_indivisible=True),
    # Experts that are spread over the tensor axis hold their whole width.
    "mlp": Fallback(yields_to="experts"),
}
"""Names that are not strict."""

NO_RULE = "no rule"
KINDS = ("indivisible", "twice", "unmatched", "replicated", "state")
"""Kinds of findings that `rules.allow` can accept; an unknown name and an impossible activation are always errors."""


@dataclass(frozen=True)
class Entry:
    """What one name resolves to, who said so, and who was overruled (lowest first)."""

    axes: tuple[Axis, ...]
    origin: str
    losers: tuple[tuple[str, tuple[Axis, ...]], ...] = ()


@dataclass(frozen=True)
class Finding:
    """Something a rule asked for that cannot be, or that nobody asked for; `kind:subject` is its allow entry.

    `also` are further subjects by which `rules.allow` may accept it.
    """

    kind: str
    subject: str
    text: str
    also: tuple[str, ...] = ()

    @property
    def entry(self) -> str:
        """The `rules.allow` entry that accepts this finding."""
        return f"{self.kind}:{self.subject}"


@dataclass(frozen=True)
class Rules:
    """The resolved table: logical name -> mesh axes with origins."""

    entries: Mapping[str, Entry]
    replicated_limit: int
    allow: tuple[str, ...] = ()

    def axes(self, name: str) -> tuple[Axis, ...]:
        """Mesh axes of a logical name, () where no rule names it; raises ConfigError for an unknown name."""
        return self.entry(name).axes

    def entry(self, name: str) -> Entry:
        """Axes, origin and overruled entries of a logical name; raises ConfigError for an unknown name."""
        if name not in NAMES and name not in EXTRAS and name not in UNRULED:
            raise ConfigError(f"unknown logical name {name!r}{nearest(name, NAMES)}; names: {', '.join(NAMES)}")
        return self.entries.get(name, Entry((), NO_RULE))

    def explain(self, name: str) -> str:
        """One line: the axes of a name, the rule that set them, the rules that were overruled."""
        entry = self.entry(name)
        overruled = "".join(f"; overrules {origin} ({show_axes(axes)})" for origin, axes in reversed(entry.losers))
        return f"{name} -> {show_axes(entry.axes)} by {entry.origin}{overruled}"

    def allows(self, finding: Finding) -> bool:
        """Whether `rules.allow` accepts a finding."""
        entries = [f"{finding.kind}:{subject}" for subject in (finding.subject, *finding.also)]
        return any(fnmatchcase(entry, pattern) for entry in entries for pattern in self.allow)


def resolve_rules(config: RulesConfig) -> Rules:
    """Base table, presets in order, then the entries set in `rules`.

    Raises ConfigError for an unknown preset, an axis that an entry names twice, and a malformed `rules.allow` entry.
    """
    entries: dict[str, Entry] = {}
    for origin, table in _layers(config):
        for name, axes in table.items():
            if len(set(axes)) < len(axes):
                raise ConfigError(f"{origin} is [{', '.join(axes)}]: one axis twice, name each axis once")
            old = entries.get(name)
            losers = (*old.losers, (old.origin, old.axes)) if old else ()
            entries[name] = Entry(axes, origin, losers)
    for pattern in config.allow:
        kind, colon, _ = pattern.partition(":")
        if not colon or kind not in KINDS:
            raise ConfigError(
                f"rules.allow entry {pattern!r} is not of the form 'kind:pattern'{nearest(kind, KINDS)}; "
                f"kinds: {', '.join(KINDS)}"
            )
    return Rules(entries, config.replicated_limit, tuple(config.allow))


def raise_findings(findings: Sequence[Finding], rules: Rules) -> tuple[str, ...]:
    """Raise the findings that `rules.allow` does not accept as one ConfigError; return notes of the accepted ones."""
    refused = [finding for finding in findings if not rules.allows(finding)]
    if refused:
        accept = {f.entry: f" (or accept it: rules.allow: ['{f.entry}'])" for f in refused if f.kind in KINDS}
        raise ConfigError("\n".join(finding.text + accept.get(finding.entry, "") for finding in refused))
    return tuple(f"allowed {finding.entry}: {finding.text}" for finding in findings)


def _layers(config: RulesConfig) -> list[tuple[str, Table]]:
    """(origin, table) in order of precedence, the lowest first."""
    layers: list[tuple[str, Table]] = [("base", BASE)]
    for preset in config.preset:
        if preset not in PRESETS:
            raise ConfigError(
                f"rules.preset {preset!r} is unknown{nearest(preset, PRESETS)}; presets: {', '.join(PRESETS)}"
            )
        layers.append((f"preset {preset}", PRESETS[preset]))
    explicit = [name for name in (*NAMES, *EXTRAS) if name in config.model_fields_set]
    return [*layers, *((f"rules.{name}", {name: _as_tuple(getattr(config, name))}) for name in explicit)]


def _as_tuple(axes: Axis | list[Axis] | None) -> tuple[Axis, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
