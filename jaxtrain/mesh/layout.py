"""ZeRO stages as shardings: specs of weights, master parameters, gradients and optimizer state of every parameter.

ZeRO-1 shards the optimizer's state further than the weights, ZeRO-2 the reduced gradients too, ZeRO-3 (FSDP) the
weights themselves (Rajbhandari et al. 2020). All three add axes to a spec where they divide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxtrain.config import AXES, Axis
from jaxtrain.mesh.param import STACKS, Param, make_spec, show_axes, spec_axes
from jaxtrain.mesh.resolution import ResolvedSpec, activation_findings, spec_for
from jaxtrain.mesh.rules import ACTIVATION_ONLY, EXTRAS, NAMES, WHOLE, Finding, Rules, raise_findings

Tree = Any
# An optimizer's own constants and counters (Newton-Schulz coefficients, one count a layer) are vectors this short at
# most; they are replicated.
CONSTANTS = 1024
PARTS = ("weights", "masters", "gradients", "optimizer")


@dataclass(frozen=True)
class Layout:
    """Trees of PartitionSpec, one a parameter.

    weights: as forward and backward use them; master_params: as the state stores them; gradients: after their
    reduction; optimizer: moments. batch_axes shard the batch; deferred_axes are those of them that shard no weight, so
    gradients are reduced over them once a step. sequence_axes shard sequences. Axes of size 1 appear nowhere.
    """

    weights: Tree
    master_params: Tree
    gradients: Tree
    optimizer: Tree
    batch_axes: tuple[Axis, ...]
    deferred_axes: tuple[Axis, ...]
    sequence_axes: tuple[Axis, ...]
    resolved: Mapping[str, ResolvedSpec]
    notes: tuple[str, ...]
    rules: Rules
    sizes: Mapping[Axis, int]

    @property
    def parts(self) -> dict[str, Tree]:
        """Spec trees under the names that JSON output and sharding.json use."""
        trees = (self.weights, self.master_params, self.gradients, self.optimizer)
        return dict(zip(PARTS, trees, strict=True))

    def by_path(self, params: Tree) -> dict[str, tuple[Param, dict[str, PartitionSpec]]]:
        """Path -> (parameter, spec of each of PARTS), for a tree of Param."""
        specs = {part: flatten_paths(tree) for part, tree in self.parts.items()}
        return {
            path: (param, {part: flat[path] for part, flat in specs.items()})
            for path, param in flatten_paths(params).items()
        }

    def optimizer_specs(self, abstract_state: Tree, params: Tree) -> Tree:
        """Spec of every leaf of an optax state (arrays or ShapeDtypeStructs) over a tree of Param.

        A leaf belongs to the parameter whose path ends its own: of equal shape it takes that parameter's optimizer
        spec, with dimensions removed or set to 1 (Adafactor's factored moments) the spec of those that remain.
        Scalars and short constants are replicated. Raises ConfigError for any other leaf.
        """
        flat, treedef = jax.tree_util.tree_flatten_with_path(abstract_state)
        shapes, specs = flatten_paths(params), flatten_paths(self.optimizer)
        owners = {tuple(name.split("/")): (param.shape, specs[name]) for name, param in shapes.items()}
        findings: list[Finding] = []
        out = []
        for path, leaf in flat:
            spec = _state_spec(tuple(_key(k) for k in path), tuple(leaf.shape), owners)
            if spec is None:
                name = jax.tree_util.keystr(path, simple=True, separator="/")
                text = f"optimizer state {name} {leaf.shape} belongs to no parameter by path and shape: left replicated"
                findings.append(Finding("state", name, text))
            out.append(spec or PartitionSpec())
        raise_findings(findings, self.rules)
        return jax.tree_util.tree_unflatten(treedef, out)


def build_layout(params: Tree, rules: Rules, sizes: Mapping[Axis, int], separate_master_params: bool) -> Layout:
    """Specs of everything that belongs to a parameter; `params` is a tree of Param.

    separate_master_params: weights are cast from float32 master parameters, which then take the optimizer's spec.
    Raises one ConfigError with every finding (parameter, dimension, spec, fix) that `rules.allow` does not accept.
    """
    flat = flatten_paths(params)
    resolved = {name: spec_for(param, rules, sizes, name) for name, param in flat.items()}
    findings = [finding for one in resolved.values() for finding in one.findings]
    findings += _unmatched(flat, rules) + _replicated(flat, resolved, rules) + activation_findings(rules, sizes)
    extended = {
        extra: {name: extend_spec(param, resolved[name].spec, rules.axes(extra), sizes) for name, param in flat.items()}
        for extra in EXTRAS
    }
    findings += [f for extra in EXTRAS for f in _unextended(flat, extra, extended[extra], rules, sizes)]
    notes = raise_findings(findings, rules)
    notes += tuple(
        f"{name}: {reason.note}" for name, one in resolved.items() for reason in one.reasons
        if reason.note.startswith("replicated")
    )  # fmt: skip
    weights = _map(lambda name: resolved[name].spec, params)
    optimizer = _map(lambda name: extended["optimizer"][name] or resolved[name].spec, params)
    batch_axes = tuple(axis for axis in rules.axes("batch") if sizes[axis] > 1)
    sharding = {axis for one in resolved.values() for reason in one.reasons for axis in reason.axes}
    return Layout(
        weights=weights,
        master_params=optimizer if separate_master_params else weights,
        gradients=_map(lambda name: extended["gradients"][name] or resolved[name].spec, params),
        optimizer=optimizer,
        batch_axes=batch_axes,
        deferred_axes=tuple(axis for axis in batch_axes if axis not in sharding),
        sequence_axes=tuple(axis for axis in rules.axes("seq_len") if sizes[axis] > 1),
        resolved=resolved,
        notes=notes,
        rules=rules,
        sizes=dict(sizes),
    )


def extend_spec(
    param: Param, spec: PartitionSpec, axes: tuple[Axis, ...], sizes: Mapping[Axis, int]
) -> PartitionSpec | None:
    """`spec` with those of `axes` that it lacks added to one dimension that they divide, None where none does.

    The largest whole dimension is preferred, then the largest shard of a sharded one, stacked layers last.
    """
    dims = spec_axes(spec, len(param.shape))
    used = {axis for dim in dims for axis in dim}
    added = tuple(axis for axis in axes if sizes[axis] > 1 and axis not in used)
    if not added:
        return spec
    local = local_shape(param.shape, spec, sizes)
    order = sorted(range(len(dims)), key=lambda i: (param.names[i] in STACKS, bool(dims[i]), -local[i]))
    extent = math.prod(sizes[axis] for axis in added)
    for i in order:
        if local[i] % extent == 0:
            return make_spec(dim + added if j == i else dim for j, dim in enumerate(dims))
    return None


def local_shape(shape: tuple[int, ...], spec: PartitionSpec, sizes: Mapping[Axis, int]) -> tuple[int, ...]:
    """Shape of one device's shard."""
    dims = spec_axes(spec, len(shape))
    return tuple(n // math.prod(sizes[axis] for axis in axes) for n, axes in zip(shape, dims, strict=True))


def bytes_per_device(tree: Tree, specs: Tree, sizes: Mapping[Axis, int], itemsize: int | None = None) -> int:
    """Bytes that one device holds of a tree of Param (itemsize needed) or of arrays, sharded by a tree of specs."""

    def local(leaf: Any, spec: PartitionSpec) -> int:
        return math.prod(local_shape(tuple(leaf.shape), spec, sizes)) * (itemsize or leaf.dtype.itemsize)

    return sum(jax.tree.leaves(jax.tree.map(local, tree, specs)))


def flatten_paths(tree: Tree) -> dict[str, Any]:
    """Nested dicts -> {'layers/attention/query': leaf} in tree order."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _map(value: Callable[[str], PartitionSpec], tree: Tree) -> Tree:
    def at(path: Any, _: Param) -> PartitionSpec:
        return value(jax.tree_util.keystr(path, simple=True, separator="/"))

    return jax.tree_util.tree_map_with_path(at, tree)


def _unmatched(flat: Mapping[str, Param], rules: Rules) -> list[Finding]:
    present = {name for param in flat.values() for name in param.names}
    return [
        Finding(
            "unmatched", name,
            f"rules.{name} is {show_axes(entry.axes)} but no parameter has a dimension of that name; "
            f"remove it, names in use: {', '.join(n for n in NAMES if n in present)}",
        )
        for name, entry in rules.entries.items()
        if entry.origin == f"rules.{name}" and entry.axes and name not in present | ACTIVATION_ONLY | {*EXTRAS}
    ]  # fmt: skip


def _replicated(flat: Mapping[str, Param], resolved: Mapping[str, ResolvedSpec], rules: Rules) -> list[Finding]:
    # The base table (stages, experts) shards whatever the user asked for: it does not make replication suspicious.
    # Replication that was asked for (null, kv heads, an allowed finding) is intended.
    asked = {
        axis for one in resolved.values() for reason in one.reasons if reason.origin != "base" for axis in reason.axes
    }
    if not asked:
        return []
    findings = []
    for name, param in flat.items():
        reasons = resolved[name].reasons
        size = _one_layer(param)
        null = any(not r.asked and r.origin == f"rules.{r.name}" for r in reasons)
        if size <= rules.replicated_limit or null or any(reason.axes or reason.note for reason in reasons):
            continue
        names = ", ".join(f"rules.{n}" for n in dict.fromkeys(param.names) if n not in (*STACKS, WHOLE))
        axes = ", ".join(axis for axis in AXES if axis in asked)
        findings.append(Finding(
            "replicated", name,
            f"{name} {param.shape} {param.names} is replicated on every device: {size:,} elements, more than "
            f"rules.replicated_limit {rules.replicated_limit:,}, spec {resolved[name].spec}; shard it with one of "
            f"{names} (axes in use: {axes}) or raise the limit",
        ))  # fmt: skip
    return findings


def _unextended(
    flat: Mapping[str, Param],
    extra: str,
    specs: Mapping[str, PartitionSpec | None],
    rules: Rules,
    sizes: Mapping[Axis, int],
) -> list[Finding]:
    entry = rules.entry(extra)
    axes = tuple(axis for axis in entry.axes if sizes[axis] > 1)
    extent = math.prod(sizes[axis] for axis in axes)
    what = {"optimizer": "optimizer state", "gradients": "reduced gradients"}[extra]
    return [
        Finding(
            "state", name,
            f"{name} {param.shape}: {entry.origin} cannot shard its {what} over {show_axes(axes)}: no dimension "
            f"is divisible by {extent}; choose another size of {show_axes(axes)} or set rules.{extra} to null",
        )
        for name, param in flat.items()
        if specs[name] is None and _one_layer(param) > rules.replicated_limit
    ]  # fmt: skip


def _one_layer(param: Param) -> int:
    """Elements of a parameter, of one layer where layers are stacked: a stack is many parameters."""
    return math.prod(n for n, name in zip(param.shape, param.names, strict=True) if name not in STACKS)


def _state_spec(
    path: tuple[str, ...],
    shape: tuple[int, ...],
    owners: Mapping[tuple[str, ...], tuple[tuple[int, ...], PartitionSpec]],
) -> PartitionSpec | None:
    if math.prod(shape) <= 1:
        return PartitionSpec()
    for start in range(len(path)):
        if path[start:] in owners:
            whole, spec = owners[path[start:]]
            matched = _matched_dims(shape, whole)
            dims = spec_axes(spec, len(whole))
            return None if matched is None else make_spec(() if i is None else dims[i] for i in matched)
    return PartitionSpec() if math.prod(shape) <= CONSTANTS else None


def _matched_dims(shape: tuple[int, ...], whole: tuple[int, ...]) -> list[int | None] | None:
    """For each dimension of `shape` the one of `whole` it is (None where set to 1); None where neither fits."""
    if len(shape) == len(whole):
        matched = [i if n == m else None for i, (n, m) in enumerate(zip(shape, whole, strict=True))]
        return matched if all(i is not None or n == 1 for i, n in zip(matched, shape, strict=True)) else None
    found: list[int | None] = []
    start = 0
    for n in shape:
        match = next((i for i in range(start, len(whole)) if whole[i] == n), None)
        if match is None and n != 1:
            return None
        found.append(match)
        start = start if match is None else match + 1
    return found


def _key(key: Any) -> str:
    return str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))
