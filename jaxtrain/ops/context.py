"""Attention by a kernel on each device's shards, with sequences on one device or sharded (context parallelism).

Sequences over several devices are stored in zig-zag order (ops/zigzag.py). A method is a forward and a backward
function of one device's shards, built on a kernel for one block of queries and one block of keys. Residuals between the
two are q, k, v, the output and the log of the softmax's denominator (lse).

B batch, L sequence length, P queries of a device or of a block, M keys, C half of a device's queries (one chunk of the
sequence), H heads, K kv heads, E head width, V value width.
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
from jaxtrain.ops.kernels import TILES, AttentionResiduals, Kernel, ScoreOptions, Triple, Visibility, first_keys
from jaxtrain.ops.residuals import custom_vjp_with_residuals

Half = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class SequenceSharding:
    """A sequence over the devices along `axes`: a ring of `hops` groups of `group` devices that exchange heads."""

    axes: tuple[Axis, ...]
    hops: int
    group: int

    def ring_index(self) -> jax.Array:
        """Index of this device's group in the ring."""
        return lax.axis_index(self.axes) // self.group

    def send(self, x: jax.Array) -> jax.Array:
        """Send x to the next group of the ring; returns the x of the previous one."""
        devices = self.hops * self.group
        return lax.ppermute(x, self.axes, [(d, (d + self.group) % devices) for d in range(devices)])

    def exchange(self, parts: jax.Array) -> jax.Array:
        """All-to-all within a group, [group, ...]: part n goes to device n and is replaced by its part."""
        groups = [[hop * self.group + d for d in range(self.group)] for hop in range(self.hops)]

        @custom_vmap
        def swap(parts: jax.Array) -> jax.Array:
            return lax.all_to_all(parts, self.axes, 0, 0, axis_index_groups=groups)

        # JAX has no batching rule for axis_index_groups; the mapped dim is one more dim of a part.
        @swap.def_vmap
        def _(size: int, batched: list[bool], parts: jax.Array) -> tuple[jax.Array, bool]:
            return jnp.moveaxis(self.exchange(jnp.moveaxis(parts, 0, 1)), 1, 0), True

        return swap(parts)

    def local_sinks(self, sinks_H: jax.Array, heads: int) -> jax.Array:
        """The sinks of the `heads` that this device holds after heads are exchanged."""
        if self.group == 1:
            return sinks_H
        return lax.dynamic_slice_in_dim(sinks_H, self._first_head(heads), heads)

    def all_sinks(self, local_H: jax.Array, sinks_H: jax.Array) -> jax.Array:
        """The inverse of `local_sinks`, with zeros for all other heads."""
        if self.group == 1:
            return local_H
        zeros = jnp.zeros(sinks_H.shape, local_H.dtype)
        return lax.dynamic_update_slice_in_dim(zeros, local_H, self._first_head(len(local_H)), axis=0)

    def _first_head(self, heads: int) -> jax.Array:
        return lax.axis_index(self.axes) % self.group * heads


class _Sequence(NamedTuple):
    """A whole sequence in its natural order: tokens, the first visible key of each query, the size C of a chunk."""

    sharding: SequenceSharding
    tokens: TokenPositions
    first_BL: jax.Array
    C: int

    def chunk(self, index: jax.Array) -> tuple[TokenPositions, jax.Array]:
        """Tokens and first visible keys of one chunk."""
        cut = partial(lax.dynamic_slice_in_dim, start_index=index * self.C, slice_size=self.C, axis=1)
        return TokenPositions(*map(cut, self.tokens)), cut(self.first_BL)

    def offset_in(self, first_BP: jax.Array, index: jax.Array) -> jax.Array:
        """The index `first` in the sequence as an index in chunk `index`, clipped to the chunk."""
        return jnp.clip(first_BP - index * self.C, 0, self.C)


def _sequence_of(tokens_BL: TokenPositions, sharding: SequenceSharding, window: Window) -> _Sequence:
    """Restore the natural order of `tokens_BL`, which is in storage order."""
    devices = sharding.hops * sharding.group
    ordered = TokenPositions(*(_unzigzag(x_BL, devices) for x_BL in tokens_BL))
    return _Sequence(sharding, ordered, first_keys(ordered, window), ordered.positions.shape[1] // (2 * sharding.hops))


def _unzigzag(x_BL: jax.Array, devices: int) -> jax.Array:
    """[B, L, ...] in storage order on `devices` -> in the natural order of the sequence; one device stores that."""
    if devices == 1:
        return x_BL
    B, L = x_BL.shape[:2]
    x = x_BL.reshape(B, devices, 2, L // (2 * devices), *x_BL.shape[2:])
    return jnp.concatenate([x[:, :, 0], x[:, ::-1, 1]], axis=1).reshape(x_BL.shape)


def _zigzag(x_BL: jax.Array, devices: int) -> jax.Array:
    """The inverse of `_unzigzag`."""
    B, L = x_BL.shape[:2]
    x = x_BL.reshape(B, 2 * devices, L // (2 * devices), *x_BL.shape[2:])
    return jnp.stack([x[:, :devices], x[:, : devices - 1 : -1]], axis=2).reshape(x_BL.shape)


class _Halves(NamedTuple):
    """The two chunks of this device, and the two of another device of the ring.

    A query chunk sees a key chunk of another device either completely or not at all, as far as causal order goes. Our
    late chunk always sees their early chunk. If their ring index is lower than ours, our early chunk sees it too;
    otherwise our late chunk sees their late chunk. Each step of the ring is therefore two pairs of chunks, computed as
    a batch of two.
    """

    sequence: _Sequence
    early: jax.Array
    late: jax.Array
    theirs_early: jax.Array
    theirs_late: jax.Array
    theirs_precede: jax.Array

    def queries(self, x: jax.Array, axis: int = 1) -> jax.Array:
        """Our late chunk and our chunk of the second pair, concatenated along the batch."""
        early, late = jnp.split(x, 2, axis=axis)
        return jnp.concatenate([late, jnp.where(self.theirs_precede, early, late)])

    def keys(self, x: jax.Array) -> jax.Array:
        """Their early chunk and their chunk of the second pair, concatenated along the batch."""
        early, late = jnp.split(x, 2, axis=1)
        return jnp.concatenate([early, jnp.where(self.theirs_precede, early, late)])

    def scatter(self, pairs: jax.Array, queries: bool) -> jax.Array:
        """Gradients of the two pairs [2 B, C, ...] summed by chunk [B, 2 C, ...]: transposes queries() or keys()."""
        first, second = jnp.split(pairs.astype(jnp.float32), 2)
        to_early, to_late = jnp.where(self.theirs_precede, second, 0), jnp.where(self.theirs_precede, 0, second)
        early, late = (to_early, first + to_late) if queries else (first + to_early, to_late)
        return jnp.concatenate([early, late], axis=1)

    def visibility(self) -> Visibility:
        """Visibility of the two pairs."""
        ours = self.late, jnp.where(self.theirs_precede, self.early, self.late)
        theirs = self.theirs_early, jnp.where(self.theirs_precede, self.theirs_early, self.theirs_late)
        queries, first = zip(*map(self.sequence.chunk, ours), strict=True)
        keys, _ = zip(*map(self.sequence.chunk, theirs), strict=True)
        return Visibility(
            _concatenated(queries),
            _concatenated(keys),
            jnp.concatenate(list(map(self.sequence.offset_in, first, theirs))),
        )


def _concatenated(tokens: tuple[TokenPositions, ...]) -> TokenPositions:
    return TokenPositions(*map(jnp.concatenate, zip(*tokens, strict=True)))


def _halves(sequence: _Sequence, step: jax.Array) -> _Halves:
    sharding = sequence.sharding
    ours = sharding.ring_index()
    theirs = (ours - step) % sharding.hops
    last = 2 * sharding.hops - 1
    return _Halves(sequence, ours, last - ours, theirs, last - theirs, theirs < ours)


def _local_tokens(sequence: _Sequence) -> tuple[TokenPositions, jax.Array, tuple[jax.Array, jax.Array]]:
    """Tokens and first visible keys of this device's two chunks, and the indices of the chunks."""
    index = sequence.sharding.ring_index()
    chunks = index, 2 * sequence.sharding.hops - 1 - index
    tokens, first = zip(*map(sequence.chunk, chunks), strict=True)
    both = TokenPositions(*(jnp.concatenate(x, axis=1) for x in zip(*tokens, strict=True)))
    return both, jnp.concatenate(first, axis=1), chunks


def _local_visibility(sequence: _Sequence) -> Visibility:
    """Visibility between the queries and the keys of this device."""
    if sequence.sharding.hops == 1:
        return Visibility(sequence.tokens, sequence.tokens, sequence.first_BL, ordered=True)
    tokens, first_BP, (early, late) = _local_tokens(sequence)
    return Visibility(
        tokens, tokens, sequence.offset_in(first_BP, early) + sequence.offset_in(first_BP, late), ordered=True
    )


def _gathered_visibility(sequence: _Sequence) -> Visibility:
    """Visibility between the queries of this device and the keys of the whole sequence."""
    tokens, first_BP, chunks = _local_tokens(sequence)
    index_P = jnp.concatenate([chunk * sequence.C + jnp.arange(sequence.C) for chunk in chunks])
    return Visibility(tokens, sequence.tokens, first_BP, jnp.broadcast_to(index_P + 1, first_BP.shape))


def _local_forward(kernel: Kernel, options: ScoreOptions, sequence: _Sequence, qkv: Triple) -> Half:
    """Attend to the keys of this device."""
    return kernel.forward(*qkv, _local_visibility(sequence), options)


def _local_backward(
    kernel: Kernel, options: ScoreOptions, sequence: _Sequence, qkv: Triple, residuals: AttentionResiduals
) -> Triple:
    return kernel.backward(*qkv, residuals, _local_visibility(sequence), options)


def _ring_forward(kernel: Kernel, options: ScoreOptions, sequence: _Sequence, qkv: Triple) -> Half:
    """Send keys and values once around the ring; each device attends to those it has received."""
    sharding, (q, k, v) = sequence.sharding, qkv
    first_received = sharding.send(_pack(k, v))
    out_BPHV, lse_BHP = _local_forward(kernel, options, sequence, qkv)

    def step(carry: tuple[Half, Half, jax.Array], number: jax.Array) -> tuple[tuple[Half, Half, jax.Array], None]:
        early, late, received = carry
        next_received = sharding.send(received)
        halves = _halves(sequence, number)
        k2, v2 = (halves.keys(x) for x in _unpack(received, k))
        out2, lse2 = kernel.forward(halves.queries(q), k2, v2, halves.visibility(), options)
        (out_first, out_second), (lse_first, lse_second) = jnp.split(out2, 2), jnp.split(lse2, 2)
        late = blocks.merge(*late, out_first, lse_first)
        chosen: Half = _where(halves.theirs_precede, early, late)
        merged = blocks.merge(*chosen, out_second, lse_second)
        early, late = _where(halves.theirs_precede, merged, early), _where(halves.theirs_precede, late, merged)
        return (early, late, next_received), None

    early, late = zip(jnp.split(out_BPHV.astype(jnp.float32), 2, axis=1), jnp.split(lse_BHP, 2, axis=2), strict=True)
    (early, late, _), _ = lax.scan(step, (early, late, first_received), jnp.arange(1, sharding.hops))
    return jnp.concatenate([early[0], late[0]], axis=1), jnp.concatenate([early[1], late[1]], axis=2)


def _ring_backward(
    kernel: Kernel, options: ScoreOptions, sequence: _Sequence, qkv: Triple, residuals: AttentionResiduals
) -> Triple:
    """Send the gradients of keys and values behind them: the sum of one step is sent during the next step."""
    sharding, (q, k, v) = sequence.sharding, qkv
    first_received = sharding.send(_pack(k, v))
    dq, *dkv = _local_backward(kernel, options, sequence, qkv, residuals)

    def step(carry: Triple, number: jax.Array) -> tuple[Triple, None]:
        dq, received, dreceived = carry
        next_received, dreceived = sharding.send(received), sharding.send(dreceived)
        halves = _halves(sequence, number)
        k2, v2 = (halves.keys(x) for x in _unpack(received, k))
        residuals2 = AttentionResiduals(
            *(halves.queries(x, axis) for x, axis in zip(residuals, (1, 2, 1, 2), strict=True))
        )
        dq2, *dkv2 = kernel.backward(halves.queries(q), k2, v2, residuals2, halves.visibility(), options)
        dreceived += halves.scatter(_pack(*dkv2), queries=False)
        return (dq + halves.scatter(dq2, queries=True), next_received, dreceived), None

    start = dq.astype(jnp.float32), first_received, _pack(*dkv).astype(jnp.float32)
    (dq, _, dreceived), _ = lax.scan(step, start, jnp.arange(1, sharding.hops))
    return (dq, *_unpack(sharding.send(dreceived), k))


def _gather_forward(kernel: Kernel, options: ScoreOptions, sequence: _Sequence, qkv: Triple) -> Half:
    """Gather the keys and values of the whole sequence."""
    q, k, v = qkv
    return kernel.forward(q, *_gathered(sequence.sharding, k, v), _gathered_visibility(sequence), options)


def _gather_backward(
    kernel: Kernel, options: ScoreOptions, sequence: _Sequence, qkv: Triple, residuals: AttentionResiduals
) -> Triple:
    """Gather keys and values again, and reduce-scatter the gradients of all of them."""
    sharding, (q, k, v) = sequence.sharding, qkv
    visibility = _gathered_visibility(sequence)
    dq, dk, dv = kernel.backward(q, *_gathered(sharding, k, v), residuals, visibility, options)
    dkv = _zigzag(_pack(dk, dv).astype(jnp.float32), sharding.hops)
    return (dq, *_unpack(lax.psum_scatter(dkv, sharding.axes, scatter_dimension=1, tiled=True), k))


def _gathered(sharding: SequenceSharding, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _unpack(_unzigzag(lax.all_gather(_pack(k, v), sharding.axes, axis=1, tiled=True), sharding.hops), k)


def _pack(k: jax.Array, v: jax.Array) -> jax.Array:
    """Keys and values as one array, so that one transfer carries both."""
    return jnp.concatenate([k, v], axis=-1)


def _unpack(kv: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    return kv[..., : k.shape[-1]], kv[..., k.shape[-1] :]


def _where(condition: jax.Array, yes: Any, no: Any) -> Any:
    return jax.tree.map(partial(jnp.where, condition), yes, no)


class ContextMethod(NamedTuple):
    """A method of context parallelism: functions of one device's shards.

    forward(kernel, options, sequence, (q, k, v)) -> output, lse; backward(..., residuals) -> gradients of q, k and v.
    `exchanges`: heads are exchanged for tokens before (Ulysses).
    """

    forward: Callable[[Kernel, ScoreOptions, _Sequence, Triple], Half]
    backward: Callable[[Kernel, ScoreOptions, _Sequence, Triple, AttentionResiduals], Triple]
    exchanges: bool = False


LOCAL = ContextMethod(_local_forward, _local_backward)
"""A single hop: each device holds whole sequences."""

CONTEXT_METHODS = {
    "ring": ContextMethod(_ring_forward, _ring_backward),
    "all_gather": ContextMethod(_gather_forward, _gather_backward),
    "ulysses": ContextMethod(_ring_forward, _ring_backward, exchanges=True),
}
"""attention.context_parallel -> method."""


def sequence_sharding(context_method: str, axes: tuple[Axis, ...], devices: int, heads: int) -> SequenceSharding:
    """The sharding of a sequence over `devices` along `axes`, where each device holds `heads` query heads.

    Ulysses exchanges heads in groups of gcd(heads, devices) devices; the groups form a ring.
    """
    group = math.gcd(heads, devices) if CONTEXT_METHODS[context_method].exchanges else 1
    return SequenceSharding(axes, devices // group, group)


def attend_sharded(
    q_BLHE: jax.Array, k_BLKE: jax.Array, v_BLKV: jax.Array, tokens: TokenPositions, options: ScoreOptions,
    sinks_H: jax.Array | None, context_method: str, kernel: Kernel = TILES,
) -> jax.Array:  # fmt: skip
    """Attention by a kernel inside a shard_map (without a mesh, on one device); [B, L, H, V].

    Batch, heads and sequence length are sharded by the rules in force, and kv heads are repeated until they can be
    sharded like the query heads. Over several devices a sequence is in zig-zag order; each document must be contiguous
    in the natural order, with positions from 0, as the loader makes it.
    """
    mesh, (B, _, H, _), K = active_mesh(), q_BLHE.shape, k_BLKE.shape[2]
    batch, length, heads = dividing_axes("batch", B), active_axes("seq_len"), dividing_axes("heads", H)
    devices, shards = (1 if mesh is None else math.prod(mesh.shape[a] for a in axes) for axes in (length, heads))
    sharding = sequence_sharding(context_method, length, devices, H // shards)
    method = LOCAL if sharding.hops == 1 else CONTEXT_METHODS[context_method]
    q, k, v = q_BLHE, *(jnp.repeat(x, math.lcm(K, shards * sharding.group) // K, axis=2) for x in (k_BLKE, v_BLKV))
    # Keep a static window static: kernels skip key blocks outside it.
    traced = options.window if isinstance(options.window, jax.Array) else None
    static = options if traced is None else options._replace(window=None)
    attention = _differentiable(method, kernel, sharding, static, batch, heads)
    if sharding.group == 1:
        return attention(q, k, v, tokens, traced, sinks_H)
    by_head = make_spec([batch, length, heads])
    scatter, gather = (shard_mapped(partial(f, sharding), (by_head,), by_head) for f in (_scatter_heads, _gather_heads))
    exchange, restore = _with_inverse(scatter, gather), _with_inverse(gather, scatter)
    out = attention(exchange(q), exchange(k), exchange(v), tokens, traced, sinks_H)
    # Named again: a policy that saves the output saves it after this exchange, which is then not repeated.
    return tag(restore(out), "attention_out")


def _with_inverse(permute: Callable[[jax.Array], jax.Array], inverse: Callable[[jax.Array], jax.Array]) -> Any:
    """`permute`, which only moves values, with `inverse` as the function of its cotangent."""
    differentiable = jax.custom_vjp(permute)
    differentiable.defvjp(lambda x: (permute(x), None), lambda _, cotangent: (inverse(cotangent),))
    return differentiable


def _differentiable(
    method: ContextMethod,
    kernel: Kernel,
    sharding: SequenceSharding,
    static: ScoreOptions,
    batch: tuple[Axis, ...],
    heads: tuple[Axis, ...],
) -> Callable[..., jax.Array]:
    """The function (q, k, v, tokens, traced window, sinks) -> output of global arrays, with a custom gradient.

    The shard-mapped backward function is made here, because JAX traces it outside `use_rules`.
    """

    def sequence_and_options(tokens: TokenPositions, window: Window) -> tuple[_Sequence, ScoreOptions]:
        options = static if window is None else static._replace(window=window)
        return _sequence_of(tokens, sharding, options.window), options

    def forward(
        q: jax.Array, k: jax.Array, v: jax.Array, tokens: TokenPositions, window: Window, sinks: jax.Array | None
    ) -> Half:
        sequence, options = sequence_and_options(tokens, window)
        out, lse = method.forward(kernel, options, sequence, (q, k, v))
        if sinks is not None:
            out, lse = blocks.add_sinks(out.astype(jnp.float32), lse, sharding.local_sinks(sinks, q.shape[2]))
        return out.astype(q.dtype), lse

    def backward(inputs: Any, out: jax.Array, lse: jax.Array, dout: jax.Array) -> tuple[Any, ...]:
        q, k, v, tokens, window, sinks = inputs
        sequence, options = sequence_and_options(tokens, window)
        residuals = AttentionResiduals(out, lse, dout, blocks.row_delta(out, dout))
        gradients = method.backward(kernel, options, sequence, (q, k, v), residuals)
        dq, dk, dv = (g.astype(x.dtype) for g, x in zip(gradients, (q, k, v), strict=True))
        dsinks = None
        if sinks is not None:
            local = blocks.sinks_gradient(lse, residuals.delta_BHP, sharding.local_sinks(sinks, q.shape[2]))
            dsinks, axes = sharding.all_sinks(local, sinks), (*batch, *sharding.axes)
            dsinks = (lax.psum(dsinks, axes) if axes else dsinks).astype(sinks.dtype)
        return dq, dk, dv, None, None, dsinks

    if active_mesh() is None:
        return custom_vjp_with_residuals(forward, backward, "attention_out")
    by_head, of_heads = make_spec([batch, sharding.axes, heads]), make_spec([heads])
    inputs = by_head, by_head, by_head, make_spec([batch]), PartitionSpec(), of_heads
    outputs = by_head, make_spec([batch, heads, sharding.axes])
    gradients = by_head, by_head, by_head, None, None, of_heads
    # A remat policy that saves attention_out does not run the forward pass again.
    return custom_vjp_with_residuals(
        shard_mapped(forward, inputs, outputs),
        shard_mapped(backward, (inputs, *outputs, by_head), gradients),
        "attention_out",
    )


def _scatter_heads(sharding: SequenceSharding, x: jax.Array) -> jax.Array:
    """[B, P, H, E] -> [B, group x P, H / group, E]: all tokens of the group in natural order, a part of the heads."""
    B, P, H, E = x.shape
    parts = jnp.moveaxis(x.reshape(B, P, sharding.group, H // sharding.group, E), 2, 0)
    return _unzigzag(jnp.moveaxis(sharding.exchange(parts), 0, 1).reshape(B, P * sharding.group, -1, E), sharding.group)


def _gather_heads(sharding: SequenceSharding, x: jax.Array) -> jax.Array:
    """The inverse of `_scatter_heads`."""
    B, P, H, E = x.shape
    parts = jnp.moveaxis(_zigzag(x, sharding.group).reshape(B, sharding.group, P // sharding.group, H, E), 1, 0)
    return jnp.moveaxis(sharding.exchange(parts), 0, 2).reshape(B, P // sharding.group, H * sharding.group, E)
