"""Strict resolution: the PartitionSpec of a parameter from the rule table, with a reason for each dimension."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from jaxtrain.config import Axis, nearest
from jaxtrain.mesh.param import Param, make_spec, show_axes
from jaxtrain.mesh.rules import CONSTRAINED_ACTIVATIONS, FALLBACKS, NAMES, NO_RULE, STRICT, UNRULED, Finding, Rules


@dataclass(frozen=True)
class Reason:
    """Why a dimension is sharded as it is: `axes` shard it, `asked` are the axes of its rule, size 1 included."""

    name: str
    axes: tuple[Axis, ...]
    asked: tuple[Axis, ...]
    origin: str
    losers: tuple[tuple[str, tuple[Axis, ...]], ...]
    note: str = ""


@dataclass(frozen=True)
class ResolvedSpec:
    """A parameter's spec, one entry a dimension, with a reason for each and the findings."""

    spec: PartitionSpec
    reasons: tuple[Reason, ...]
    findings: tuple[Finding, ...]


def spec_for(param: Param, rules: Rules, sizes: Mapping[Axis, int], name: str = "parameter") -> ResolvedSpec:
    """Spec of one parameter; axes of size 1 are left out.

    A dimension that its rule's axes do not divide, or whose axis is used already, follows the fallback of its name
    (rules.FALLBACKS) with a note; without one it is a finding and the dimension stays unsharded.
    """
    reasons: list[Reason] = []
    findings: list[Finding] = []
    used: dict[Axis, str] = {}
    effective = [[a for a in rules.axes(n) if sizes[a] > 1] if n in NAMES else [] for n in param.names]
    asked = "(" + ", ".join("+".join(axes) or "-" for axes in effective) + ")"
    for dim, (size, logical) in enumerate(zip(param.shape, param.names, strict=True)):
        if logical not in NAMES and logical not in UNRULED:
            text = f"{name} {param.shape}: dimension {dim} has the unknown logical name {logical!r}"
            fix = f"{nearest(logical, NAMES)}; names: {', '.join(NAMES)}"
            findings.append(Finding("unknown", name, text + fix))
            reasons.append(Reason(logical, (), (), NO_RULE, (), "unknown name"))
            continue
        entry = rules.entry(logical)
        wanted = tuple(axis for axis in entry.axes if sizes[axis] > 1)
        where = (
            f"{name} {param.shape}, spec {asked}: dimension {dim} ({logical}, {size}) cannot be sharded over "
            f"{show_axes(wanted)} by {entry.origin}"
        )
        axes, note, finding = _shard(logical, size, wanted, used, sizes, name, where)
        findings += [finding] if finding else []
        used |= dict.fromkeys(axes, logical)
        reasons.append(Reason(logical, axes, entry.axes, entry.origin, entry.losers, note))
    return ResolvedSpec(make_spec(reason.axes for reason in reasons), tuple(reasons), tuple(findings))


def _shard(
    logical: str, size: int, axes: tuple[Axis, ...], used: Mapping[Axis, str], sizes: Mapping[Axis, int], name: str,
    where: str,
) -> tuple[tuple[Axis, ...], str, Finding | None]:  # fmt: skip
    """(axes that shard a dimension, a note, a finding) where `used` axes shard earlier dimensions of these names."""
    fallback, extent = FALLBACKS.get(logical, STRICT), math.prod(sizes[axis] for axis in axes)
    twice = [axis for axis in axes if axis in used]
    if twice and all(used[axis] == fallback.yields_to for axis in twice):
        note = f"whole over {show_axes(twice)}: {fallback.yields_to} are spread over it"
        return tuple(axis for axis in axes if axis not in used), note, None
    if twice:
        others = ", ".join(f"{used[axis]} already uses {axis}" for axis in twice)
        fix = f"set rules.{logical} or rules.{used[twice[0]]} to null or to another axis"
        return (), "left whole: " + others, Finding("twice", name, f"{where}: {others} in the same spec; {fix}")
    if size % extent and fallback.replicate_indivisible:
        return (), f"replicated: {size} {logical.replace('_', ' ')} on {show_axes(axes)} of size {extent}", None
    if size % extent:
        fix = f"choose a size of {show_axes(axes)} that divides {size}, or set rules.{logical} to null"
        # The subject is the logical name: activations of that name do not divide either.
        finding = Finding("indivisible", logical, f"{where}: {extent} does not divide; {fix}", also=(name,))
        return (), f"left whole: {extent} does not divide {size}", finding
    return axes, "", None


def activation_findings(rules: Rules, sizes: Mapping[Axis, int]) -> list[Finding]:
    """Activations whose names would use one mesh axis twice."""
    findings = []
    for activation, names in CONSTRAINED_ACTIVATIONS.items():
        used: dict[Axis, str] = {}
        for name in names:
            for axis in rules.axes(name):
                if sizes[axis] > 1 and axis in used:
                    text = f"activation {activation} {names}: {used[axis]} and {name} both use {axis}"
                    fix = f"set rules.{name} or rules.{used[axis]} to null or to another axis"
                    findings.append(Finding("activation", activation, f"{text}; {fix}"))
                used[axis] = name
    return findings
