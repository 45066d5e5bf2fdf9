"""Attention over rows that are split over devices: keys travel, keys are gathered, or heads are exchanged for places.

Rows lie in zig-zag order (ops/zigzag.py). A way is two functions of what one device holds, forward and backward, built
of a kernel for a block of queries and a block of keys; nothing but q, k, v, the output and the log of the softmax's
denominator is kept between them.

B batch, L length of a row, P queries of a device or of a block, M keys, C half of a device's queries (one run of the
row), H heads, K kv heads, E head width, V value width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec

from jaxtrain.config import Axis
from jaxtrain.mesh.constraints import active_axes, active_mesh, dividing_axes
from jaxtrain.mesh.param import make_spec
from jaxtrain.mesh.shard_map import shard_mapped
from jaxtrain.numerics.remat import tag
from jaxtrain.ops import blocks
from jaxtrain.ops.blocks import TokenPositions, Window
from jaxtrain.ops.kernels import TILES, Kept, Kernel, Score, Sight, Triple, first_keys
from jaxtrain.ops.residuals import custom_vjp_with_residuals

Half = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class SequenceSharding:
    """How a row lies over the devices along `axes`: `hops` groups in a ring, `group` devices of one exchange heads."""

    axes: tuple[Axis, ...]
    hops: int
    group: int

    def place(self) -> jax.Array:
        """This device's place in the ring."""
        return lax.axis_index(self.axes) // self.group

    def send(self, x: jax.Array) -> jax.Array:
        """x of the place before; ours goes to the next."""
        devices = self.hops * self.group
        return lax.ppermute(x, self.axes, [(d, (d + self.group) % devices) for d in range(devices)])

    def exchange(self, parts: jax.Array) -> jax.Array:
        """[group, ...]: the n-th part goes to the n-th device of the group, and what that one sends takes its place."""
        groups = [[hop * self.group + d for d in range(self.group)] for hop in range(self.hops)]

        @custom_vmap
        def swap(parts: jax.Array) -> jax.Array:
            return lax.all_to_all(parts, self.axes, 0, 0, axis_index_groups=groups)

        # Groups have no batching rule of JAX's own; other dims simply go along.
        @swap.def_vmap
        def _(size: int, batched: list[bool], parts: jax.Array) -> tuple[jax.Array, bool]:
            return jnp.moveaxis(self.exchange(jnp.moveaxis(parts, 0, 1)), 1, 0), True

        return swap(parts)

    def share(self, sinks_H: jax.Array, heads: int) -> jax.Array:
        """Those of `heads` that a device holds once heads are exchanged."""
        return lax.dynamic_slice_in_dim(sinks_H, self._first_head(heads), heads)

    def unshare(self, own_H: jax.Array, sinks_H: jax.Array) -> jax.Array:
        """The inverse of `share`, zeros elsewhere."""
        zeros = jnp.zeros(sinks_H.shape, own_H.dtype)
        return lax.dynamic_update_slice_in_dim(zeros, own_H, self._first_head(len(own_H)), axis=0)

    def _first_head(self, heads: int) -> jax.Array:
        return lax.axis_index(self.axes) % self.group * heads


class _Row(NamedTuple):
    """A whole row in its own order: places, the first key that each query sees, and where runs of C tokens begin."""

    places: TokenPositions
    first_BL: jax.Array
    C: int

    def run(self, at: jax.Array) -> tuple[TokenPositions, jax.Array]:
        """Places and first keys of the C tokens of run `at`."""
        cut = partial(lax.dynamic_slice_in_dim, start_index=at * self.C, slice_size=self.C, axis=1)
        return TokenPositions(*map(cut, self.places)), cut(self.first_BL)

    def before(self, first_BP: jax.Array, at: jax.Array) -> jax.Array:
        """How many tokens of run `at` lie before `first`."""
        return jnp.clip(first_BP - at * self.C, 0, self.C)


def _row_of(places_BL: TokenPositions, split: SequenceSharding, window: Window) -> _Row:
    """The row of which `places_BL` is what all devices hold, one after the other."""
    devices = split.hops * split.group
    ordered = TokenPositions(*(_unzigzag(x_BL, devices) for x_BL in places_BL))
    return _Row(ordered, first_keys(ordered, window), ordered.positions.shape[1] // (2 * split.hops))


def _unzigzag(x_BL: jax.Array, devices: int) -> jax.Array:
    """[B, L, ...] as `devices` hold it one after the other -> in the order of the row."""
    B, L = x_BL.shape[:2]
    x = x_BL.reshape(B, devices, 2, L // (2 * devices), *x_BL.shape[2:])
    return jnp.concatenate([x[:, :, 0], x[:, ::-1, 1]], axis=1).reshape(x_BL.shape)


def _zigzag(x_BL: jax.Array, devices: int) -> jax.Array:
    """The inverse of `_unzigzag`."""
    B, L = x_BL.shape[:2]
    x = x_BL.reshape(B, 2 * devices, L // (2 * devices), *x_BL.shape[2:])
    return jnp.stack([x[:, :devices], x[:, : devices - 1 : -1]], axis=2).reshape(x_BL.shape)


class _Halves(NamedTuple):
    """A device's two runs of the row, and what it does with those of another place.

    All pairs of a query run and a key run that are not on the device's own place are either wholly visible in causal
    order or not at all: our late run sees their early one, and, where they stand before us, our early run sees it too,
    else our late run sees their late one. So each place of the ring means two pairs, computed as one batch of two.
    """

    row: _Row
    early: jax.Array
    late: jax.Array
    theirs_early: jax.Array
    theirs_late: jax.Array
    before: jax.Array

    def queries(self, x: jax.Array, axis: int = 1) -> jax.Array:
        """Our late run, then the run of the second pair, stacked along the batch."""
        early, late = jnp.split(x, 2, axis=axis)
        return jnp.concatenate([late, jnp.where(self.before, early, late)])

    def keys(self, x: jax.Array) -> jax.Array:
        """Their early run, then the run of the second pair, stacked along the batch."""
        early, late = jnp.split(x, 2, axis=1)
        return jnp.concatenate([early, jnp.where(self.before, early, late)])

    def spread(self, pairs: jax.Array, queries: bool) -> jax.Array:
        """Sums over pairs back to where the runs lie: [2 B, C, ...] -> [B, 2 C, ...]; the inverse of the selections."""
        first, second = jnp.split(pairs.astype(jnp.float32), 2)
        to_early, to_late = jnp.where(self.before, second, 0), jnp.where(self.before, 0, second)
        early, late = (to_early, first + to_late) if queries else (first + to_early, to_late)
        return jnp.concatenate([early, late], axis=1)

    def sight(self) -> Sight:
        """What the two pairs see."""
        ours = self.late, jnp.where(self.before, self.early, self.late)
        theirs = self.theirs_early, jnp.where(self.before, self.theirs_early, self.theirs_late)
        queries, first = zip(*map(self.row.run, ours), strict=True)
        keys, _ = zip(*map(self.row.run, theirs), strict=True)
        return Sight(_stack(queries), _stack(keys), jnp.concatenate(list(map(self.row.before, first, theirs))))


def _stack(places: tuple[TokenPositions, ...]) -> TokenPositions:
    return TokenPositions(*map(jnp.concatenate, zip(*places, strict=True)))


def _halves(split: SequenceSharding, row: _Row, step: jax.Array) -> _Halves:
    place = split.place()
    theirs = (place - step) % split.hops
    last = 2 * split.hops - 1
    return _Halves(row, place, last - place, theirs, last - theirs, theirs < place)


def _own(split: SequenceSharding, row: _Row) -> tuple[TokenPositions, jax.Array, tuple[jax.Array, jax.Array]]:
    """Places and first keys of what a device holds, and the numbers of its two runs."""
    runs = split.place(), 2 * split.hops - 1 - split.place()
    places, first = zip(*map(row.run, runs), strict=True)
    both = TokenPositions(*(jnp.concatenate(x, axis=1) for x in zip(*places, strict=True)))
    return both, jnp.concatenate(first, axis=1), runs


def _diagonal(split: SequenceSharding, row: _Row) -> Sight:
    """What a device's queries see of its own keys."""
    places, first_BP, (early, late) = _own(split, row)
    return Sight(places, places, row.before(first_BP, early) + row.before(first_BP, late), ordered=True)


def _whole(split: SequenceSharding, row: _Row) -> Sight:
    """What a device's queries see of the keys of the whole row."""
    places, first_BP, runs = _own(split, row)
    index_P = jnp.concatenate([run * row.C + jnp.arange(row.C) for run in runs])
    return Sight(places, row.places, first_BP, jnp.broadcast_to(index_P + 1, first_BP.shape))


def _ring_forward(
    split: SequenceSharding, kernel: Kernel, row: _Row, score: Score, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Keys and values travel once around the ring while each device attends to those it holds."""
    if split.hops == 1:
        return kernel.forward(q, k, v, _diagonal(split, row), score)
    travelling = split.send(_pack(k, v))
    out_BPHV, lse_BHP = kernel.forward(q, k, v, _diagonal(split, row), score)

    def step(carry: tuple[Half, Half, jax.Array], number: jax.Array) -> tuple[tuple[Half, Half, jax.Array], None]:
        early, late, held = carry
        following = split.send(held)
        halves = _halves(split, row, number)
        k2, v2 = (halves.keys(x) for x in _unpack(held, k))
        out2, lse2 = kernel.forward(halves.queries(q), k2, v2, halves.sight(), score)
        (out_first, out_second), (lse_first, lse_second) = jnp.split(out2, 2), jnp.split(lse2, 2)
        late = blocks.merge(*late, out_first, lse_first)
        chosen: Half = _where(halves.before, early, late)
        merged = blocks.merge(*chosen, out_second, lse_second)
        return (_where(halves.before, merged, early), _where(halves.before, late, merged), following), None

    early, late = zip(jnp.split(out_BPHV.astype(jnp.float32), 2, axis=1), jnp.split(lse_BHP, 2, axis=2), strict=True)
    (early, late, _), _ = lax.scan(step, (early, late, travelling), jnp.arange(1, split.hops))
    return jnp.concatenate([early[0], late[0]], axis=1), jnp.concatenate([early[1], late[1]], axis=2)


def _ring_backward(
    split: SequenceSharding,
    kernel: Kernel,
    row: _Row,
    score: Score,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kept: Kept,
) -> Triple:
    """The gradients of keys and values travel with them, a step behind: what one step adds is sent during the next."""
    if split.hops == 1:
        return kernel.backward(q, k, v, kept, _diagonal(split, row), score)
    travelling = split.send(_pack(k, v))
    dq, *own = kernel.backward(q, k, v, kept, _diagonal(split, row), score)

    def step(carry: Triple, number: jax.Array) -> tuple[Triple, None]:
        dq, held, dheld = carry
        following, dheld = split.send(held), split.send(dheld)
        halves = _halves(split, row, number)
        k2, v2 = (halves.keys(x) for x in _unpack(held, k))
        kept2 = Kept(*(halves.queries(x, axis) for x, axis in zip(kept, (1, 2, 1, 2), strict=True)))
        dq2, *dkv2 = kernel.backward(halves.queries(q), k2, v2, kept2, halves.sight(), score)
        dheld += halves.spread(_pack(*dkv2), queries=False)
        return (dq + halves.spread(dq2, queries=True), following, dheld), None

    start = dq.astype(jnp.float32), travelling, _pack(*own).astype(jnp.float32)
    (dq, _, dheld), _ = lax.scan(step, start, jnp.arange(1, split.hops))
    return (dq, *_unpack(split.send(dheld), k))


def _gather_forward(
    split: SequenceSharding, kernel: Kernel, row: _Row, score: Score, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Each device attends to the keys of the whole row."""
    return kernel.forward(q, *_gathered(split, k, v), _whole(split, row), score)


def _gather_backward(
    split: SequenceSharding,
    kernel: Kernel,
    row: _Row,
    score: Score,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kept: Kept,
) -> Triple:
    """Keys are gathered again, and the gradients of all of them summed and scattered."""
    dq, dk, dv = kernel.backward(q, *_gathered(split, k, v), kept, _whole(split, row), score)
    dkv = _zigzag(_pack(dk, dv).astype(jnp.float32), split.hops)
    return (dq, *_unpack(lax.psum_scatter(dkv, split.axes, scatter_dimension=1, tiled=True), k))


def _gathered(split: SequenceSharding, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _unpack(_unzigzag(lax.all_gather(_pack(k, v), split.axes, axis=1, tiled=True), split.hops), k)


def _pack(k: jax.Array, v: jax.Array) -> jax.Array:
    """One array, so that one transfer carries both."""
    return jnp.concatenate([k, v], axis=-1)


def _unpack(kv: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    return kv[..., : k.shape[-1]], kv[..., k.shape[-1] :]


def _where(condition: jax.Array, yes: Any, no: Any) -> Any:
    return jax.tree.map(partial(jnp.where, condition), yes, no)


class ContextMethod(NamedTuple):
    """One way to attend over a split row, as functions of a device's shards; `exchanges` says that heads move first."""

    forward: Callable[..., tuple[jax.Array, jax.Array]]
    backward: Callable[..., Triple]
    exchanges: bool = False


CONTEXT_METHODS = {
    "ring": ContextMethod(_ring_forward, _ring_backward),
    "all_gather": ContextMethod(_gather_forward, _gather_backward),
    "ulysses": ContextMethod(_ring_forward, _ring_backward, exchanges=True),
}
"""attention.context_parallel -> way."""


def sequence_sharding(context_method: str, axes: tuple[Axis, ...], devices: int, heads: int) -> SequenceSharding:
    """How `devices` along `axes` share a row, `heads` being the query heads that one of them holds.

    Ulysses exchanges heads among as many devices as divide the heads; what is left of the devices is a ring of groups.
    """
    group = math.gcd(heads, devices) if CONTEXT_METHODS[context_method].exchanges else 1
    return SequenceSharding(axes, devices // group, group)


def attend(
    q_BLHE: jax.Array, k_BLKE: jax.Array, v_BLKV: jax.Array, segments_BL: jax.Array, positions_BL: jax.Array,
    score: Score, sinks_H: jax.Array | None, context_method: str, kernel: Kernel = TILES,
) -> jax.Array:  # fmt: skip
    """Attention over rows whose length is split over `active_axes("seq_len")`, in zig-zag order; [B, L, H, V].

    Documents are unbroken runs of the row with positions from 0, as the loader makes them. Call it under `use_rules`;
    heads are split as rules say, and kv heads are repeated where there are too few to be split likewise.
    """
    mesh = active_mesh()
    assert mesh is not None, "no mesh here"
    B, _, H, _ = q_BLHE.shape
    batch, length, heads = dividing_axes("batch", B), active_axes("seq_len"), dividing_axes("heads", H)
    devices, shards = (math.prod(mesh.shape[axis] for axis in axes) for axes in (length, heads))
    split = sequence_sharding(context_method, length, devices, H // shards)
    K = k_BLKE.shape[2]
    q, k, v = q_BLHE, *(jnp.repeat(x, math.lcm(K, shards * split.group) // K, axis=2) for x in (k_BLKE, v_BLKV))
    by_head = make_spec([batch, length, heads])
    attention = _differentiable(
        CONTEXT_METHODS[context_method], kernel, split, score._replace(window=None), batch, heads
    )
    if split.group > 1:
        to, back = (
            shard_mapped(partial(f, split), (by_head,), by_head) for f in (_heads_for_places, _places_for_heads)
        )
        exchange, restore = _moves(to, back), _moves(back, to)
        q, k, v = exchange(q), exchange(k), exchange(v)
        out = attention(q, k, v, TokenPositions(segments_BL, positions_BL), score.window, sinks_H)
        # Again under its name: what comes back need not be exchanged a second time either.
        return tag(restore(out), "attention_out")
    return attention(q, k, v, TokenPositions(segments_BL, positions_BL), score.window, sinks_H)


def _moves(there: Callable[[jax.Array], jax.Array], back: Callable[[jax.Array], jax.Array]) -> Any:
    """`there`, which moves values about and is undone by `back`; so `back` carries its gradient."""
    moves = jax.custom_vjp(there)
    moves.defvjp(lambda x: (there(x), None), lambda _, cotangent: (back(cotangent),))
    return moves


def _differentiable(
    context_method: ContextMethod,
    kernel: Kernel,
    split: SequenceSharding,
    static: Score,
    batch: tuple[Axis, ...],
    heads: tuple[Axis, ...],
) -> Any:
    """(q, k, v, places, window, sinks) -> output, all of them global arrays, with a gradient of its own.

    Both passes are made here: the backward one is traced where no rules are in force.
    """

    def run(
        q: jax.Array, k: jax.Array, v: jax.Array, places: TokenPositions, window: Window, sinks: jax.Array | None
    ) -> Half:
        row, score = _row_of(places, split, window), static._replace(window=window)
        out, lse = context_method.forward(split, kernel, row, score, q, k, v)
        if sinks is not None:
            out, lse = blocks.add_sinks(out, lse, split.share(sinks, q.shape[2]))
        return out.astype(q.dtype), lse

    def pull(inputs: Any, out: jax.Array, lse: jax.Array, dout: jax.Array) -> tuple[Any, ...]:
        q, k, v, places, window, sinks = inputs
        row, score = _row_of(places, split, window), static._replace(window=window)
        kept = Kept(out, lse, dout, blocks.row_delta(out, dout))
        gradients = context_method.backward(split, kernel, row, score, q, k, v, kept)
        dsinks = None
        if sinks is not None:
            own = blocks.sinks_gradient(lse, kept.delta_BHP, split.share(sinks, q.shape[2]))
            dsinks = lax.psum(split.unshare(own, sinks), (*batch, *split.axes)).astype(sinks.dtype)
        return (*(g.astype(x.dtype) for g, x in zip(gradients, (q, k, v), strict=True)), dsinks)

    by_head, of_heads = make_spec([batch, split.axes, heads]), make_spec([heads])
    inputs = by_head, by_head, by_head, make_spec([batch]), PartitionSpec(), of_heads
    outputs = by_head, make_spec([batch, heads, split.axes])
    forward = shard_mapped(run, inputs, outputs)
    backward = shard_mapped(pull, (inputs, *outputs, by_head), (by_head, by_head, by_head, of_heads))

    def gradients(inputs: Any, out: jax.Array, lse: jax.Array, dout: jax.Array) -> tuple[Any, ...]:
        *dqkv, dsinks = backward(inputs, out, lse, dout)
        return (*dqkv, None, None, dsinks)

    # Who keeps the output (remat.names) need not go around the ring again.
    return custom_vjp_with_residuals(forward, gradients, "attention_out")


def _heads_for_places(split: SequenceSharding, x: jax.Array) -> jax.Array:
    """[B, P, H, E] -> [B, group x P, H / group, E]: heads are exchanged for the places of the group, in row order."""
    B, P, H, E = x.shape
    parts = jnp.moveaxis(x.reshape(B, P, split.group, H // split.group, E), 2, 0)
    return _unzigzag(jnp.moveaxis(split.exchange(parts), 0, 1).reshape(B, P * split.group, -1, E), split.group)


def _places_for_heads(split: SequenceSharding, x: jax.Array) -> jax.Array:
    """The inverse of `_heads_for_places`."""
    B, P, H, E = x.shape
    parts = jnp.moveaxis(_zigzag(x, split.group).reshape(B, split.group, P // split.group, H, E), 1, 0)
    return jnp.moveaxis(split.exchange(parts), 0, 2).reshape(B, P // split.group, H * split.group, E)
