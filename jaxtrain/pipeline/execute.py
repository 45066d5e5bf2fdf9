"""Runs a schedule: stages are one vmapped dimension over the pipe axis, ticks are scans that read the table.

All stages run the same program in every tick, so no control flow differs between devices and every collective inside
a layer composes; moving on is a shift of the stage dimension, a collective-permute between neighbours. The forward
slot keeps the input of every `every` layers; the backward slot recomputes them from it. Embedding and head belong to no
stage: they are ordinary operations over all devices, their vocabulary cut over the pipe axis too.

Legend: P stages, v chunks, J layer places of a chunk, E layers of a kept segment, M microbatches, B rows, L length,
D model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from jaxtrain.mesh.rules import active_mesh, constrain
from jaxtrain.nn.layers import Flow, Totals
from jaxtrain.nn.model import Model
from jaxtrain.pipeline.halves import Halves, halve
from jaxtrain.pipeline.stages import LAYERS, Stages
from jaxtrain.pipeline.table import Schedule

Tree = Any
Batch = dict[str, jax.Array]
Sums = dict[str, jax.Array]
Carry = dict[str, Any]
Row = dict[str, Any]
Head = Callable[[Tree, jax.Array, Batch], tuple[jax.Array, Sums]]
"""(weights, residual stream after the last layer, the microbatch's fields) -> (objective, sums) of a microbatch."""

PIPE = "pipe"
RESIDUAL = ("batch", "residual_length", "hidden")


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A model cut into stages, as one call of `gradients` or `forward` sees it.

    weights: in stage order, compute dtype; specs: their PartitionSpecs, None outside a mesh; batch fields: [M, B, L];
    totals: what is known of the global batch, those of layers in the model's order; every: layers whose input alone is
    kept.
    """

    model: Model
    stages: Stages
    weights: Tree
    specs: Tree
    batch: Batch
    totals: Totals = field(default_factory=dict)
    every: int = 1

    def gradients(self, schedule: Schedule, head: Head, slope: jax.Array | float) -> tuple[Tree, Sums]:
        """float32 gradients of the sum over microbatches of head's objective + slope x the layers' objectives, sums.

        Gradients come in stage order, sums of layers in the model's order.
        """
        carry = self._start(schedule, head, training=True)
        for phase in schedule.phases:
            rows = _with_ends(schedule.rows(phase))
            tick = partial(self._tick, kinds=phase.kinds, head=head, slope=slope, heads=rows["head_microbatch"] >= 0)
            carry = _scan(tick, carry, rows)
        gradients = {**carry["outer"], LAYERS: self._join(carry["layers"])}
        return gradients, self._sums(carry)

    def forward(self, schedule: Schedule, head: Head) -> Sums:
        """Sums over all microbatches of what head and layers report; `schedule` has forward work alone."""
        rows = _with_ends(schedule.columns)
        tick = partial(self._tick, kinds="F", head=head, slope=None, heads=rows["head_microbatch"] >= 0)
        return self._sums(_scan(tick, self._start(schedule, head, training=False), rows))

    # Shapes of the carry --------------------------------------------------------------------------------------------

    def _start(self, schedule: Schedule, head: Head, training: bool) -> Carry:
        P, v, J = self.stages.shape
        rows, length = self.batch["tokens"].shape[1:]
        dtype = self.layers_dtype
        x_BLD = jnp.zeros((rows, length, self.model.config.d_model), dtype)
        segments = J // self.every
        stats = jax.eval_shape(lambda: self._layer_stats(x_BLD))
        sums = jax.eval_shape(lambda: head(self.weights, x_BLD, self._fields(jnp.int32(0)))[1])
        zeros = partial(jax.tree.map, lambda leaf: jnp.zeros(leaf.shape, leaf.dtype))
        carry: Carry = {
            "arrived": jnp.zeros((P, schedule.input_slots, *x_BLD.shape), dtype),
            "stats": jax.tree.map(lambda s: jnp.zeros((P, v * J, *s.shape), s.dtype), stats),
            "sums": zeros(sums),
        }
        if training:
            float32 = partial(jax.tree.map, lambda leaf: jnp.zeros(leaf.shape, jnp.float32))
            carry |= {
                "kept": jnp.zeros((P, schedule.kept_slots, segments, *x_BLD.shape), dtype),
                "cotangents": jnp.zeros((P, schedule.cotangent_slots, *x_BLD.shape), dtype),
                "layers": float32(self.layers),
                "outer": float32(self.outer),
            }
            if schedule.split:
                carry["stored"] = [
                    jnp.zeros((P, schedule.stored_slots, segments, *one.shape), one.dtype)
                    for one in jax.eval_shape(lambda: self._stored(x_BLD))
                ]
        return self._pin_carry(carry)

    def _pin_carry(self, carry: Carry) -> Carry:
        """Buffers are cut like the residual stream, sums of gradients like the weights."""
        out = {**carry, "stored": list(carry["stored"])} if "stored" in carry else dict(carry)
        for name in ("arrived", "cotangents", "kept"):
            if name in carry:
                whole = (None,) * (carry[name].ndim - 4)
                out[name] = constrain(carry[name], LAYERS, *whole, *RESIDUAL)
        if "stored" in carry and (mesh := active_mesh()) is not None:
            # Between the halves of a backward are values of any kind: each lies as the operation that made it says.
            for i, one in enumerate(carry["stored"]):
                spec = PartitionSpec(PIPE, *(PartitionSpec.UNCONSTRAINED,) * (one.ndim - 1))
                out["stored"][i] = lax.with_sharding_constraint(one, NamedSharding(mesh, spec))
        if "layers" in carry and self.specs is not None:
            out["layers"] = _pin(carry["layers"], jax.tree.map(_by_stage, self.specs[LAYERS]))
            out["outer"] = _pin(carry["outer"], {k: s for k, s in self.specs.items() if k != LAYERS})
        return out

    @cached_property
    def outer(self) -> Tree:
        """Weights outside the stages."""
        return {name: part for name, part in self.weights.items() if name != LAYERS}

    @cached_property
    def layers(self) -> Tree:
        """Weights of the stages, [P, v J, ...]."""
        P, v, J = self.stages.shape
        cut = jax.tree.map(lambda w: w.reshape(P, v * J, *w.shape[1:]), self.weights[LAYERS])
        return cut if self.specs is None else _pin(cut, jax.tree.map(_by_stage, self.specs[LAYERS]))

    @property
    def layers_dtype(self) -> Any:
        """Dtype of the residual stream."""
        return jax.tree.leaves(self.weights[LAYERS])[0].dtype

    def _join(self, layers: Tree) -> Tree:
        return jax.tree.map(lambda g: g.reshape(-1, *g.shape[2:]), layers)

    def _sums(self, carry: Carry) -> Sums:
        P, v, J = self.stages.shape
        stats = {k: self.stages.to_model(s.reshape(P * v * J, *s.shape[2:])) for k, s in carry["stats"].items()}
        return {**carry["sums"], **stats}

    # One tick -------------------------------------------------------------------------------------------------------

    def _tick(
        self, carry: Carry, row: Row, kinds: str, head: Head, slope: Any, heads: NDArray[np.bool_]
    ) -> tuple[Carry, None]:
        y_PBLD = gx_PBLD = None
        if "F" in kinds:
            carry, y_PBLD = self._forward(carry, row)
            carry = _where(heads, row["head_microbatch"] >= 0, partial(self._head, head), carry, y_PBLD, row)
        if "B" in kinds:
            carry, gx_PBLD = self._backward(carry, row, slope)
        if "W" in kinds:
            carry = self._backward_weights(carry, row)
        if y_PBLD is not None:
            carry["arrived"] = _put(carry["arrived"], self._shift(y_PBLD, 1), row["receive_input"])
        if gx_PBLD is not None:
            carry["cotangents"] = _put(carry["cotangents"], self._shift(gx_PBLD, -1), row["receive_cotangent"])
        return self._pin_carry(carry), None

    def _forward(self, carry: Carry, row: Row) -> tuple[Carry, jax.Array]:
        m_P, chunk_P = row["f_microbatch"], row["f_chunk"]
        first = self._fields(row["entering"])
        entered_BLD = self.model.enter(self.weights, first["tokens"], first["positions"])
        x_PBLD = _take(carry["arrived"], row["f_input"])
        x_PBLD = constrain(
            jnp.where(_at_stage(0, x_PBLD) & (row["entering"] >= 0), entered_BLD, x_PBLD), LAYERS, *RESIDUAL
        )
        y_PBLD, kept, stats = _over_stages(self._stage_forward)(
            self.layers, *self._of_stage(chunk_P, m_P), x_PBLD, *self._seen(m_P)
        )
        y_PBLD = constrain(y_PBLD, LAYERS, *RESIDUAL)
        carry = dict(carry)
        if "kept" in carry:
            carry["kept"] = _put(carry["kept"], kept, row["f_kept"])
        on_P = m_P >= 0
        carry["stats"] = jax.tree.map(
            partial(_add_chunk, chunk_P=chunk_P, chunks=self.stages.shape[1], on_P=on_P), carry["stats"], stats
        )
        return carry, y_PBLD

    def _head(self, head: Head, carry: Carry, y_PBLD: jax.Array, row: Row) -> Carry:
        """Loss of the microbatch that leaves the last stage; in training its gradients and cotangent too."""
        x_BLD = constrain(_of_one_stage(y_PBLD, -1), *RESIDUAL)
        rows = self._fields(row["head_microbatch"])
        if "kept" not in carry:
            sums = head(self.weights, x_BLD, rows)[1]
            return {**carry, "sums": jax.tree.map(jnp.add, carry["sums"], sums)}

        def objective(outer: Tree, x_BLD: jax.Array) -> tuple[jax.Array, Sums]:
            return head({**self.weights, **outer}, x_BLD, rows)

        value, pull, sums = jax.vjp(objective, self.outer, x_BLD, has_aux=True)
        outer, gx_BLD = pull(jnp.ones_like(value))
        slots_P = jnp.where(_at_stage(-1, y_PBLD)[:, 0, 0, 0], row["head_cotangent"], -1)
        everywhere = constrain(jnp.broadcast_to(gx_BLD, y_PBLD.shape), LAYERS, *RESIDUAL)
        return {
            **carry,
            "sums": jax.tree.map(jnp.add, carry["sums"], sums),
            "outer": _add(carry["outer"], outer),
            "cotangents": _put(carry["cotangents"], everywhere, slots_P),
        }

    def _backward(self, carry: Carry, row: Row, slope: Any) -> tuple[Carry, jax.Array]:
        m_P, chunk_P = row["b_microbatch"], row["b_chunk"]
        on_P = m_P >= 0
        ct_PBLD = _take(carry["cotangents"], row["b_cotangent"])
        ct_PBLD = constrain(jnp.where(_wide(on_P, ct_PBLD), ct_PBLD, 0), LAYERS, *RESIDUAL)
        gx_PBLD, layers, stored = _over_stages(partial(self._stage_backward, split="stored" in carry))(
            self.layers, carry["layers"], *self._of_stage(chunk_P, m_P),
            carry["kept"], jnp.maximum(row["b_kept"], 0), ct_PBLD, jnp.where(on_P, slope, 0.0), *self._seen(m_P),
        )  # fmt: skip
        gx_PBLD = constrain(gx_PBLD, LAYERS, *RESIDUAL)
        carry = {**carry, "layers": layers}
        if "stored" in carry:
            carry["stored"] = [
                _put(buffer, one, row["b_stored"]) for buffer, one in zip(carry["stored"], stored, strict=True)
            ]
        gx_BLD = constrain(jnp.where(row["leaving"] >= 0, _of_one_stage(gx_PBLD, 0), 0), *RESIDUAL)
        rows = self._fields(row["leaving"])

        def enter(outer: Tree) -> jax.Array:
            return self.model.enter({**self.weights, **outer}, rows["tokens"], rows["positions"])

        (outer,) = jax.vjp(enter, self.outer)[1](gx_BLD)
        return {**carry, "outer": _add(carry["outer"], outer)}, gx_PBLD

    def _backward_weights(self, carry: Carry, row: Row) -> Carry:
        m_P, chunk_P = row["w_microbatch"], row["w_chunk"]
        on_P = m_P >= 0
        layers = _over_stages(self._stage_weights)(
            self.layers, carry["layers"], *self._of_stage(chunk_P, m_P),
            carry["kept"], jnp.maximum(row["w_kept"], 0), carry["stored"], jnp.maximum(row["w_stored"], 0), on_P,
            *self._seen(m_P),
        )  # fmt: skip
        return {**carry, "layers": layers}

    def _fields(self, m: jax.Array) -> Batch:
        """One microbatch's fields [B, L]."""
        return {name: field[jnp.maximum(m, 0)] for name, field in self.batch.items()}

    def _shift(self, x_PBLD: jax.Array, by: int) -> jax.Array:
        """Every stage's x to the next (by 1) or the one before (by -1); with chunks the ends meet."""
        return constrain(jnp.roll(x_PBLD, by, 0), LAYERS, *RESIDUAL)

    def _of_stage(self, chunk_P: jax.Array, m_P: jax.Array) -> tuple[Any, Any, jax.Array]:
        """Per stage: its layers' data and which places are real [P, v J], and the first place of the chunk [P]."""
        P, v, J = self.stages.shape
        of_place = np.maximum(self.stages.layers, 0).reshape(P, v * J)
        data = jax.tree.map(lambda rows: jnp.take(jnp.asarray(rows), of_place, axis=0), self.model.data(self.totals))
        return data, jnp.asarray(self.stages.real), jnp.maximum(chunk_P, 0) * J

    def _seen(self, m_P: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Positions and segments of the microbatch at each stage [P, B, L]."""
        fields = (jnp.take(self.batch[name], jnp.maximum(m_P, 0), axis=0) for name in ("positions", "segments"))
        positions, segments = (constrain(field, LAYERS, "batch", "length") for field in fields)
        return positions, segments

    def _flow(self, positions_BL: jax.Array, segments_BL: jax.Array) -> Flow:
        return self.model.flow(self.weights, positions_BL, segments_BL, self.totals)

    # One stage, vmapped ---------------------------------------------------------------------------------------------

    def _layer_stats(self, x_BLD: jax.Array) -> Sums:
        """What one layer reports (for its shapes)."""
        flow = self._flow(self.batch["positions"][0], self.batch["segments"][0])
        layers = self.weights[LAYERS], self.model.data(self.totals)
        weights, data = jax.tree.map(lambda a: jnp.asarray(a)[0], layers)
        return self.model.block(self.weights)(weights, x_BLD, flow, data)[1]

    def _segment(
        self, flow: Any, data: Any, real: jax.Array, weights: Tree, x_BLD: jax.Array, unrolled: bool = False
    ) -> Any:
        """E layers in turn: ((x, their objective), stats [E, ...]); a place without a layer passes x on."""
        block = self.model.block(self.weights)

        def layer(x_BLD: jax.Array, slices: Any) -> tuple[jax.Array, Sums]:
            weights, row, there = slices
            y_BLD, stats = block(self._pin_layer(weights), x_BLD, flow, row)
            if not self.stages.real.all():
                y_BLD = jnp.where(there, y_BLD, x_BLD)
                stats = jax.tree.map(lambda s: jnp.where(there, s, jnp.zeros_like(s)), stats)
            return y_BLD, stats

        if unrolled or self.every == 1:
            found = []
            for i in range(self.every):
                x_BLD, stats = layer(x_BLD, jax.tree.map(lambda a, i=i: a[i], (weights, data, real)))
                found.append(stats)
            stats = jax.tree.map(lambda *each: jnp.stack(each), *found)
        else:
            x_BLD, stats = lax.scan(layer, x_BLD, (weights, data, real))
        return (x_BLD, jnp.sum(stats.get("objective", jnp.float32(0)))), stats

    def _stage_forward(
        self, layers: Tree, data: Any, real: jax.Array, start: jax.Array, x_BLD: jax.Array, *seen: jax.Array
    ) -> tuple[jax.Array, jax.Array, Sums]:
        flow = self._flow(*seen)

        def segment(x_BLD: jax.Array, n: jax.Array) -> Any:
            weights, row, there = self._slices((layers, data, real), start, n)
            (y_BLD, _), stats = self._segment(flow, row, there, weights, x_BLD)
            return y_BLD, (x_BLD, stats)

        y_BLD, (kept, stats) = lax.scan(segment, x_BLD, self._segments)
        return y_BLD, kept, jax.tree.map(lambda s: s.reshape(-1, *s.shape[2:]), stats)

    def _segment_backward(
        self, known: tuple[Any, ...], fresh: tuple[jax.Array, jax.Array], unrolled: bool = False
    ) -> tuple[jax.Array, Tree]:
        """Cotangent of a segment's input and gradient of its weights; `fresh` are those of its output and objective."""
        flow, data, real, weights, x_BLD = known
        run = partial(self._segment, flow, data, real, unrolled=unrolled)
        (_, value), pull, _ = jax.vjp(run, weights, x_BLD, has_aux=True)
        gradient, gx_BLD = pull((fresh[0], fresh[1].astype(value.dtype)))
        return gx_BLD, gradient

    def _halves(self, known: tuple[Any, ...], x_BLD: jax.Array) -> Halves:
        # A loop over layers would be one operation, which no cut can part.
        return halve(partial(self._segment_backward, unrolled=True), known, (x_BLD, jnp.float32(0)))

    def _stored(self, x_BLD: jax.Array) -> list[jax.Array]:
        """What goes from one half of a segment's backward to the other (for its shapes)."""
        flow = self._flow(self.batch["positions"][0], self.batch["segments"][0])
        data, real, _ = self._of_stage(jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32))
        first = jax.tree.map(lambda a: a[0, : self.every], (data, real, self.layers))
        known = (flow, *first, x_BLD)
        return self._halves(known, x_BLD).inputs(known, (x_BLD, jnp.float32(0)))[1]

    def _stage_backward(
        self, layers: Tree, total: Tree, data: Any, real: jax.Array, start: jax.Array, kept: jax.Array,
        slot: jax.Array, ct_BLD: jax.Array, slope: jax.Array, *seen: jax.Array, split: bool,
    ) -> tuple[jax.Array, Tree, list[jax.Array] | None]:  # fmt: skip
        """Back through a chunk: cotangent of its input, gradients added to `total` or what `_stage_weights` needs."""
        flow = self._flow(*seen)

        def segment(carry: tuple[jax.Array, Tree], n: jax.Array) -> Any:
            ct_BLD, total = carry
            weights, row, there = self._slices((layers, data, real), start, n)
            known = (flow, row, there, weights, kept[slot, n])
            if split:
                gx_BLD, stored = self._halves(known, ct_BLD).inputs(known, (ct_BLD, slope))
                return (gx_BLD, total), stored
            gx_BLD, gradient = self._segment_backward(known, (ct_BLD, slope))
            return (gx_BLD, self._add_slice(total, gradient, start, n)), None

        (gx_BLD, total), stored = lax.scan(segment, (ct_BLD, total), self._segments, reverse=True)
        return gx_BLD, total, stored

    def _stage_weights(
        self, layers: Tree, total: Tree, data: Any, real: jax.Array, start: jax.Array, kept: jax.Array,
        slot: jax.Array, stored: list[jax.Array], place: jax.Array, on: jax.Array, *seen: jax.Array,
    ) -> Tree:  # fmt: skip
        """Gradients of a chunk's weights from what its backward stored, added to `total`."""
        flow = self._flow(*seen)

        def segment(total: Tree, n: jax.Array) -> tuple[Tree, None]:
            weights, row, there = self._slices((layers, data, real), start, n)
            known = (flow, row, there, weights, kept[slot, n])
            gradient = self._halves(known, known[-1]).weights(known, [one[place, n] for one in stored])
            gradient = jax.tree.map(lambda g: jnp.where(on, g, 0), gradient)
            return self._add_slice(total, gradient, start, n), None

        return lax.scan(segment, total, self._segments)[0]

    @property
    def _segments(self) -> jax.Array:
        return jnp.arange(self.stages.shape[2] // self.every)

    def _at(self, start: jax.Array, n: jax.Array) -> jax.Array:
        # One chunk: a place that is the same on all stages, so that a slice stays a slice under vmap.
        return n * self.every + (start if self.stages.shape[1] > 1 else 0)

    def _slices(self, tree: Tree, start: jax.Array, n: jax.Array) -> Tree:
        at = self._at(start, n)
        return jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, at, self.every), tree)

    def _add_slice(self, total: Tree, gradient: Tree, start: jax.Array, n: jax.Array) -> Tree:
        at = self._at(start, n)

        def one(total: jax.Array, gradient: jax.Array) -> jax.Array:
            old = lax.dynamic_slice_in_dim(total, at, self.every)
            return lax.dynamic_update_slice_in_dim(total, old + gradient.astype(jnp.float32), at, 0)

        # In float32 from here: the sum itself, not the addend, decides where it lies.
        return jax.tree.map(one, total, self._pin_layers(gradient))

    def _pin_layer(self, weights: Tree) -> Tree:
        """One layer's weights, or their gradient, as the layout cuts them."""
        if self.specs is None:
            return weights
        return _pin(weights, jax.tree.map(lambda s: PartitionSpec(*s[1:]), self.specs[LAYERS]))

    def _pin_layers(self, weights: Tree) -> Tree:
        if self.specs is None:
            return weights
        return _pin(weights, jax.tree.map(lambda s: PartitionSpec(None, *s[1:]), self.specs[LAYERS]))


def _with_ends(columns: dict[str, NDArray[np.int32]]) -> dict[str, NDArray[np.int32]]:
    """Columns and, for each tick, the microbatch that the first virtual stage takes in and gives back, -1 for none.

    Of their own, since reading stage 0's entry of a column that is cut over stages would be a message.
    """
    first = {
        name: np.where(columns[f"{kind}_chunk"][:, 0] == 0, columns[f"{kind}_microbatch"][:, 0], -1)
        for name, kind in (("entering", "f"), ("leaving", "b"))
    }
    return columns | first


def _scan(tick: Callable[..., Any], carry: Carry, rows: Row) -> Carry:
    return lax.scan(tick, carry, jax.tree.map(jnp.asarray, rows))[0]


def _over_stages(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.vmap(function, spmd_axis_name=PIPE)


def _where(flags: NDArray[np.bool_], on: jax.Array, function: Callable[..., Carry], carry: Carry, *args: Any) -> Carry:
    """function(carry, ...) in those ticks of a phase that want it; a branch only where ticks differ."""
    if flags.all():
        return function(carry, *args)
    if not flags.any():
        return carry
    return lax.cond(on, function, lambda carry, *_: carry, carry, *args)


def _wide(flag_P: jax.Array, like: jax.Array) -> jax.Array:
    return flag_P.reshape(-1, *(1,) * (like.ndim - 1))


def _at_stage(stage: int, like: jax.Array) -> jax.Array:
    P = like.shape[0]
    return _wide(jnp.arange(P) == stage % P, like)


def _of_one_stage(x_PBLD: jax.Array, stage: int) -> jax.Array:
    """x of one stage on all: a masked sum, since a slice would gather every stage's x."""
    masked = jnp.where(_at_stage(stage, x_PBLD), x_PBLD, 0)
    return lax.reduce(masked, jnp.zeros((), masked.dtype), lax.add, (0,))


def _take(buffer: jax.Array, slot_P: jax.Array) -> jax.Array:
    return _over_stages(lambda b, i: lax.dynamic_index_in_dim(b, i, 0, keepdims=False))(buffer, jnp.maximum(slot_P, 0))


def _put(buffer: jax.Array, x: jax.Array, slot_P: jax.Array) -> jax.Array:
    """x into each stage's slot; nowhere where it is -1."""

    def one(buffer: jax.Array, x: jax.Array, slot: jax.Array) -> jax.Array:
        at = jnp.maximum(slot, 0)
        old = lax.dynamic_index_in_dim(buffer, at, 0, keepdims=False)
        return lax.dynamic_update_index_in_dim(buffer, jnp.where(slot >= 0, x, old), at, 0)

    return _over_stages(one)(buffer, x, slot_P)


def _add_chunk(total: jax.Array, stats: jax.Array, chunk_P: jax.Array, chunks: int, on_P: jax.Array) -> jax.Array:
    """Stats [P, J, ...] added to those of their chunk in [P, v J, ...]."""
    by_chunk = total.reshape(len(total), chunks, -1, *total.shape[2:])
    here = on_P[:, None] & (chunk_P[:, None] == jnp.arange(chunks))
    added = by_chunk + jnp.where(here.reshape(*here.shape, *(1,) * (stats.ndim - 1)), stats[:, None], 0)
    return added.reshape(total.shape)


def _add(total: Tree, gradient: Tree) -> Tree:
    return jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, gradient)


def _pin(tree: Tree, specs: Tree) -> Tree:
    mesh = active_mesh()
    if mesh is None:
        return tree
    return jax.tree.map(lambda a, s: lax.with_sharding_constraint(a, NamedSharding(mesh, s)), tree, specs)


def _by_stage(spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(*spec[:1], None, *spec[1:])
