"""The train state as checkpoints store it: layers in the model's order, whatever the stages of the mesh that saves.

A pipelined mesh stores layers in stage order, with empty slots where stages hold different numbers of layers.
Checkpoints hold the model's order without empty slots, so that any mesh restores them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.mesh.layout import extend_spec
from jaxtrain.mesh.param import Param
from jaxtrain.nn.layer_table import layers_of
from jaxtrain.pipeline.staged import StagedModel
from jaxtrain.train.resolve import Bound
from jaxtrain.train.state import TrainState, state_from_params

STORED_NAMES = {"steps": "updates"}
"""Parts of the state that checkpoints store under another name: the format stays readable."""


class CheckpointOrder:
    """Conversion of one bound configuration's state to and from the order and names of checkpoints."""

    def __init__(self, bound: Bound) -> None:
        self._bound = bound
        self._reorderers: dict[tuple[str, str, Any], Any] = {}

    @cached_property
    def checkpoint_layout(self) -> TrainState:
        """Shapes and shardings of the state in a checkpoint."""
        return _rename(self.model_order, STORED_NAMES)

    def to_checkpoint(self, state: TrainState) -> TrainState:
        """A state as checkpoints store it, bit for bit; leaves are not copied where the order is the same.

        Reordered leaves are in host memory: one at a time is reordered on the devices and moved there, so that a save
        needs the largest leaf twice on the devices, never the state.
        """
        return _rename(self._reorder(state, "from_stack", self.model_order, _to_host), STORED_NAMES)

    def from_checkpoint(self, stored: TrainState) -> TrainState:
        """The inverse of `to_checkpoint`, a leaf at a time; what is reordered of `stored` is deleted."""
        ordered = _rename(stored, {new: old for old, new in STORED_NAMES.items()})
        return self._reorder(ordered, "to_stack", self._bound.abstract, delete=True)

    @property
    def params_layout(self) -> TrainState:
        """The part of `checkpoint_layout` that evaluation, sampling and export read: {"params": ...}."""
        return {"params": self.model_order["params"]}

    def params_from_checkpoint(self, stored: TrainState) -> Any:
        """The parameters of this mesh from what was restored with `params_layout`."""
        return self.from_model_order({"params": stored["params"]})["params"]

    @cached_property
    def model_order(self) -> TrainState:
        """Shapes and shardings of the state with layers in the model's order."""
        return jax.tree.map(self._ordered_leaf, self._bound.abstract, self._reordered)

    def largest_reordering(self) -> tuple[Any, jax.ShapeDtypeStruct] | None:
        """The jitted function and the leaf with which a save needs most memory; None where no leaf is reordered."""
        leaves = [
            (leaf, stack, wanted.sharding)
            for leaf, stack, wanted in zip(
                *map(jax.tree.leaves, (self._bound.abstract, self._reordered, self.model_order)), strict=True
            )
            if stack
        ]
        if not leaves:
            return None
        leaf, stack, sharding = max(leaves, key=lambda each: shard_bytes(each[0]))
        return self._reorderer("from_stack", stack, sharding), leaf

    def to_model_order(self, state: TrainState) -> TrainState:
        """A state with its layers in the model's order; the state itself where that is its order."""
        return self._reorder(state, "from_stack", self.model_order)

    def from_model_order(self, ordered: TrainState) -> TrainState:
        """The inverse of `to_model_order`."""
        return self._reorder(ordered, "to_stack", self._bound.abstract)

    def initial(self, params: Any) -> TrainState:
        """The state before the first step of given weights, both in the model's order; weights are not copied."""
        bound = self._bound
        return state_from_params(params, bound.step.optimizer, bound.config.precision, self.model_order)

    def initial_checkpoint(self, params: Any) -> TrainState:
        """`initial` as checkpoints store it."""
        return _rename(self.initial(params), STORED_NAMES)

    def state_from_params(self, params: Any) -> TrainState:
        """`initial` in the order of this mesh, ready to be trained."""
        return self.from_model_order(self.initial(params))

    @cached_property
    def _reordered(self) -> TrainState:
        """Tree of str over the state: the stack whose layers a leaf holds in stage order, "" for none."""
        bound = self._bound
        if not isinstance(bound.model, StagedModel) or bound.model.stages.identity:
            return jax.tree.map(lambda _: "", bound.abstract)
        return stacked_leaves(bound.model.params, bound.step.optimizer, bound.abstract, bound.model.stages.rows)

    def _ordered_leaf(self, leaf: jax.ShapeDtypeStruct, stack: str) -> jax.ShapeDtypeStruct:
        if not stack:
            return leaf
        sizes, spec = self._bound.topology.sizes, leaf.sharding.spec  # type: ignore[union-attr]
        shape = (layers_of(self._bound.config.model, stack), *leaf.shape[1:])
        if shape[0] % sizes["pipe"]:
            # Layers need not divide where slots do: another dimension takes the axis, so that no device holds all.
            bare = PartitionSpec(None, *spec[1:])
            names = ("layers", *("other",) * (len(shape) - 1))
            spec = extend_spec(Param(shape, names), bare, ("pipe",), sizes) or bare
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=NamedSharding(self._bound.mesh, spec))

    def _reorder(
        self,
        state: TrainState,
        method: str,
        target: TrainState,
        move: Callable[[jax.Array], jax.Array] = lambda leaf: leaf,
        delete: bool = False,
    ) -> TrainState:
        """Reorder the stacks of a state or of some of its parts, one leaf after the other."""

        def reorder(leaf: jax.Array, stack: str, wanted: jax.ShapeDtypeStruct) -> jax.Array:
            if not stack:
                return leaf
            ordered = self._reorderer(method, stack, wanted.sharding)(_to_devices(leaf))
            moved = move(jax.block_until_ready(ordered))
            if moved is not ordered:
                ordered.delete()
            if delete:
                leaf.delete()
            return moved

        parts = ({name: tree[name] for name in state} for tree in (self._reordered, target))
        return jax.tree.map(reorder, state, *parts)

    def _reorderer(self, method: str, stack: str, sharding: Any) -> Any:
        key = (method, stack, sharding)
        if key not in self._reorderers:
            function = getattr(self._bound.model, method)
            self._reorderers[key] = jax.jit(partial(function, stack), out_shardings=sharding)
        return self._reorderers[key]


def stacked_leaves(
    params: dict[str, Any], optimizer: optax.GradientTransformation, state: TrainState, stacks: Collection[str]
) -> TrainState:
    """Tree of str over a state: the one of `stacks` in which a leaf has one index a layer, "" for none."""

    def moments(grown: str) -> Any:
        def shape(stack: str, param: Param) -> jax.ShapeDtypeStruct:
            longer = (param.shape[0] + (stack == grown), *param.shape[1:])
            return jax.ShapeDtypeStruct(longer if stack == grown else param.shape, jnp.float32)

        return jax.eval_shape(optimizer.init, {k: jax.tree.map(partial(shape, k), part) for k, part in params.items()})

    none = {name: jax.tree.map(lambda _: "", part) for name, part in state.items()}
    marked = {k: jax.tree.map(lambda _, k=k: k if k in stacks else "", part) for k, part in params.items()}
    opt, unchanged = none["opt"], moments("")
    for stack in stacks:
        # A moment may lack any dimension of its parameter: those that grow with the stack have one index a layer.
        grown = jax.tree.map(lambda a, b: a.shape[:1] != b.shape[:1], unchanged, moments(stack))
        opt = jax.tree.map(lambda name, there, stack=stack: stack if there else name, opt, grown)
    return {**none, "params": marked, "opt": opt}


def shard_bytes(leaf: Any) -> int:
    """Bytes of a leaf on one device."""
    return int(math.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize


def _to_host(leaf: jax.Array) -> jax.Array:
    return jax.block_until_ready(jax.device_put(leaf, leaf.sharding.with_memory_kind("pinned_host")))


def _to_devices(leaf: jax.Array) -> jax.Array:
    """The leaf itself, unless it is in host memory as `to_checkpoint` leaves it."""
    in_host = isinstance(leaf, jax.Array) and leaf.sharding.memory_kind == "pinned_host"
    return jax.device_put(leaf, leaf.sharding.with_memory_kind("device")) if in_host else leaf


def _rename(state: TrainState, names: dict[str, str]) -> TrainState:
    return {names.get(name, name): part for name, part in state.items()}
