"""The computation of one stage on one of its chunks: forward, backward, and the two halves of a split backward.

A chunk's layer slots are loops; an iteration of a loop runs some segments, and a segment some layers. The forward pass
saves each segment's residuals: its input and the values that remat.policy names. The backward pass recomputes the rest.

The functions here see one stage; the executor vmaps them over the pipe axis. Legend: v chunks, J' layer slots of one
stack in a chunk, B sequences, L length, D model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.config import RematConfig
from jaxtrain.mesh.constraints import active_mesh
from jaxtrain.nn.layers import BatchContext, BatchTotals
from jaxtrain.nn.model import KEEP_ALL, Model
from jaxtrain.numerics.remat import save_named
from jaxtrain.numerics.wide import operand, weights_of
from jaxtrain.pipeline.buffers import DEVICE_STORE, HOST_STORE, SlotStore, read_slot, write_slot
from jaxtrain.pipeline.halves import Halves, halve
from jaxtrain.pipeline.split import Loop, Segment, loops_of
from jaxtrain.pipeline.stages import Stages

Tree = Any
Sums = dict[str, jax.Array]
TokenFields = tuple[jax.Array, jax.Array]
"""Position and segment ids [B, L] of a microbatch."""
Buffers = list[list[list[jax.Array]]]
"""For each loop, segment of an iteration and saved value: [slots, iterations, ...]."""


class StageState(NamedTuple):
    """A stage's layers of each stack, all chunks together; leaves are [v J', ...]."""

    weights: Tree
    data: Tree
    """`Model.data` of each layer."""
    occupied: Tree
    """Whether a slot holds a layer."""


class BackwardInputs(NamedTuple):
    """Inputs of a segment's backward pass beside cotangents, available to both halves of a split one."""

    state: StageState
    context: BatchContext
    residuals: list[jax.Array]
    """The segment's input [B, L, D], then the values that remat.policy saves."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """A chunk's layers as functions of a stage's weights.

    weights: of the whole model, in stage order; specs: their PartitionSpecs, None outside a mesh; totals: totals of the
    global batch.
    """

    model: Model
    stages: Stages
    weights: Tree
    specs: Tree
    totals: BatchTotals = field(default_factory=dict)
    remat: RematConfig = KEEP_ALL
    wide: bool = False
    """Whether gradients of 16-bit weights are float32."""

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """The layer slots of a chunk, in order."""
        return loops_of(self.stages.pattern, self.remat.every)

    @cached_property
    def slot_store(self) -> SlotStore:
        """How residuals are written and read."""
        return HOST_STORE if self.remat.policy == "offload" else DEVICE_STORE

    def _read_residuals(self, buffers: list[jax.Array], slot: jax.Array, n: jax.Array) -> list[jax.Array]:
        x_BLD, *named = (self.slot_store.read(buffer, slot, n) for buffer in buffers)
        # An idle slot reads another microbatch's values. A softmax denominator of masked keys with visible scores would
        # give infinities, and their zero cotangents NaN.
        return [x_BLD, *(jnp.where(slot >= 0, value, 0) for value in named)]

    def _context(self, positions_BL: jax.Array, segments_BL: jax.Array) -> BatchContext:
        return self.model.context(self.weights, positions_BL, segments_BL, self.totals)

    def forward(
        self, state: StageState, chunk: jax.Array, x_BLD: jax.Array, fields: TokenFields, residuals: Buffers | None,
        slot: jax.Array,
    ) -> tuple[jax.Array, Buffers | None, Tree]:  # fmt: skip
        """x through chunk number `chunk`: (output, residual buffers, stats by stack [J', ...]).

        Residuals are written to `slot`, to none where it is -1. Without buffers none are saved.
        """
        context, written = self._context(*fields), list[Any]()
        reports: list[Tree] = []
        for i, loop in enumerate(self.loops):

            def iteration(carry: Any, n: jax.Array, loop: Loop = loop) -> tuple[Any, Tree]:
                (x_BLD, buffers), found = carry, []
                for j, segment in enumerate(loop.segments):
                    part = self._segment_state(state, chunk, segment, n)
                    if buffers is None:
                        (x_BLD, _), stats = self._run_layers(segment, part, x_BLD, context)
                    else:
                        x_BLD, values, stats = self._forward_segment(segment, part, x_BLD, context)
                        updated = [
                            self.slot_store.write(b, x, slot, n) for b, x in zip(buffers[j], values, strict=True)
                        ]
                        buffers = [*buffers[:j], updated, *buffers[j + 1 :]]
                    found.append(stats)
                return (x_BLD, buffers), _concatenate_stats(found)

            start = x_BLD, None if residuals is None else residuals[i]
            (x_BLD, buffers), report = lax.scan(iteration, start, jnp.arange(loop.iterations))
            written.append(buffers)
            reports.append(jax.tree.map(lambda s: s.reshape(-1, *s.shape[2:]), report))
        return x_BLD, None if residuals is None else written, _concatenate_stats(reports)

    def backward(
        self, state: StageState, gradients: Tree, chunk: jax.Array, fields: TokenFields, residuals: Buffers,
        slot: jax.Array, cotangent_BLD: jax.Array, objective_cotangent: jax.Array, weight_residuals: Buffers | None,
        weight_slot: jax.Array,
    ) -> tuple[jax.Array, Tree, Buffers | None]:  # fmt: skip
        """Backward of a chunk from the residuals in `slot`: (cotangent of its input, gradients, weight residuals).

        `objective_cotangent` is the cotangent of the layers' objectives. Gradients of weights are added to `gradients`.
        With buffers `weight_residuals` they are not computed; the inputs of `backward_weights` are written to
        `weight_slot` of these buffers instead, to none where it is -1.
        """
        context, written = self._context(*fields), list[Any]()
        for i, loop in reversed(list(enumerate(self.loops))):

            def iteration(carry: Any, n: jax.Array, i: int = i, loop: Loop = loop) -> tuple[Any, None]:
                cotangent_BLD, gradients, buffers = carry
                for j, segment in reversed(list(enumerate(loop.segments))):
                    part = self._segment_state(state, chunk, segment, n)
                    inputs = BackwardInputs(part, context, self._read_residuals(residuals[i][j], slot, n))
                    cotangents = cotangent_BLD, objective_cotangent
                    if buffers is None:
                        cotangent_BLD, gradient = self._backward_segment(segment, inputs, cotangents)
                        gradients = self._add_gradient(gradients, gradient, chunk, segment, n)
                    else:
                        cotangent_BLD, values = self._halves(segment, inputs).input_half(inputs, cotangents)
                        updated = [write_slot(b, x, weight_slot, n) for b, x in zip(buffers[j], values, strict=True)]
                        buffers = [*buffers[:j], updated, *buffers[j + 1 :]]
                return (cotangent_BLD, gradients, buffers), None

            start = cotangent_BLD, gradients, None if weight_residuals is None else weight_residuals[i]
            steps = jnp.arange(loop.iterations)
            (cotangent_BLD, gradients, buffers), _ = lax.scan(iteration, start, steps, reverse=True)
            written.insert(0, buffers)
        return cotangent_BLD, gradients, None if weight_residuals is None else written

    def backward_weights(
        self, state: StageState, gradients: Tree, chunk: jax.Array, fields: TokenFields, residuals: Buffers,
        slot: jax.Array, weight_residuals: Buffers, weight_slot: jax.Array,
    ) -> Tree:  # fmt: skip
        """`gradients` plus those of a chunk's weights, from what `backward` wrote; unchanged if weight_slot is -1."""
        context = self._context(*fields)
        for i, loop in enumerate(self.loops):

            def iteration(gradients: Tree, n: jax.Array, i: int = i, loop: Loop = loop) -> tuple[Tree, None]:
                for j, segment in enumerate(loop.segments):
                    part = self._segment_state(state, chunk, segment, n)
                    inputs = BackwardInputs(part, context, self._read_residuals(residuals[i][j], slot, n))
                    values = [read_slot(b, weight_slot, n) for b in weight_residuals[i][j]]
                    gradient = self._halves(segment, inputs).weight_half(inputs, values)
                    gradient = jax.tree.map(lambda g: jnp.where(weight_slot >= 0, g, 0), gradient)
                    gradients = self._add_gradient(gradients, gradient, chunk, segment, n)
                return gradients, None

            gradients, _ = lax.scan(iteration, gradients, jnp.arange(loop.iterations))
        return gradients

    # Shapes of buffers ----------------------------------------------------------------------------------------------

    def stats_shapes(self, state: StageState, x_BLD: jax.Array, fields: TokenFields) -> Tree:
        """Shapes of the stats of a chunk, by stack."""
        return jax.eval_shape(lambda: self.forward(state, jnp.int32(0), x_BLD, fields, None, jnp.int32(-1))[2])

    def residual_shapes(self, state: StageState, x_BLD: jax.Array, fields: TokenFields) -> Tree:
        """Shapes of the residuals of each segment [iterations, ...]."""
        return self._shapes(lambda segment: self._backward_inputs(state, segment, x_BLD, fields).residuals)

    def weight_residual_shapes(self, state: StageState, x_BLD: jax.Array, fields: TokenFields) -> Tree:
        """Shapes of the weight-gradient residuals of each segment [iterations, ...]."""

        def values(segment: Segment) -> list[jax.Array]:
            inputs = self._backward_inputs(state, segment, x_BLD, fields)
            return self._halves(segment, inputs).input_half(inputs, (x_BLD, jnp.float32(0)))[1]

        return self._shapes(values)

    def _shapes(self, values: Callable[[Segment], list[jax.Array]]) -> Tree:
        def shapes(segment: Segment, iterations: int) -> list[jax.ShapeDtypeStruct]:
            found = jax.eval_shape(partial(values, segment))
            return [jax.ShapeDtypeStruct((iterations, *value.shape), value.dtype) for value in found]

        return [[shapes(segment, loop.iterations) for segment in loop.segments] for loop in self.loops]

    def _backward_inputs(
        self, state: StageState, segment: Segment, x_BLD: jax.Array, fields: TokenFields
    ) -> BackwardInputs:
        context = self._context(*fields)
        part = self._segment_state(state, jnp.int32(0), segment, jnp.int32(0))
        return BackwardInputs(part, context, self._forward_segment(segment, part, x_BLD, context)[1])

    # One segment ----------------------------------------------------------------------------------------------------

    def _run_layers(
        self, segment: Segment, part: StageState, x_BLD: jax.Array, context: BatchContext
    ) -> tuple[tuple[jax.Array, jax.Array], Tree]:
        """Run a segment's layers: ((x, their objective), stats by stack); an empty slot returns its input."""
        objective, reports = jnp.float32(0), []
        index = dict.fromkeys(segment.stacks, 0)
        for stack in segment.stacks:
            i, block = index[stack], self.model.block(self.weights, stack)
            layer, data, occupied = jax.tree.map(lambda a, i=i: a[i], tuple(tree[stack] for tree in part))
            y_BLD, stats = block(self._constrain_weights(stack, layer), x_BLD, context, data)
            if not self.stages.occupied[stack].all():
                y_BLD = jnp.where(occupied, y_BLD, x_BLD)
                stats = jax.tree.map(lambda s, on=occupied: jnp.where(on, s, jnp.zeros_like(s)), stats)
            x_BLD, objective = y_BLD, objective + stats.get("objective", jnp.float32(0))
            reports.append({stack: jax.tree.map(lambda s: s[None], stats)})
            index[stack] += 1
        return (x_BLD, objective), _concatenate_stats(reports)

    def _segment_vjp(
        self, segment: Segment, part: StageState, x_BLD: jax.Array, context: BatchContext
    ) -> tuple[jax.Array, Tree, list[jax.Array], Callable[[Iterable[jax.Array]], Callable[..., Any]]]:
        """Run a segment: (output, stats by stack, saved values, function of saved values -> the backward function).

        The backward function of jax.vjp is a pytree. Some of its leaves are inputs of the segment, which the backward
        pass supplies again; the others are the values that remat.policy saves.
        """

        @partial(save_named, remat=self.remat)
        def run(part: StageState, x_BLD: jax.Array, context: BatchContext) -> Any:
            return self._run_layers(segment, part, x_BLD, context)

        def objective(variable: Tree, x_BLD: jax.Array) -> Any:
            weights = weights_of(variable, part.weights, self.wide)
            return run(part._replace(weights=weights), x_BLD, context)

        variable = operand(part.weights, self.wide)
        (y_BLD, _), pull, stats = jax.vjp(objective, variable, x_BLD, has_aux=True)
        leaves, tree = jax.tree.flatten(pull)
        inputs = {id(leaf) for leaf in jax.tree.leaves((part, variable, x_BLD, context))}
        is_input = [id(leaf) in inputs for leaf in leaves]

        def restore(saved: Iterable[jax.Array]) -> Callable[..., Any]:
            values = iter(saved)
            pull = [leaf if same else next(values) for leaf, same in zip(leaves, is_input, strict=True)]
            return jax.tree.unflatten(tree, pull)

        return y_BLD, stats, [leaf for leaf, same in zip(leaves, is_input, strict=True) if not same], restore

    def _forward_segment(
        self, segment: Segment, part: StageState, x_BLD: jax.Array, context: BatchContext
    ) -> tuple[jax.Array, list[jax.Array], Tree]:
        """(output, residuals, stats by stack)."""
        y_BLD, stats, saved, _ = self._segment_vjp(segment, part, x_BLD, context)
        return y_BLD, [x_BLD, *saved], stats

    def _backward_segment(
        self, segment: Segment, inputs: BackwardInputs, cotangents: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, Tree]:
        """(cotangent of the input, gradient of the weights) from the cotangents of output and objective."""
        state, context, (x_BLD, *saved) = inputs
        # The forward pass is traced for the structure of its backward function; the compiler drops its operations.
        *_, restore = self._segment_vjp(segment, state, x_BLD, context)
        gradient, dx_BLD = restore(saved)((cotangents[0], cotangents[1].astype(jnp.float32)))
        return dx_BLD, gradient

    def _halves(self, segment: Segment, inputs: BackwardInputs) -> Halves:
        return halve(partial(self._backward_segment, segment), inputs, (inputs.residuals[0], jnp.float32(0)))

    # Layer slots of a stage -----------------------------------------------------------------------------------------

    def _first_slot(self, stack: str, chunk: jax.Array, segment: Segment, n: jax.Array) -> jax.Array:
        first, per_iteration = segment.slots[stack]
        slot = first + n * per_iteration
        # With one chunk the index is the same on all stages, so that a slice stays a slice under vmap.
        return slot if self.stages.shape[1] == 1 else slot + jnp.maximum(chunk, 0) * self.stages.rows[stack].shape[2]

    def _segment_state(self, state: StageState, chunk: jax.Array, segment: Segment, n: jax.Array) -> StageState:
        """The stage's layers that a segment runs in iteration n of its loop."""
        found: dict[str, StageState] = {}
        for stack in segment.slots:
            slot, size = self._first_slot(stack, chunk, segment, n), segment.stacks.count(stack)
            of_stack = StageState(*(tree[stack] for tree in state))
            found[stack] = jax.tree.map(partial(lax.dynamic_slice_in_dim, start_index=slot, slice_size=size), of_stack)
        return StageState(*({stack: part[i] for stack, part in found.items()} for i in range(len(StageState._fields))))

    def _add_gradient(self, gradients: Tree, gradient: Tree, chunk: jax.Array, segment: Segment, n: jax.Array) -> Tree:
        def add(slot: jax.Array, total: jax.Array, addend: jax.Array) -> jax.Array:
            old = lax.dynamic_slice_in_dim(total, slot, len(addend))
            return lax.dynamic_update_slice_in_dim(total, old + addend.astype(jnp.float32), slot, 0)

        gradients = dict(gradients)
        for stack in segment.slots:
            # Constrained before the addition in float32: the sharding of the sum follows the sum, not the addend.
            addend = self._constrain_weights(stack, gradient[stack], None)
            slot = self._first_slot(stack, chunk, segment, n)
            gradients[stack] = jax.tree.map(partial(add, slot), gradients[stack], addend)
        return gradients

    def _constrain_weights(self, stack: str, weights: Tree, *leading: None) -> Tree:
        """Weights of a stack's layers, or their gradients, sharded as in the layout after `leading` unsharded dims."""
        if self.specs is None:
            return weights
        return constrain_specs(weights, jax.tree.map(lambda s: PartitionSpec(*leading, *s[1:]), self.specs[stack]))


def constrain_specs(tree: Tree, specs: Tree) -> Tree:
    """Arrays constrained to their PartitionSpecs; unchanged outside a mesh."""
    mesh = active_mesh()
    if mesh is None:
        return tree
    # A WideWeight has one spec for both of its arrays.
    return jax.tree.map(
        lambda s, a: lax.with_sharding_constraint(a, NamedSharding(mesh, s)), specs, tree,
        is_leaf=lambda node: isinstance(node, PartitionSpec),
    )  # fmt: skip


def _concatenate_stats(reports: Sequence[Mapping[str, Sums]]) -> dict[str, Sums]:
    """Stats of parts of a chunk, concatenated by stack; stacks without stats are left out."""
    found: dict[str, list[Sums]] = {}
    for report in reports:
        for stack, stats in report.items():
            if stats:
                found.setdefault(stack, []).append(stats)
    return {stack: jax.tree.map(lambda *each: jnp.concatenate(each), *parts) for stack, parts in found.items()}
