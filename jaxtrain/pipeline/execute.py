"""Runs a schedule: stages are a dimension vmapped over the pipe axis, ticks are scans over the rows of the table.

All stages run the same program in every tick, so control flow is equal on all devices and every collective inside a
layer composes. Sending to the next stage shifts the stage dimension, which is a collective-permute between neighbours.
F saves residuals in buffer slots, B reads them and recomputes the rest (chunk.py). Embedding and head belong to no
stage: they run on all devices, their vocabulary sharded over the pipe axis too.

Legend: P stages, v chunks, J' layer slots of one stack in a chunk, M microbatches, B sequences, L length, D model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from jaxtrain.mesh.constraints import active_mesh, constrain
from jaxtrain.numerics.wide import operand, weights_of
from jaxtrain.pipeline.buffers import DEVICE_STORE, RESIDUAL_STREAM, SlotStore
from jaxtrain.pipeline.chunk import Chunk, StageState, Sums, TokenFields, constrain_specs
from jaxtrain.pipeline.table import Schedule

Tree = Any
Batch = dict[str, jax.Array]
TickRow = dict[str, Any]
Head = Callable[[Tree, jax.Array, Batch], tuple[jax.Array, Sums]]
"""(weights, residual stream after the last layer, the microbatch's fields) -> (objective, sums) of a microbatch."""

PIPE, STAGES = "pipe", "layers"
"""The mesh axis, and the logical name of a dim that is sharded over it."""


class TickCarry(NamedTuple):
    """State between ticks; a forward schedule has no cotangents, residuals or gradients (None)."""

    inputs: jax.Array
    """Input slots [P, slots, B, L, D], written when an output arrives from the previous stage."""
    cotangents: Any
    """Cotangent slots [P, slots, B, L, D], written when a cotangent arrives from the next stage or the head."""
    residuals: Tree
    """Residual slots of each segment."""
    layer_gradients: Tree
    """float32 gradients of the stages' weights [P, v J', ...]."""
    outer_gradients: Tree
    """float32 gradients of the other weights."""
    stats: Tree
    """Sums over microbatches of what layers report [P, v J', ...]."""
    weight_residuals: Tree
    """Weight-residual slots of each segment; None where the schedule is not split."""
    sums: Tree
    """Sums over microbatches of what the head reports."""


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A model divided into stages and a batch; `chunk` is the computation of a stage.

    batch fields: [M, B, L].
    """

    chunk: Chunk
    batch: Batch

    def gradients(self, schedule: Schedule, head: Head, objective_cotangent: jax.Array | float) -> tuple[Tree, Sums]:
        """float32 gradients of the sum over microbatches of head's objective + objective_cotangent x the layers', sums.

        Gradients are in stage order, sums of layers in the model's order.
        """
        carry = self._start(schedule, head, training=True)
        for phase in schedule.phases:
            rows = _with_embedding_columns(schedule.rows(phase))
            tick = partial(
                self._tick, kinds=phase.kinds, head=head, objective_cotangent=objective_cotangent,
                head_ticks=rows["head_microbatch"] >= 0,
            )  # fmt: skip
            carry = _scan(tick, carry, rows)
        layers = jax.tree.map(lambda g: g.reshape(-1, *g.shape[2:]), carry.layer_gradients)
        return {**carry.outer_gradients, **layers}, self._sums(carry)

    def forward(self, schedule: Schedule, head: Head) -> Sums:
        """Sums over all microbatches of what head and layers report; `schedule` has forward operations alone."""
        rows = _with_embedding_columns(schedule.columns)
        head_ticks = rows["head_microbatch"] >= 0
        tick = partial(self._tick, kinds="F", head=head, objective_cotangent=None, head_ticks=head_ticks)
        return self._sums(_scan(tick, self._start(schedule, head, training=False), rows))

    # The carry ------------------------------------------------------------------------------------------------------

    def _start(self, schedule: Schedule, head: Head, training: bool) -> TickCarry:
        P, v, _ = self.chunk.stages.shape
        sequences, length = self.batch["tokens"].shape[1:]
        x_BLD = jnp.zeros((sequences, length, self.chunk.model.config.d_model), self._dtype)
        fields = self.batch["positions"][0], self.batch["segments"][0]
        arguments = jax.tree.map(lambda a: a[0], self.state), x_BLD, fields
        sums = jax.eval_shape(lambda: head(self.chunk.weights, x_BLD, self._fields(jnp.int32(0)))[1])
        carry = TickCarry(
            inputs=jnp.zeros((P, schedule.input_slots, *x_BLD.shape), x_BLD.dtype),
            cotangents=None, residuals=None, layer_gradients=None, outer_gradients=None, weight_residuals=None,
            stats=jax.tree.map(
                lambda s: jnp.zeros((P, v * s.shape[0], *s.shape[1:]), s.dtype), self.chunk.stats_shapes(*arguments)
            ),
            sums=jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), sums),
        )  # fmt: skip
        if training:
            float32 = partial(jax.tree.map, lambda leaf: jnp.zeros(leaf.shape, jnp.float32))

            def slots(store: SlotStore, count: int, shapes: Tree) -> Tree:
                return jax.tree.map(lambda shape: store.make(P, shape, count), shapes)

            residuals = self.chunk.residual_shapes(*arguments)
            carry = carry._replace(
                residuals=slots(self.chunk.slot_store, schedule.residual_slots, residuals),
                cotangents=jnp.zeros((P, schedule.cotangent_slots, *x_BLD.shape), x_BLD.dtype),
                layer_gradients=float32(self.state.weights),
                outer_gradients=float32(self.outer),
            )
        if training and schedule.split:
            weight_residuals = self.chunk.weight_residual_shapes(*arguments)
            carry = carry._replace(
                weight_residuals=slots(DEVICE_STORE, schedule.weight_residual_slots, weight_residuals)
            )
        return self._constrain_carry(carry)

    def _constrain_carry(self, carry: TickCarry) -> TickCarry:
        """Shard slots like the residual stream, and sums of gradients like the weights."""
        carry = carry._replace(inputs=constrain(carry.inputs, STAGES, None, *RESIDUAL_STREAM))
        if carry.residuals is None:
            return carry
        carry = carry._replace(cotangents=constrain(carry.cotangents, STAGES, None, *RESIDUAL_STREAM))
        if self.chunk.remat.policy != "offload":
            leading = (STAGES, None, None)
            residuals = jax.tree.map(
                lambda values: [constrain(values[0], *leading, *RESIDUAL_STREAM), *map(_constrain_stage, values[1:])],
                carry.residuals,
                is_leaf=_is_segment,
            )
            carry = carry._replace(residuals=residuals)
        carry = carry._replace(weight_residuals=jax.tree.map(_constrain_stage, carry.weight_residuals))
        if self.chunk.specs is not None:
            outer_specs = {name: self.chunk.specs[name] for name in self.outer}
            carry = carry._replace(
                layer_gradients=self._constrain_stacks(carry.layer_gradients),
                outer_gradients=constrain_specs(carry.outer_gradients, outer_specs),
            )
        return carry

    @cached_property
    def outer(self) -> Tree:
        """Weights outside the stages."""
        return {name: part for name, part in self.chunk.weights.items() if name not in self.chunk.stages.rows}

    def _weights_of(self, variable: Tree) -> Tree:
        """All weights, those outside the stages as a function of what is differentiated."""
        return {**self.chunk.weights, **weights_of(variable, self.outer, self.chunk.wide)}

    @cached_property
    def state(self) -> StageState:
        """Weights, data and occupied slots of each stage's layers, by stack [P, v J', ...]."""
        rows, data = self.chunk.stages.rows, self.chunk.model.data(self.chunk.totals)
        weights = {
            k: jax.tree.map(lambda w, r=r: w.reshape(len(r), -1, *w.shape[1:]), self.chunk.weights[k])
            for k, r in rows.items()
        }
        # Indexed once, outside the ticks, so that a layer's data is stored with its stage.
        staged = {
            k: jax.tree.map(lambda d, r=r: jnp.asarray(d)[np.maximum(r, 0).reshape(len(r), -1)], data[k])
            for k, r in rows.items()
        }
        occupied = {k: jnp.asarray(there) for k, there in self.chunk.stages.occupied.items()}
        return StageState(weights if self.chunk.specs is None else self._constrain_stacks(weights), staged, occupied)

    def _constrain_stacks(self, stacks: Tree) -> Tree:
        return constrain_specs(stacks, {k: jax.tree.map(_by_stage, self.chunk.specs[k]) for k in stacks})

    @property
    def _dtype(self) -> Any:
        """Dtype of the residual stream."""
        return self.chunk.weights["embed"]["tokens"].dtype

    def _sums(self, carry: TickCarry) -> Sums:
        stats = {
            name: self.chunk.stages.to_model(stack, s.reshape(-1, *s.shape[2:]))
            for stack, found in carry.stats.items()
            for name, s in found.items()
        }
        return {**carry.sums, **stats}

    # One tick -------------------------------------------------------------------------------------------------------

    def _tick(
        self, carry: TickCarry, row: TickRow, kinds: str, head: Head, objective_cotangent: Any,
        head_ticks: NDArray[np.bool_],
    ) -> tuple[TickCarry, None]:  # fmt: skip
        y_PBLD = dx_PBLD = None
        if "F" in kinds:
            carry, y_PBLD = self._forward(carry, row)
            carry = _where(head_ticks, row["head_microbatch"] >= 0, partial(self._head, head), carry, y_PBLD, row)
        if "B" in kinds:
            carry, dx_PBLD = self._backward(carry, row, objective_cotangent)
        if "W" in kinds:
            carry = self._backward_weights(carry, row)
        if y_PBLD is not None:
            inputs = _write(carry.inputs, self._shift(y_PBLD, 1), row["receive_input"])
            carry = carry._replace(inputs=inputs)
        if dx_PBLD is not None:
            cotangents = _write(carry.cotangents, self._shift(dx_PBLD, -1), row["receive_cotangent"])
            carry = carry._replace(cotangents=cotangents)
        return self._constrain_carry(carry), None

    def _forward(self, carry: TickCarry, row: TickRow) -> tuple[TickCarry, jax.Array]:
        m_P, chunk_P = row["f_microbatch"], row["f_chunk"]
        batch = self._fields(row["embed_microbatch"])
        embedded_BLD = self.chunk.model.embed_tokens(self.chunk.weights, batch["tokens"], batch["positions"])
        x_PBLD = _read(carry.inputs, row["f_input"])
        x_PBLD = constrain(
            jnp.where(_at_stage(0, x_PBLD) & (row["embed_microbatch"] >= 0), embedded_BLD, x_PBLD),
            STAGES, *RESIDUAL_STREAM,
        )  # fmt: skip
        y_PBLD, residuals, stats = _over_stages(self.chunk.forward)(
            self.state, chunk_P, x_PBLD, self._token_fields(m_P), carry.residuals, row["f_residual"]
        )
        y_PBLD = constrain(y_PBLD, STAGES, *RESIDUAL_STREAM)
        add = partial(_add_chunk, chunk_P=chunk_P, chunks=self.chunk.stages.shape[1], active_P=m_P >= 0)
        return carry._replace(residuals=residuals, stats=jax.tree.map(add, carry.stats, stats)), y_PBLD

    def _head(self, head: Head, carry: TickCarry, y_PBLD: jax.Array, row: TickRow) -> TickCarry:
        """Loss of the microbatch at the last stage; in training also its cotangent and the head's gradients."""
        x_BLD = constrain(_broadcast_stage(y_PBLD, -1), *RESIDUAL_STREAM)
        batch = self._fields(row["head_microbatch"])
        if carry.cotangents is None:
            sums = head(self.chunk.weights, x_BLD, batch)[1]
            return carry._replace(sums=jax.tree.map(jnp.add, carry.sums, sums))

        def objective(variable: Tree, x_BLD: jax.Array) -> tuple[jax.Array, Sums]:
            return head(self._weights_of(variable), x_BLD, batch)

        value, pull, sums = jax.vjp(objective, operand(self.outer, self.chunk.wide), x_BLD, has_aux=True)
        outer, dx_BLD = pull(jnp.ones_like(value))
        slot_P = jnp.where(_at_stage(-1, y_PBLD)[:, 0, 0, 0], row["head_cotangent"], -1)
        dx_PBLD = constrain(jnp.broadcast_to(dx_BLD, y_PBLD.shape), STAGES, *RESIDUAL_STREAM)
        return carry._replace(
            sums=jax.tree.map(jnp.add, carry.sums, sums),
            outer_gradients=_add(carry.outer_gradients, outer),
            cotangents=_write(carry.cotangents, dx_PBLD, slot_P),
        )

    def _backward(self, carry: TickCarry, row: TickRow, objective_cotangent: Any) -> tuple[TickCarry, jax.Array]:
        m_P, chunk_P = row["b_microbatch"], row["b_chunk"]
        active_P = m_P >= 0
        dy_PBLD = _read(carry.cotangents, row["b_cotangent"])
        dy_PBLD = constrain(jnp.where(_expand(active_P, dy_PBLD), dy_PBLD, 0), STAGES, *RESIDUAL_STREAM)
        dx_PBLD, layers, weight_residuals = _over_stages(self.chunk.backward)(
            self.state, carry.layer_gradients, chunk_P, self._token_fields(m_P), carry.residuals, row["b_residual"],
            dy_PBLD, jnp.where(active_P, objective_cotangent, 0.0), carry.weight_residuals, row["b_weight_residual"],
        )  # fmt: skip
        dx_PBLD = constrain(dx_PBLD, STAGES, *RESIDUAL_STREAM)
        m = row["embed_grad_microbatch"]
        dx_BLD = constrain(jnp.where(m >= 0, _broadcast_stage(dx_PBLD, 0), 0), *RESIDUAL_STREAM)
        batch = self._fields(m)

        def embed(variable: Tree) -> jax.Array:
            return self.chunk.model.embed_tokens(self._weights_of(variable), batch["tokens"], batch["positions"])

        (outer,) = jax.vjp(embed, operand(self.outer, self.chunk.wide))[1](dx_BLD)
        carry = carry._replace(
            layer_gradients=layers,
            weight_residuals=weight_residuals,
            outer_gradients=_add(carry.outer_gradients, outer),
        )
        return carry, dx_PBLD

    def _backward_weights(self, carry: TickCarry, row: TickRow) -> TickCarry:
        layers = _over_stages(self.chunk.backward_weights)(
            self.state, carry.layer_gradients, row["w_chunk"], self._token_fields(row["w_microbatch"]),
            carry.residuals, row["w_residual"], carry.weight_residuals, row["w_weight_residual"],
        )  # fmt: skip
        return carry._replace(layer_gradients=layers)

    def _fields(self, m: jax.Array) -> Batch:
        """One microbatch's fields [B, L]."""
        return {name: field[jnp.maximum(m, 0)] for name, field in self.batch.items()}

    def _shift(self, x_PBLD: jax.Array, by: int) -> jax.Array:
        """Send each stage's x to the next (by 1) or previous (by -1) stage; with chunks the last sends to the first."""
        if self.chunk.stages.shape[1] > 1:
            moved_PBLD = jnp.roll(x_PBLD, by, 0)
        else:
            unpadded = [(0, 0, 0)] * (x_PBLD.ndim - 1)
            moved_PBLD = lax.pad(x_PBLD, jnp.zeros((), x_PBLD.dtype), [(by, -by, 0), *unpadded])
        return constrain(moved_PBLD, STAGES, *RESIDUAL_STREAM)

    def _token_fields(self, m_P: jax.Array) -> TokenFields:
        """Position and segment ids of the microbatch at each stage [P, B, L]."""
        fields = (jnp.take(self.batch[name], jnp.maximum(m_P, 0), axis=0) for name in ("positions", "segments"))
        positions, segments = (constrain(field, STAGES, "batch", "seq_len") for field in fields)
        return positions, segments


def _with_embedding_columns(columns: dict[str, NDArray[np.int32]]) -> dict[str, NDArray[np.int32]]:
    """Columns, and for each tick the microbatch whose embedding is computed or differentiated, -1 for none.

    They are separate columns because reading stage 0's entry of a column sharded over stages would communicate.
    """
    first = {
        name: np.where(columns[f"{kind}_chunk"][:, 0] == 0, columns[f"{kind}_microbatch"][:, 0], -1)
        for name, kind in (("embed_microbatch", "f"), ("embed_grad_microbatch", "b"))
    }
    return columns | first


def _scan(tick: Callable[..., Any], carry: TickCarry, rows: TickRow) -> TickCarry:
    return lax.scan(tick, carry, jax.tree.map(jnp.asarray, rows))[0]


def _over_stages(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.vmap(function, spmd_axis_name=PIPE)


def _where(
    wanted: NDArray[np.bool_], on: jax.Array, function: Callable[..., TickCarry], carry: TickCarry, *args: Any
) -> TickCarry:
    """function(carry, ...) in those ticks of a phase that are `wanted`; a conditional only where ticks differ."""
    if wanted.all():
        return function(carry, *args)
    if not wanted.any():
        return carry
    return lax.cond(on, function, lambda carry, *_: carry, carry, *args)


def _expand(flag_P: jax.Array, like: jax.Array) -> jax.Array:
    """[P] reshaped to broadcast against `like` [P, ...]."""
    return flag_P.reshape(-1, *(1,) * (like.ndim - 1))


def _at_stage(stage: int, like: jax.Array) -> jax.Array:
    P = like.shape[0]
    return _expand(jnp.arange(P) == stage % P, like)


def _broadcast_stage(x_PBLD: jax.Array, stage: int) -> jax.Array:
    """x of one stage on all stages, as a masked sum: a slice would gather every stage's x."""
    masked = jnp.where(_at_stage(stage, x_PBLD), x_PBLD, 0)
    return lax.reduce(masked, jnp.zeros((), masked.dtype), lax.add, (0,))


def _read(buffer: jax.Array, slot_P: jax.Array) -> jax.Array:
    return _over_stages(lambda b, i: lax.dynamic_index_in_dim(b, i, 0, keepdims=False))(buffer, jnp.maximum(slot_P, 0))


def _write(buffer: jax.Array, x: jax.Array, slot_P: jax.Array) -> jax.Array:
    """`buffer` with x written to each stage's slot; unchanged where the slot is -1."""

    def write(buffer: jax.Array, x: jax.Array, slot: jax.Array) -> jax.Array:
        index = jnp.maximum(slot, 0)
        old = lax.dynamic_index_in_dim(buffer, index, 0, keepdims=False)
        return lax.dynamic_update_index_in_dim(buffer, jnp.where(slot >= 0, x, old), index, 0)

    return _over_stages(write)(buffer, x, slot_P)


def _add_chunk(total: jax.Array, stats: jax.Array, chunk_P: jax.Array, chunks: int, active_P: jax.Array) -> jax.Array:
    """Stats [P, J', ...] added to those of their chunk in [P, v J', ...]."""
    by_chunk = total.reshape(len(total), chunks, -1, *total.shape[2:])
    here = active_P[:, None] & (chunk_P[:, None] == jnp.arange(chunks))
    added = by_chunk + jnp.where(here.reshape(*here.shape, *(1,) * (stats.ndim - 1)), stats[:, None], 0)
    return added.reshape(total.shape)


def _add(total: Tree, gradient: Tree) -> Tree:
    return jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, gradient)


def _is_segment(node: Any) -> bool:
    """Whether a node of the residual buffers is the list of one segment's arrays."""
    return isinstance(node, list) and isinstance(node[0], jax.Array)


def _constrain_stage(buffer: jax.Array) -> jax.Array:
    """Shard the first dim over stages; the partitioner chooses the other dims' sharding."""
    mesh = active_mesh()
    if mesh is None:
        return buffer
    spec = PartitionSpec(PIPE, *(PartitionSpec.UNCONSTRAINED,) * (buffer.ndim - 1))
    return lax.with_sharding_constraint(buffer, NamedSharding(mesh, spec))


def _by_stage(spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(*spec[:1], None, *spec[1:])
