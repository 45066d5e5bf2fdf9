"""What a stage does with one of its chunks: forward, back, and the two halves of going back.

A chunk's places are loops of turns, a turn is some segments, and a segment some layers: what is kept of it on the way
forward is its input and what remat.policy names; the way back computes the rest again.

Functions here see one stage: the executor vmaps them over the pipe axis. Legend: v chunks, B rows, L length, D model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.config import RematConfig
from jaxtrain.mesh.constraints import active_mesh
from jaxtrain.nn.layers import BatchTotals, Flow
from jaxtrain.nn.model import KEEP_ALL, Model
from jaxtrain.numerics.remat import residual_names, restore_residuals, save_residuals
from jaxtrain.pipeline.buffers import HOSTED, ON_DEVICE, SlotStore, put, take
from jaxtrain.pipeline.halves import Halves, halve
from jaxtrain.pipeline.split import Loop, Segment, loops_of
from jaxtrain.pipeline.stages import Stages

Tree = Any
Sums = dict[str, jax.Array]
Seen = tuple[jax.Array, jax.Array]
"""Positions and segments [B, L] of a microbatch."""
Buffers = list[list[list[jax.Array]]]
"""For each loop, segment of a turn and kept value [slots, turns, ...]."""


class StageState(NamedTuple):
    """What a stage holds of each stack, all chunks together; leaves have v J' rows."""

    weights: Tree
    data: Tree
    """What `Model.data` says of each layer."""
    real: Tree
    """Whether a place holds a layer."""


class BackwardInputs(NamedTuple):
    """What the way back through a segment has in both halves: its layers, what they see, what was kept."""

    own: StageState
    flow: Flow
    kept: list[jax.Array]
    """The input [B, L, D], and what remat.policy keeps beside it."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """A chunk's layers as functions of the weights that a stage owns.

    weights: of the whole model, in stage order; specs: their PartitionSpecs, None outside a mesh; totals: what is known
    of the global batch.
    """

    model: Model
    stages: Stages
    weights: Tree
    specs: Tree
    totals: BatchTotals = field(default_factory=dict)
    remat: RematConfig = KEEP_ALL

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """The places of a chunk in order."""
        return loops_of(self.stages.pattern, self.remat.every)

    @cached_property
    def slot_store(self) -> SlotStore:
        """How what is kept is written and read."""
        return HOSTED if self.remat.policy == "offload" else ON_DEVICE

    def _kept(self, buffers: list[jax.Array], slot: jax.Array, n: jax.Array) -> list[jax.Array]:
        x_BLD, *beside = (self.slot_store.take(buffer, slot, n) for buffer in buffers)
        # What an idle place finds is of another microbatch than it sees: a softmax's denominator of hidden keys would
        # make infinities of visible ones, and zero times those is no number.
        return [x_BLD, *(jnp.where(slot >= 0, value, 0) for value in beside)]

    def _flow(self, positions_BL: jax.Array, segments_BL: jax.Array) -> Flow:
        return self.model.flow(self.weights, positions_BL, segments_BL, self.totals)

    def forward(
        self, own: StageState, chunk: jax.Array, x_BLD: jax.Array, seen: Seen, kept: Buffers | None, slot: jax.Array
    ) -> tuple[jax.Array, Buffers | None, Tree]:
        """x through chunk number `chunk`: (its output, buffers with what is kept in `slot`, stats by stack [J', ...]).

        Nothing is written where slot is -1, nothing kept without buffers.
        """
        flow, written = self._flow(*seen), list[Any]()
        reports: list[Tree] = []
        for i, loop in enumerate(self.loops):

            def turn(carry: Any, n: jax.Array, loop: Loop = loop) -> tuple[Any, Tree]:
                (x_BLD, buffers), found = carry, []
                for j, segment in enumerate(loop.segments):
                    part = self._part(own, chunk, segment, n)
                    if buffers is None:
                        (x_BLD, _), stats = self._layers(segment, part, x_BLD, flow)
                    else:
                        x_BLD, values, stats = self._keep(segment, part, x_BLD, flow)
                        places = [self.slot_store.put(b, x, slot, n) for b, x in zip(buffers[j], values, strict=True)]
                        buffers = [*buffers[:j], places, *buffers[j + 1 :]]
                    found.append(stats)
                return (x_BLD, buffers), _joined(found)

            start = x_BLD, None if kept is None else kept[i]
            (x_BLD, buffers), report = lax.scan(turn, start, jnp.arange(loop.turns))
            written.append(buffers)
            reports.append(jax.tree.map(lambda s: s.reshape(-1, *s.shape[2:]), report))
        return x_BLD, None if kept is None else written, _joined(reports)

    def backward(
        self, own: StageState, total: Tree, chunk: jax.Array, seen: Seen, kept: Buffers, slot: jax.Array,
        ct_BLD: jax.Array, cotangent: jax.Array, stored: Buffers | None, place: jax.Array,
    ) -> tuple[jax.Array, Tree, Buffers | None]:  # fmt: skip
        """Back through a chunk from what `forward` kept in `slot`: (cotangent of its input, sums, `stored`).

        Gradients of weights are added to the sums `total`; with buffers `stored` what `backward_weights` needs is
        written there into `place` instead, nowhere where it is -1.
        """
        flow, written = self._flow(*seen), list[Any]()
        for i, loop in reversed(list(enumerate(self.loops))):

            def turn(carry: Any, n: jax.Array, i: int = i, loop: Loop = loop) -> tuple[Any, None]:
                ct_BLD, total, buffers = carry
                for j, segment in reversed(list(enumerate(loop.segments))):
                    known = BackwardInputs(self._part(own, chunk, segment, n), flow, self._kept(kept[i][j], slot, n))
                    if buffers is None:
                        ct_BLD, gradient = self._back(segment, known, (ct_BLD, cotangent))
                        total = self._add(total, gradient, chunk, segment, n)
                    else:
                        ct_BLD, values = self._halves(segment, known).inputs(known, (ct_BLD, cotangent))
                        places = [put(b, value, place, n) for b, value in zip(buffers[j], values, strict=True)]
                        buffers = [*buffers[:j], places, *buffers[j + 1 :]]
                return (ct_BLD, total, buffers), None

            start = ct_BLD, total, None if stored is None else stored[i]
            (ct_BLD, total, buffers), _ = lax.scan(turn, start, jnp.arange(loop.turns), reverse=True)
            written.insert(0, buffers)
        return ct_BLD, total, None if stored is None else written

    def backward_weights(
        self, own: StageState, total: Tree, chunk: jax.Array, seen: Seen, kept: Buffers, slot: jax.Array,
        stored: Buffers, place: jax.Array,
    ) -> Tree:  # fmt: skip
        """`total` with the gradients of a chunk's weights added, from what `backward` stored; none if place is -1."""
        flow = self._flow(*seen)
        for i, loop in enumerate(self.loops):

            def turn(total: Tree, n: jax.Array, i: int = i, loop: Loop = loop) -> tuple[Tree, None]:
                for j, segment in enumerate(loop.segments):
                    known = BackwardInputs(self._part(own, chunk, segment, n), flow, self._kept(kept[i][j], slot, n))
                    gradient = self._halves(segment, known).weights(known, [take(b, place, n) for b in stored[i][j]])
                    gradient = jax.tree.map(lambda g: jnp.where(place >= 0, g, 0), gradient)
                    total = self._add(total, gradient, chunk, segment, n)
                return total, None

            total, _ = lax.scan(turn, total, jnp.arange(loop.turns))
        return total

    # Shapes of buffers ----------------------------------------------------------------------------------------------

    def stats(self, own: StageState, x_BLD: jax.Array, seen: Seen) -> Tree:
        """Shapes of the stats of a stack's layers in a chunk, by stack."""
        return jax.eval_shape(lambda: self.forward(own, jnp.int32(0), x_BLD, seen, None, jnp.int32(-1))[2])

    def kept(self, own: StageState, x_BLD: jax.Array, seen: Seen) -> Tree:
        """Shapes of what `forward` keeps of each segment [turns, ...]."""
        return self._shapes(lambda segment: self._known(own, segment, x_BLD, seen).kept)

    def stored(self, own: StageState, x_BLD: jax.Array, seen: Seen) -> Tree:
        """Shapes of what `backward` stores of each segment [turns, ...]."""

        def values(segment: Segment) -> list[jax.Array]:
            known = self._known(own, segment, x_BLD, seen)
            return self._halves(segment, known).inputs(known, (x_BLD, jnp.float32(0)))[1]

        return self._shapes(values)

    def _shapes(self, values: Callable[[Segment], list[jax.Array]]) -> Tree:
        def one(segment: Segment, turns: int) -> list[jax.ShapeDtypeStruct]:
            found = jax.eval_shape(partial(values, segment))
            return [jax.ShapeDtypeStruct((turns, *value.shape), value.dtype) for value in found]

        return [[one(segment, loop.turns) for segment in loop.segments] for loop in self.loops]

    def _known(self, own: StageState, segment: Segment, x_BLD: jax.Array, seen: Seen) -> BackwardInputs:
        flow = self._flow(*seen)
        part = self._part(own, jnp.int32(0), segment, jnp.int32(0))
        return BackwardInputs(part, flow, self._keep(segment, part, x_BLD, flow)[1])

    # One segment ----------------------------------------------------------------------------------------------------

    def _layers(
        self, segment: Segment, part: StageState, x_BLD: jax.Array, flow: Flow
    ) -> tuple[tuple[jax.Array, jax.Array], Tree]:
        """Its layers in turn: ((x, their objective), stats by stack); a place without a layer passes x on."""
        objective, reports = jnp.float32(0), []
        at = dict.fromkeys(segment.stacks, 0)
        for stack in segment.stacks:
            i, block = at[stack], self.model.block(self.weights, stack)
            layer, row, there = jax.tree.map(lambda a, i=i: a[i], tuple(tree[stack] for tree in part))
            y_BLD, stats = block(self._pin_layer(stack, layer), x_BLD, flow, row)
            if not self.stages.real[stack].all():
                y_BLD = jnp.where(there, y_BLD, x_BLD)
                stats = jax.tree.map(lambda s, there=there: jnp.where(there, s, jnp.zeros_like(s)), stats)
            x_BLD, objective = y_BLD, objective + stats.get("objective", jnp.float32(0))
            reports.append({stack: jax.tree.map(lambda s: s[None], stats)})
            at[stack] += 1
        return (x_BLD, objective), _joined(reports)

    def _keep(
        self, segment: Segment, part: StageState, x_BLD: jax.Array, flow: Flow
    ) -> tuple[jax.Array, list[jax.Array], Tree]:
        with save_residuals(residual_names(self.remat)) as beside:
            (y_BLD, _), stats = self._layers(segment, part, x_BLD, flow)
        return y_BLD, [x_BLD, *beside], stats

    def _back(
        self, segment: Segment, known: BackwardInputs, cotangents: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, Tree]:
        """(cotangent of the input, gradient of weights) from those of the output and of the objective."""
        own, flow, (x_BLD, *beside) = known

        def run(weights: Tree, x_BLD: jax.Array) -> Any:
            return self._layers(segment, own._replace(weights=weights), x_BLD, flow)

        with restore_residuals(residual_names(self.remat), beside):
            _, pull, _ = jax.vjp(run, own.weights, x_BLD, has_aux=True)
        gradient, gx_BLD = pull((cotangents[0], cotangents[1].astype(jnp.float32)))
        return gx_BLD, gradient

    def _halves(self, segment: Segment, known: BackwardInputs) -> Halves:
        return halve(partial(self._back, segment), known, (known.kept[0], jnp.float32(0)))

    # Rows of a stage ------------------------------------------------------------------------------------------------

    def _place(self, stack: str, chunk: jax.Array, segment: Segment, n: jax.Array) -> jax.Array:
        first, a_turn = segment.at[stack]
        place = first + n * a_turn
        # One chunk: a place that is the same on all stages, so that a slice stays a slice under vmap.
        return place if self.stages.shape[1] == 1 else place + jnp.maximum(chunk, 0) * self.stages.rows[stack].shape[2]

    def _part(self, own: StageState, chunk: jax.Array, segment: Segment, n: jax.Array) -> StageState:
        """What a segment needs of what the stage owns, in turn n of its loop."""
        found: dict[str, StageState] = {}
        for stack in segment.at:
            place, size = self._place(stack, chunk, segment, n), segment.stacks.count(stack)
            here = StageState(*(tree[stack] for tree in own))
            cut = partial(lax.dynamic_slice_in_dim, start_index=place, slice_size=size)
            found[stack] = jax.tree.map(cut, here)
        return StageState(*({stack: part[i] for stack, part in found.items()} for i in range(len(StageState._fields))))

    def _add(self, total: Tree, gradient: Tree, chunk: jax.Array, segment: Segment, n: jax.Array) -> Tree:
        def one(place: jax.Array, total: jax.Array, gradient: jax.Array) -> jax.Array:
            old = lax.dynamic_slice_in_dim(total, place, len(gradient))
            return lax.dynamic_update_slice_in_dim(total, old + gradient.astype(jnp.float32), place, 0)

        total = dict(total)
        for stack in segment.at:
            # In float32 from here: the sum itself, not the addend, decides where it lies.
            addend = self._pin_layers(stack, gradient[stack])
            total[stack] = jax.tree.map(partial(one, self._place(stack, chunk, segment, n)), total[stack], addend)
        return total

    def _pin_layer(self, stack: str, weights: Tree) -> Tree:
        """One layer's weights, or their gradient, as the layout cuts them."""
        return weights if self.specs is None else pin(
            weights, jax.tree.map(lambda s: PartitionSpec(*s[1:]), self.specs[stack])
        )  # fmt: skip

    def _pin_layers(self, stack: str, weights: Tree) -> Tree:
        return weights if self.specs is None else pin(
            weights, jax.tree.map(lambda s: PartitionSpec(None, *s[1:]), self.specs[stack])
        )  # fmt: skip


def pin(tree: Tree, specs: Tree) -> Tree:
    """Arrays constrained to their PartitionSpecs; as they are outside a mesh."""
    mesh = active_mesh()
    if mesh is None:
        return tree
    return jax.tree.map(lambda a, s: lax.with_sharding_constraint(a, NamedSharding(mesh, s)), tree, specs)


def _joined(reports: Sequence[Mapping[str, Sums]]) -> dict[str, Sums]:
    """Reports of parts of a chunk, by stack, one after another; what reports nothing is left out."""
    found: dict[str, list[Sums]] = {}
    for report in reports:
        for stack, stats in report.items():
            if stats:
                found.setdefault(stack, []).append(stats)
    return {stack: jax.tree.map(lambda *each: jnp.concatenate(each), *parts) for stack, parts in found.items()}
