"""Logical dimension names -> mesh axes: presets, single entries, strict resolution, activation constraints.

Parallelism is a table: which mesh axes shard a dimension of which name. `spec_for` reads the table for a parameter,
`constrain` for an activation. Nothing is dropped silently: what cannot be done is a finding, and a finding is an error
unless `rules.allow` accepts it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxtrain.config import Axis, ConfigError, RulesConfig, nearest
from jaxtrain.mesh.param import DEPTHS, Param

Table = Mapping[str, tuple[Axis, ...]]

BASE: Table = {
    "batch": ("data", "expert"),
    "seq_len": ("seq",),
    "residual_seq": ("seq",),
    "layers": ("pipe",),
    "experts": ("expert",),
    # Embedding and head belong to no stage: idle stages share their work.
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
"""The name of a dim that no rule can shard."""
UNRULED = (WHOLE, DEPTHS)
"""Names that are no entry of the table."""
ACTIVATION_ONLY = {"batch", "seq_len", "residual_seq", "hidden"}
# The activations that a decoder constrains: their names must not claim one axis twice either.
ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "residual": ("batch", "residual_seq", "hidden"),
    "half-block input": ("batch", "seq_len", "hidden"),
    "queries": ("batch", "seq_len", "heads", "head_dim"),
    "keys": ("batch", "seq_len", "kv_heads", "head_dim"),
    "feed-forward": ("batch", "seq_len", "mlp"),
    "logits": ("batch", "seq_len", "vocab"),
}
# Findings that can be accepted; an unknown name and an impossible activation cannot.
NO_RULE = "no rule"
KINDS = ("indivisible", "twice", "unmatched", "replicated", "state")


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
class Reason:
    """Why a dimension is sharded as it is: `axes` shard it, `asked` is what the rule says, idle axes included."""

    name: str
    axes: tuple[Axis, ...]
    asked: tuple[Axis, ...]
    origin: str
    losers: tuple[tuple[str, tuple[Axis, ...]], ...]
    note: str = ""


@dataclass(frozen=True)
class Resolved:
    """A parameter's spec, one entry a dimension, with a reason for each and what went wrong."""

    spec: PartitionSpec
    reasons: tuple[Reason, ...]
    findings: tuple[Finding, ...]


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
        """One line: what a name resolves to, which rule set it, which lost."""
        entry = self.entry(name)
        lost = "".join(f"; overrules {origin} ({show_axes(axes)})" for origin, axes in reversed(entry.losers))
        return f"{name} -> {show_axes(entry.axes)} by {entry.origin}{lost}"

    def allows(self, finding: Finding) -> bool:
        """Whether `rules.allow` accepts a finding."""
        entries = [f"{finding.kind}:{subject}" for subject in (finding.subject, *finding.also)]
        return any(fnmatchcase(entry, pattern) for entry in entries for pattern in self.allow)


def resolve_rules(config: RulesConfig) -> Rules:
    """Base table, presets in order, then the entries set in `rules`; raises ConfigError for an unknown preset."""
    layers: list[tuple[str, Table]] = [("base", BASE)]
    for preset in config.preset:
        if preset not in PRESETS:
            raise ConfigError(
                f"rules.preset {preset!r} is unknown{nearest(preset, PRESETS)}; presets: {', '.join(PRESETS)}"
            )
        layers.append((f"preset {preset}", PRESETS[preset]))
    explicit = [name for name in (*NAMES, *EXTRAS) if name in config.model_fields_set]
    layers += [(f"rules.{name}", {name: _as_tuple(getattr(config, name))}) for name in explicit]
    entries: dict[str, Entry] = {}
    for origin, table in layers:
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


def spec_for(param: Param, rules: Rules, sizes: Mapping[Axis, int], name: str = "parameter") -> Resolved:
    """Spec of one parameter; axes of size 1 are left out.

    kv_heads that the axes do not divide are replicated and noted, and so is mlp inside experts spread over its axes;
    any other misfit is a finding and the dimension is left whole.
    """
    reasons: list[Reason] = []
    findings: list[Finding] = []
    used: dict[Axis, str] = {}
    effective = [[a for a in rules.axes(n) if sizes[a] > 1] if n in NAMES else [] for n in param.names]
    asked = "(" + ", ".join("+".join(axes) or "-" for axes in effective) + ")"
    for dim, (size, logical) in enumerate(zip(param.shape, param.names, strict=True)):
        if logical not in NAMES and logical not in UNRULED:
            text = f"{name} {param.shape}: dimension {dim} has the unknown logical name {logical!r}"
            mend = f"{nearest(logical, NAMES)}; names: {', '.join(NAMES)}"
            findings.append(Finding("unknown", name, text + mend))
            reasons.append(Reason(logical, (), (), NO_RULE, (), "unknown name"))
            continue
        entry = rules.entry(logical)
        axes = tuple(axis for axis in entry.axes if sizes[axis] > 1)
        extent, note = math.prod(sizes[axis] for axis in axes), ""
        where = (
            f"{name} {param.shape}, spec {asked}: dimension {dim} ({logical}, {size}) cannot be sharded over "
            f"{show_axes(axes)}"
        )
        twice = [axis for axis in axes if axis in used]
        if twice and logical == "mlp" and all(used[axis] == "experts" for axis in twice):
            note = f"whole over {show_axes(twice)}: experts are spread over it"
            axes = tuple(axis for axis in axes if axis not in used)
        elif twice:
            others = ", ".join(f"{used[axis]} already uses {axis}" for axis in twice)
            mend = f"set rules.{logical} or rules.{used[twice[0]]} to null or to another axis"
            findings.append(Finding("twice", name, f"{where} by {entry.origin}: {others} in the same spec; {mend}"))
            axes, note = (), "left whole: " + others
        elif size % extent and logical == "kv_heads":
            note = f"replicated: {size} kv heads on {show_axes(axes)} of size {extent}"
            axes = ()
        elif size % extent:
            mend = f"choose a size of {show_axes(axes)} that divides {size}, or set rules.{logical} to null"
            text = f"{where} by {entry.origin}: {extent} does not divide; {mend}"
            # By name: the activations of that name do not divide either.
            findings.append(Finding("indivisible", logical, text, also=(name,)))
            axes, note = (), f"left whole: {extent} does not divide {size}"
        used |= dict.fromkeys(axes, logical)
        reasons.append(Reason(logical, axes, entry.axes, entry.origin, entry.losers, note))
    return Resolved(make_spec(reason.axes for reason in reasons), tuple(reasons), tuple(findings))


def raise_findings(findings: Sequence[Finding], rules: Rules) -> tuple[str, ...]:
    """Raise all findings that `rules.allow` does not accept as one ConfigError; notes of those it does."""
    refused = [finding for finding in findings if not rules.allows(finding)]
    if refused:
        accept = {f.entry: f" (or accept it: rules.allow: ['{f.entry}'])" for f in refused if f.kind in KINDS}
        raise ConfigError("\n".join(finding.text + accept.get(finding.entry, "") for finding in refused))
    return tuple(f"allowed {finding.entry}: {finding.text}" for finding in findings)


def activation_findings(rules: Rules, sizes: Mapping[Axis, int]) -> list[Finding]:
    """Activations whose names would claim one mesh axis twice."""
    findings = []
    for activation, names in ACTIVATIONS.items():
        used: dict[Axis, str] = {}
        for name in names:
            for axis in rules.axes(name):
                if sizes[axis] > 1 and axis in used:
                    text = f"activation {activation} {names}: {used[axis]} and {name} both use {axis}"
                    mend = f"set rules.{name} or rules.{used[axis]} to null or to another axis"
                    findings.append(Finding("activation", activation, f"{text}; {mend}"))
                used[axis] = name
    return findings


@dataclass(frozen=True)
class _Context:
    rules: Rules
    mesh: Mesh | AbstractMesh
    without: frozenset[str]
    replicated: tuple[Axis, ...] = ()


_CONTEXT: ContextVar[_Context | None] = ContextVar("jaxtrain_rules", default=None)


@contextmanager
def use_rules(rules: Rules, mesh: Mesh | AbstractMesh, without: Iterable[str] = ()) -> Iterator[None]:
    """Let `constrain` act on `mesh` while tracing; axes in `without` belong to an enclosing vmap and are left out."""
    token = _CONTEXT.set(_Context(rules, mesh, frozenset(without)))
    try:
        yield
    finally:
        _CONTEXT.reset(token)


@contextmanager
def replicated_over(*axes: Axis) -> Iterator[None]:
    """Say that the devices along `axes` hold and compute the same: `manual` sums no gradients over them."""
    context = _CONTEXT.get()
    if context is None:
        raise AssertionError("alike_along: no mesh here")
    token = _CONTEXT.set(replace(context, replicated=tuple(axis for axis in axes if context.mesh.shape[axis] > 1)))
    try:
        yield
    finally:
        _CONTEXT.reset(token)


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Pin an activation's sharding by one logical name (None: whole) a dimension; the identity outside `use_rules`.

    kv_heads that do not divide stay whole, as does a name under rules.allow `indivisible:NAME`; raises ConfigError for
    another dimension that does not divide, an axis used twice, an unknown name.
    """
    context = _CONTEXT.get()
    if context is None:
        return x
    if len(names) != x.ndim:
        raise AssertionError(f"constrain: {len(names)} names {names} for shape {x.shape}")
    sizes, dims = context.mesh.shape, []
    for dim, (size, name) in enumerate(zip(x.shape, names, strict=True)):
        wanted = context.rules.axes(name) if name else ()
        axes = tuple(axis for axis in wanted if sizes[axis] > 1 and axis not in context.without)
        extent = math.prod(sizes[axis] for axis in axes)
        if size % extent and name != "kv_heads":
            text = (
                f"activation {names} of shape {x.shape}: dimension {dim} ({name}, {size}) is not divisible by "
                f"{show_axes(axes)} = {extent} ({context.rules.explain(str(name))}): change the size or rules.{name}"
            )
            raise_findings([Finding("indivisible", str(name), text)], context.rules)
        dims.append(axes if size % extent == 0 else ())
    flat = [axis for axes in dims for axis in axes]
    if len(set(flat)) < len(flat):
        raise ConfigError(f"activation {names}: one mesh axis twice in {make_spec(dims)}; change rules of these names")
    return jax.lax.with_sharding_constraint(x, NamedSharding(context.mesh, make_spec(dims)))


def active_axes(name: str) -> tuple[Axis, ...]:
    """Mesh axes of more than one device that shard activations named `name` here; () outside `use_rules`.

    Axes that belong to an enclosing vmap are left out.
    """
    context = _CONTEXT.get()
    if context is None:
        return ()
    sizes = context.mesh.shape
    return tuple(axis for axis in context.rules.axes(name) if sizes[axis] > 1 and axis not in context.without)


def dividing_axes(name: str, size: int) -> tuple[Axis, ...]:
    """`active_axes` of a dim of this size: none where they do not divide it, as `constrain` leaves it whole."""
    axes, mesh = active_axes(name), active_mesh()
    return axes if mesh is not None and size % math.prod(mesh.shape[axis] for axis in axes) == 0 else ()


def active_mesh() -> Mesh | AbstractMesh | None:
    """The mesh on which `constrain` acts here, None outside `use_rules`."""
    context = _CONTEXT.get()
    return None if context is None else context.mesh


def shard_mapped(function: Callable[..., Any], inputs: Any, outputs: Any) -> Callable[..., Any]:
    """`function` of each device's shards, in a shard_map that is manual over the whole mesh of `use_rules`.

    `inputs` (a tuple, one entry an argument) and `outputs` are trees of PartitionSpec. Axes of an enclosing vmap, whose
    spmd_axis_name adds them, and those of `alike_along` are no part of them. Differentiate through the result, not
    inside of `function`.
    """
    context = _CONTEXT.get()
    if context is None:
        raise AssertionError("manual: no mesh here")
    run = jax.shard_map(function, mesh=context.mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
    if not context.replicated:
        return run
    # A shard_map sums the gradient of what it does not cut over an axis over it: a dim of copies is cut, and is free.
    each = jax.vmap(run, spmd_axis_name=context.replicated)

    def replicated(*args: Any) -> Any:
        return _map_specs(partial(_one, context), outputs, each(*_map_specs(partial(_each, context), inputs, args)))

    return replicated


def _map_specs(function: Callable[[PartitionSpec, Any], Any], specs: Any, tree: Any) -> Any:
    """`function` of each spec and the arrays of `tree` under it."""

    def below(spec: PartitionSpec, part: Any) -> Any:
        return jax.tree.map(partial(function, spec), part)

    return jax.tree.map(below, specs, tree, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _each(context: _Context, spec: PartitionSpec, x: jax.Array) -> jax.Array:
    """Copies of x along a new first dim that is cut over axes whose devices are alike: each holds its own already."""
    copies = math.prod(context.mesh.shape[axis] for axis in context.replicated)
    placed = NamedSharding(context.mesh, PartitionSpec(context.replicated, *spec))
    return jax.lax.with_sharding_constraint(jnp.broadcast_to(x, (copies, *x.shape)), placed)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _one(context: _Context, spec: PartitionSpec, x: jax.Array) -> jax.Array:
    """The inverse of `_each`."""
    cut = PartitionSpec(context.replicated, *spec)
    return jax.shard_map(lambda x: x[0], mesh=context.mesh, in_specs=cut, out_specs=spec, check_vma=False)(x)


def _kept(function: Callable[..., jax.Array], context: _Context, spec: PartitionSpec, x: jax.Array) -> Any:
    return function(context, spec, x), None


def _back(
    function: Callable[..., jax.Array], context: _Context, spec: PartitionSpec, _: None, cotangent: jax.Array
) -> Any:
    return (function(context, spec, cotangent),)


_each.defvjp(partial(_kept, _each), partial(_back, _one))
_one.defvjp(partial(_kept, _one), partial(_back, _each))


def make_spec(dims: Iterable[tuple[Axis, ...]]) -> PartitionSpec:
    """PartitionSpec with one entry a dimension: None, an axis, or a tuple of axes."""
    return PartitionSpec(*(None if not axes else axes[0] if len(axes) == 1 else axes for axes in dims))


def spec_axes(spec: PartitionSpec, ndim: int) -> list[tuple[Axis, ...]]:
    """The inverse of `make_spec`: a tuple of axes for each of `ndim` dimensions."""
    dims = [() if d is None else (d,) if isinstance(d, str) else tuple(d) for d in spec]
    return dims + [()] * (ndim - len(dims))


def show_axes(axes: Iterable[str]) -> str:
    """'data x tensor', or 'null'."""
    return " x ".join(axes) or "null"


def _as_tuple(axes: Axis | list[Axis] | None) -> tuple[Axis, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
