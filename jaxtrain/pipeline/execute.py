"""Runs a schedule: stages are one vmapped dimension over the pipe axis, ticks are scans that read the table.

All stages run the same program in every tick, so no control flow differs between devices and every collective inside
a layer composes; moving on is a shift of the stage dimension, a collective-permute between neighbours. The forward
slot keeps the inputs of layers (chunk.py); the backward slot recomputes them from it. Embedding and head belong to no
stage: they are ordinary operations over all devices, their vocabulary cut over the pipe axis too.

Legend: P stages, v chunks, J' places of a chunk for layers of one stack, M microbatches, B rows, L length, D model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from jaxtrain.mesh.constraints import active_mesh, constrain
from jaxtrain.pipeline.buffers import ON_DEVICE, RESIDUAL, SlotStore
from jaxtrain.pipeline.chunk import Chunk, StageState, pin
from jaxtrain.pipeline.table import Schedule

Tree = Any
Batch = dict[str, jax.Array]
Sums = dict[str, Any]
Carry = dict[str, Any]
TickRow = dict[str, Any]
Head = Callable[[Tree, jax.Array, Batch], tuple[jax.Array, Sums]]
"""(weights, residual stream after the last layer, the microbatch's fields) -> (objective, sums) of a microbatch."""

PIPE, STAGES = "pipe", "layers"
"""The mesh axis, and the logical name of a dim that is cut over it."""


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A model cut into stages, as one call of `gradients` or `forward` sees it: `chunk` says what stages do.

    batch fields: [M, B, L].
    """

    chunk: Chunk
    batch: Batch

    def gradients(self, schedule: Schedule, head: Head, cotangent: jax.Array | float) -> tuple[Tree, Sums]:
        """float32 gradients of the sum over microbatches of head's objective + slope x the layers' objectives, sums.

        Gradients come in stage order, sums of layers in the model's order.
        """
        carry = self._start(schedule, head, training=True)
        for phase in schedule.phases:
            rows = _with_ends(schedule.rows(phase))
            tick = partial(
                self._tick, kinds=phase.kinds, head=head, cotangent=cotangent, heads=rows["head_microbatch"] >= 0
            )
            carry = _scan(tick, carry, rows)
        layers = jax.tree.map(lambda g: g.reshape(-1, *g.shape[2:]), carry["layers"])
        return {**carry["outer"], **layers}, self._sums(carry)

    def forward(self, schedule: Schedule, head: Head) -> Sums:
        """Sums over all microbatches of what head and layers report; `schedule` has forward work alone."""
        rows = _with_ends(schedule.columns)
        tick = partial(self._tick, kinds="F", head=head, cotangent=None, heads=rows["head_microbatch"] >= 0)
        return self._sums(_scan(tick, self._start(schedule, head, training=False), rows))

    # Shapes of the carry --------------------------------------------------------------------------------------------

    def _start(self, schedule: Schedule, head: Head, training: bool) -> Carry:
        P, v, _ = self.chunk.stages.shape
        rows, length = self.batch["tokens"].shape[1:]
        x_BLD = jnp.zeros((rows, length, self.chunk.model.config.d_model), self._dtype)
        seen = self.batch["positions"][0], self.batch["segments"][0]
        one = jax.tree.map(lambda a: a[0], self.own), x_BLD, seen
        sums = jax.eval_shape(lambda: head(self.chunk.weights, x_BLD, self._fields(jnp.int32(0)))[1])
        zeros = partial(jax.tree.map, lambda leaf: jnp.zeros(leaf.shape, leaf.dtype))
        carry: Carry = {
            "arrived": jnp.zeros((P, schedule.input_slots, *x_BLD.shape), x_BLD.dtype),
            "stats": jax.tree.map(
                lambda s: jnp.zeros((P, v * s.shape[0], *s.shape[1:]), s.dtype), self.chunk.stats(*one)
            ),
            "sums": zeros(sums),
        }
        if training:
            float32 = partial(jax.tree.map, lambda leaf: jnp.zeros(leaf.shape, jnp.float32))

            def slots(slot_store: SlotStore, count: int, shapes: Tree) -> Tree:
                return jax.tree.map(lambda one: slot_store.make(P, one, count), shapes)

            carry |= {
                "kept": slots(self.chunk.slot_store, schedule.kept_slots, self.chunk.kept(*one)),
                "cotangents": jnp.zeros((P, schedule.cotangent_slots, *x_BLD.shape), x_BLD.dtype),
                "layers": float32(self.own.weights),
                "outer": float32(self.outer),
                "stored": slots(ON_DEVICE, schedule.stored_slots, self.chunk.stored(*one)) if schedule.split else None,
            }
        return self._pin_carry(carry)

    def _pin_carry(self, carry: Carry) -> Carry:
        """Buffers are cut like the residual stream, sums of gradients like the weights."""
        out = dict(carry)
        for name in ("arrived", "cotangents"):
            if name in carry:
                out[name] = constrain(carry[name], STAGES, None, *RESIDUAL)
        if "kept" in carry and self.chunk.remat.policy != "offload":
            whole = (STAGES, None, None)
            out["kept"] = jax.tree.map(
                lambda values: [constrain(values[0], *whole, *RESIDUAL), *map(_pin_stage, values[1:])],
                carry["kept"],
                is_leaf=_is_segment,
            )
        if "kept" in carry:
            out["stored"] = jax.tree.map(_pin_stage, carry["stored"])
            if self.chunk.specs is not None:
                out["layers"] = self._pin_own(carry["layers"])
                out["outer"] = pin(carry["outer"], {name: self.chunk.specs[name] for name in self.outer})
        return out

    @cached_property
    def outer(self) -> Tree:
        """Weights outside the stages."""
        return {name: part for name, part in self.chunk.weights.items() if name not in self.chunk.stages.rows}

    @cached_property
    def own(self) -> StageState:
        """What each stage owns of each stack [P, v J', ...]: weights, the layers' data, which places hold a layer."""
        rows, data = self.chunk.stages.rows, self.chunk.model.data(self.chunk.totals)
        weights = {
            k: jax.tree.map(lambda w, r=r: w.reshape(len(r), -1, *w.shape[1:]), self.chunk.weights[k])
            for k, r in rows.items()
        }
        # Read once, outside of the ticks: a layer's data lies with its stage.
        seen = {
            k: jax.tree.map(lambda d, r=r: jnp.asarray(d)[np.maximum(r, 0).reshape(len(r), -1)], data[k])
            for k, r in rows.items()
        }
        real = {k: jnp.asarray(there) for k, there in self.chunk.stages.real.items()}
        return StageState(weights if self.chunk.specs is None else self._pin_own(weights), seen, real)

    def _pin_own(self, stacks: Tree) -> Tree:
        return pin(stacks, {k: jax.tree.map(_by_stage, self.chunk.specs[k]) for k in stacks})

    @property
    def _dtype(self) -> Any:
        """Dtype of the residual stream."""
        return self.chunk.weights["embed"]["tokens"].dtype

    def _sums(self, carry: Carry) -> Sums:
        stats = {
            name: self.chunk.stages.to_model(stack, s.reshape(-1, *s.shape[2:]))
            for stack, found in carry["stats"].items()
            for name, s in found.items()
        }
        return {**carry["sums"], **stats}

    # One tick -------------------------------------------------------------------------------------------------------

    def _tick(
        self, carry: Carry, row: TickRow, kinds: str, head: Head, cotangent: Any, heads: NDArray[np.bool_]
    ) -> tuple[Carry, None]:
        y_PBLD = gx_PBLD = None
        if "F" in kinds:
            carry, y_PBLD = self._forward(carry, row)
            carry = _where(heads, row["head_microbatch"] >= 0, partial(self._head, head), carry, y_PBLD, row)
        if "B" in kinds:
            carry, gx_PBLD = self._backward(carry, row, cotangent)
        if "W" in kinds:
            carry = self._backward_weights(carry, row)
        if y_PBLD is not None:
            carry["arrived"] = _put(carry["arrived"], self._shift(y_PBLD, 1), row["receive_input"])
        if gx_PBLD is not None:
            carry["cotangents"] = _put(carry["cotangents"], self._shift(gx_PBLD, -1), row["receive_cotangent"])
        return self._pin_carry(carry), None

    def _forward(self, carry: Carry, row: TickRow) -> tuple[Carry, jax.Array]:
        m_P, chunk_P = row["f_microbatch"], row["f_chunk"]
        first = self._fields(row["entering"])
        entered_BLD = self.chunk.model.enter(self.chunk.weights, first["tokens"], first["positions"])
        x_PBLD = _take(carry["arrived"], row["f_input"])
        x_PBLD = constrain(
            jnp.where(_at_stage(0, x_PBLD) & (row["entering"] >= 0), entered_BLD, x_PBLD), STAGES, *RESIDUAL
        )
        y_PBLD, kept, stats = _over_stages(self.chunk.forward)(
            self.own, chunk_P, x_PBLD, self._seen(m_P), carry.get("kept"), row["f_kept"]
        )
        y_PBLD = constrain(y_PBLD, STAGES, *RESIDUAL)
        carry = dict(carry)
        if kept is not None:
            carry["kept"] = kept
        on_P = m_P >= 0
        carry["stats"] = jax.tree.map(
            partial(_add_chunk, chunk_P=chunk_P, chunks=self.chunk.stages.shape[1], on_P=on_P), carry["stats"], stats
        )
        return carry, y_PBLD

    def _head(self, head: Head, carry: Carry, y_PBLD: jax.Array, row: TickRow) -> Carry:
        """Loss of the microbatch that leaves the last stage; in training its gradients and cotangent too."""
        x_BLD = constrain(_of_one_stage(y_PBLD, -1), *RESIDUAL)
        rows = self._fields(row["head_microbatch"])
        if "kept" not in carry:
            sums = head(self.chunk.weights, x_BLD, rows)[1]
            return {**carry, "sums": jax.tree.map(jnp.add, carry["sums"], sums)}

        def objective(outer: Tree, x_BLD: jax.Array) -> tuple[jax.Array, Sums]:
            return head({**self.chunk.weights, **outer}, x_BLD, rows)

        value, pull, sums = jax.vjp(objective, self.outer, x_BLD, has_aux=True)
        outer, gx_BLD = pull(jnp.ones_like(value))
        slots_P = jnp.where(_at_stage(-1, y_PBLD)[:, 0, 0, 0], row["head_cotangent"], -1)
        everywhere = constrain(jnp.broadcast_to(gx_BLD, y_PBLD.shape), STAGES, *RESIDUAL)
        return {
            **carry,
            "sums": jax.tree.map(jnp.add, carry["sums"], sums),
            "outer": _add(carry["outer"], outer),
            "cotangents": _put(carry["cotangents"], everywhere, slots_P),
        }

    def _backward(self, carry: Carry, row: TickRow, cotangent: Any) -> tuple[Carry, jax.Array]:
        m_P, chunk_P = row["b_microbatch"], row["b_chunk"]
        on_P = m_P >= 0
        ct_PBLD = _take(carry["cotangents"], row["b_cotangent"])
        ct_PBLD = constrain(jnp.where(_wide(on_P, ct_PBLD), ct_PBLD, 0), STAGES, *RESIDUAL)
        gx_PBLD, layers, stored = _over_stages(self.chunk.backward)(
            self.own, carry["layers"], chunk_P, self._seen(m_P), carry["kept"], row["b_kept"], ct_PBLD,
            jnp.where(on_P, cotangent, 0.0), carry["stored"], row["b_stored"],
        )  # fmt: skip
        gx_PBLD = constrain(gx_PBLD, STAGES, *RESIDUAL)
        carry = {**carry, "layers": layers, "stored": stored}
        gx_BLD = constrain(jnp.where(row["leaving"] >= 0, _of_one_stage(gx_PBLD, 0), 0), *RESIDUAL)
        rows = self._fields(row["leaving"])

        def enter(outer: Tree) -> jax.Array:
            return self.chunk.model.enter({**self.chunk.weights, **outer}, rows["tokens"], rows["positions"])

        (outer,) = jax.vjp(enter, self.outer)[1](gx_BLD)
        return {**carry, "outer": _add(carry["outer"], outer)}, gx_PBLD

    def _backward_weights(self, carry: Carry, row: TickRow) -> Carry:
        layers = _over_stages(self.chunk.backward_weights)(
            self.own, carry["layers"], row["w_chunk"], self._seen(row["w_microbatch"]), carry["kept"], row["w_kept"],
            carry["stored"], row["w_stored"],
        )  # fmt: skip
        return {**carry, "layers": layers}

    def _fields(self, m: jax.Array) -> Batch:
        """One microbatch's fields [B, L]."""
        return {name: field[jnp.maximum(m, 0)] for name, field in self.batch.items()}

    def _shift(self, x_PBLD: jax.Array, by: int) -> jax.Array:
        """Every stage's x to the next (by 1) or the one before (by -1); with chunks the ends meet."""
        if self.chunk.stages.shape[1] > 1:
            moved_PBLD = jnp.roll(x_PBLD, by, 0)
        else:
            whole = [(0, 0, 0)] * (x_PBLD.ndim - 1)
            moved_PBLD = lax.pad(x_PBLD, jnp.zeros((), x_PBLD.dtype), [(by, -by, 0), *whole])
        return constrain(moved_PBLD, STAGES, *RESIDUAL)

    def _seen(self, m_P: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Positions and segments of the microbatch at each stage [P, B, L]."""
        fields = (jnp.take(self.batch[name], jnp.maximum(m_P, 0), axis=0) for name in ("positions", "segments"))
        positions, segments = (constrain(field, STAGES, "batch", "seq_len") for field in fields)
        return positions, segments


def _with_ends(columns: dict[str, NDArray[np.int32]]) -> dict[str, NDArray[np.int32]]:
    """Columns and, for each tick, the microbatch that the first virtual stage takes in and gives back, -1 for none.

    Of their own, since reading stage 0's entry of a column that is cut over stages would be a message.
    """
    first = {
        name: np.where(columns[f"{kind}_chunk"][:, 0] == 0, columns[f"{kind}_microbatch"][:, 0], -1)
        for name, kind in (("entering", "f"), ("leaving", "b"))
    }
    return columns | first


def _scan(tick: Callable[..., Any], carry: Carry, rows: TickRow) -> Carry:
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


def _is_segment(node: Any) -> bool:
    """Whether a node of the kept buffers is the list of one segment's arrays."""
    return isinstance(node, list) and isinstance(node[0], jax.Array)


def _pin_stage(buffer: jax.Array) -> jax.Array:
    """Values of any kind, each where the operation that made it says, its stage's in the stage."""
    mesh = active_mesh()
    if mesh is None:
        return buffer
    spec = PartitionSpec(PIPE, *(PartitionSpec.UNCONSTRAINED,) * (buffer.ndim - 1))
    return lax.with_sharding_constraint(buffer, NamedSharding(mesh, spec))


def _by_stage(spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(*spec[:1], None, *spec[1:])
