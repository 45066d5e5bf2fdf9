"""Dispatch of tokens to the devices that hold their experts, grouped matmuls, and the combination of the results.

Each device sorts its tokens by expert. One ragged all-to-all writes them into the receive buffers of the devices of
these experts, expert by expert, and another returns the results. No token is dropped unless the buffer is bounded below
the worst case. Results are combined by a gather and a sum in the order of a token's choices, which is deterministic.

B batch, L sequence length, T tokens of a chunk, D model, F feed-forward, X experts, K experts a token visits, N devices
of an expert group, E experts of a device, S copies of tokens sorted by expert (T x K), R tokens of the receive buffer,
M devices of F.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxtrain.config import Axis, ConfigError
from jaxtrain.mesh.constraints import active_axes, active_mesh
from jaxtrain.mesh.param import make_spec, show_axes, spec_axes
from jaxtrain.mesh.shard_map import shard_mapped
from jaxtrain.ops.chunks import scan_chunks
from jaxtrain.ops.grouped import add_group_bias, grouped_matmul, groups_of, platform_of
from jaxtrain.ops.linear import add_bias, contract
from jaxtrain.ops.ragged import RaggedSlices, exchange
from jaxtrain.ops.reference import uses_reference

BUFFER_BYTES = 2**28
"""Upper bound of one receive buffer [R, D], which sets the number of chunks; about eight are live at once."""

AxisTuple = tuple[Axis, ...]
HiddenFunction = Callable[[jax.Array | None, jax.Array], jax.Array]
"""(gate or None, up) -> input of the down projection."""


class ExpertLinear(NamedTuple):
    """One linear map per expert: weight [X, in, out], bias [X, out] or None."""

    weight: Any
    bias: Any


class Experts(NamedTuple):
    """The linear maps of each expert's feed-forward layer; gate None: no gate."""

    gate: ExpertLinear | None
    up: ExpertLinear
    down: ExpertLinear


def mixture(
    x_BLD: jax.Array,
    chosen_BLK: jax.Array,
    weights_BLK: jax.Array,
    experts: Experts,
    hidden: HiddenFunction,
    capacity: int | None = None,
    buffer: float | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sum over a token's choices of weight x expert(token) [B, L, D]; number of lost choices; tokens sent [N, N].

    chosen_BLK holds expert indices, X for no expert. `capacity`: the largest number of tokens of a sequence that choose
    one expert. `buffer`: tokens that a device can receive, as a multiple of its tokens x K; None: the worst case.
    Experts are sharded by the names experts, embed, mlp and norm, tokens by batch and seq_len. Raises ConfigError where
    the axes of the experts must split the sequence length and do not divide it.
    """
    if uses_reference():
        y_BLD = _loop(x_BLD, chosen_BLK, weights_BLK, experts, hidden)
        return y_BLD, jnp.zeros((), jnp.int32), jnp.zeros((1, 1), jnp.int32)
    sharding = _sharding(x_BLD.shape, experts)
    shape = _dispatch_shape(x_BLD, chosen_BLK.shape[-1], experts.up.weight.shape[0], sharding, capacity, buffer)
    others = tuple(axis for axis in sharding.tokens if axis not in sharding.experts)

    def local(x_BLD: jax.Array, chosen_BLK: jax.Array, weights_BLK: jax.Array, experts: Experts) -> Any:
        gathered = _gathered(experts, sharding, x_BLD.dtype)
        y_BLD, lost, sent_N = _in_chunks(
            x_BLD, chosen_BLK, weights_BLK, gathered, partial(_feed_forward, hidden, sharding), shape
        )
        return y_BLD[None], lax.psum(lost, sharding.tokens), lax.psum(sent_N[None], others)

    if active_mesh() is None:
        y_1BLD, lost, traffic_NN = local(x_BLD, chosen_BLK, weights_BLK, experts)
        return y_1BLD[0], lost, traffic_NN
    tokens = make_spec((sharding.batch, sharding.length, ()))
    y_MBLD, lost, traffic_NN = shard_mapped(
        local,
        (tokens, tokens, tokens, sharding.maps),
        (
            make_spec((sharding.mlp, sharding.batch, sharding.length, ())),
            PartitionSpec(),
            make_spec((sharding.experts, ())),
        ),
    )(x_BLD, chosen_BLK, weights_BLK, experts)
    if not sharding.mlp:
        return y_MBLD[0], lost, traffic_NN
    # The sum over the shards of F. lax.reduce sends the compute dtype; jnp.sum would send float32.
    return lax.reduce(y_MBLD, jnp.zeros((), y_MBLD.dtype), lax.add, (0,)), lost, traffic_NN


class ExpertSharding(NamedTuple):
    """Mesh axes that shard the dims of tokens and of experts."""

    batch: AxisTuple
    length: AxisTuple
    experts: AxisTuple
    mlp: AxisTuple
    maps: Experts
    """Specs of the experts' arrays."""

    @property
    def tokens(self) -> AxisTuple:
        """Axes whose devices hold different tokens."""
        return self.batch + self.length


class DispatchShape(NamedTuple):
    """Static sizes of the dispatch on one device."""

    axes: AxisTuple
    """Axes of an expert group; () if each device holds all experts."""
    peers: int
    """Number of devices of an expert group."""
    experts: int
    chunks: int
    """Number of chunks of tokens, processed one after the other."""
    tokens: int
    """Tokens of a chunk; the last chunk is padded with tokens that choose no expert."""
    received: int
    """Tokens that the receive buffer of a chunk holds."""
    platform: str


def _sharding(shape: tuple[int, ...], experts: Experts) -> ExpertSharding:
    X, D, F = experts.up.weight.shape
    owners, batch, length = _axes("experts", X), active_axes("batch"), active_axes("seq_len")
    # Devices of an expert group that hold the same tokens each process a part of them.
    length += tuple(axis for axis in owners if axis not in batch + length)
    if shape[1] % _extent(length):
        raise ConfigError(
            f"data.seq_len {shape[1]} is not divisible by {show_axes(length)} = {_extent(length)}, over which "
            "rules.seq_len and rules.experts shard the tokens of a mixture: change data.seq_len, mesh or rules.experts"
        )
    mlp = tuple(axis for axis in _axes("mlp", F) if axis not in owners)
    embed, norm = _axes("embed", D), _axes("norm", D)

    def specs(linear: ExpertLinear, *dims: AxisTuple, bias: AxisTuple) -> ExpertLinear:
        return ExpertLinear(make_spec((owners, *dims)), None if linear.bias is None else make_spec((owners, bias)))

    gate = experts.gate and specs(experts.gate, embed, mlp, bias=mlp)
    maps = Experts(gate, specs(experts.up, embed, mlp, bias=mlp), specs(experts.down, mlp, embed, bias=norm))
    return ExpertSharding(batch, length, owners, mlp, maps)


def _axes(name: str, size: int) -> AxisTuple:
    """Axes that shard a parameter's dim; () for a dim that they do not divide (rules.allow: indivisible)."""
    axes = active_axes(name)
    return () if size % _extent(axes) else axes


def _extent(axes: AxisTuple) -> int:
    mesh = active_mesh()
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in axes)


def _dispatch_shape(
    x_BLD: jax.Array, top_k: int, experts: int, sharding: ExpertSharding, capacity: int | None, buffer: float | None
) -> DispatchShape:
    B, L, D = x_BLD.shape
    B, L, peers = B // _extent(sharding.batch), L // _extent(sharding.length), _extent(sharding.experts)
    local = experts // peers

    def received(tokens: int) -> int:
        """Size of the receive buffer of a chunk: the worst case, or the configured bound."""
        worst = peers * tokens * min(top_k, local)
        if capacity is not None:
            # A chunk has tokens of at most so many sequences.
            sequences = min(B, (tokens - 1) // L + 2)
            worst = min(worst, peers * local * min(capacity * sequences, tokens))
        bounded = worst if buffer is None or peers == 1 else min(worst, math.ceil(buffer * tokens * top_k))
        return bounded if peers > 1 else tokens * top_k

    chunks = 1
    while received(-(-B * L // chunks)) * D * x_BLD.dtype.itemsize > BUFFER_BYTES and chunks < B * L:
        chunks *= 2
    tokens = -(-B * L // chunks)
    return DispatchShape(sharding.experts, peers, experts, chunks, tokens, received(tokens), platform_of(active_mesh()))


def _gathered(experts: Experts, sharding: ExpertSharding, dtype: jnp.dtype) -> Experts:
    """All-gather this device's experts over the axes of their other dims (FSDP); backward reduce-scatters."""

    def gather(a: jax.Array, spec: PartitionSpec) -> jax.Array:
        for dim, axes in enumerate(spec_axes(spec, a.ndim)):
            rest = tuple(axis for axis in axes if axis not in sharding.experts + sharding.mlp)
            a = _all_gather(a, rest, dim, dtype) if rest else a
        return a

    return jax.tree.map(gather, experts, sharding.maps)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _all_gather(a: jax.Array, axes: AxisTuple, dim: int, dtype: jnp.dtype) -> jax.Array:
    """All-gather in `dtype`, reduce-scatter of the gradient in a's dtype."""
    return lax.all_gather(a.astype(dtype), axes, axis=dim, tiled=True).astype(a.dtype)


_all_gather.defvjp(
    lambda a, axes, dim, dtype: (_all_gather(a, axes, dim, dtype), None),
    lambda axes, dim, dtype, _, cotangent: (lax.psum_scatter(cotangent, axes, scatter_dimension=dim, tiled=True),),
)


def _in_chunks(
    x_BLD: jax.Array,
    chosen_BLK: jax.Array,
    weights_BLK: jax.Array,
    experts: Experts,
    feed_forward: Any,
    shape: DispatchShape,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Process a device's tokens chunk by chunk: output [B, L, D], lost choices, tokens sent to each peer [N]."""
    B, L, D = x_BLD.shape
    padding = shape.chunks * shape.tokens - B * L

    def cut(a: jax.Array, fill: int) -> jax.Array:
        flat = a.reshape(B * L, a.shape[-1])
        padded = jnp.concatenate([flat, jnp.full((padding, a.shape[-1]), fill, a.dtype)]) if padding else flat
        return padded.reshape(shape.chunks, shape.tokens, a.shape[-1])

    floats, chosen = (cut(x_BLD, 0), cut(weights_BLK, 0)), cut(chosen_BLK, shape.experts)

    def step(floats: tuple[jax.Array, jax.Array], chosen_TK: jax.Array, experts: Experts) -> Any:
        x_TD, weights_TK = floats
        y_TD, lost, sent_N = _chunk(x_TD, chosen_TK, weights_TK, experts, feed_forward, shape)
        return y_TD, (lost, sent_N)

    if shape.chunks == 1:
        y_TD, (lost, sent_N) = step((floats[0][0], floats[1][0]), chosen[0], experts)
    else:
        y_TD, (lost, sent_N) = scan_chunks(step, x_BLD.dtype, floats, chosen, experts)
        lost, sent_N = jnp.sum(lost), jnp.sum(sent_N, axis=0)
    return y_TD.reshape(-1, D)[: B * L].reshape(B, L, D), lost, sent_N


def _chunk(
    x_TD: jax.Array,
    chosen_TK: jax.Array,
    weights_TK: jax.Array,
    experts: Experts,
    feed_forward: Any,
    shape: DispatchShape,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    order_S = jnp.argsort(chosen_TK.reshape(-1), stable=True)
    slots_TK = jnp.argsort(order_S).reshape(chosen_TK.shape)
    count_X = jnp.sum(chosen_TK.reshape(-1, 1) == jnp.arange(shape.experts), axis=0, dtype=jnp.int32)
    x_SD = _expand(x_TD, order_S, slots_TK)
    if shape.peers == 1:
        y_SD, lost, sent_N = (
            feed_forward(x_SD, experts, count_X, shape),
            jnp.zeros((), jnp.int32),
            jnp.zeros(1, jnp.int32),
        )
    else:
        outbound, inbound, sizes_E, sent_N = _routes(count_X, shape)
        x_RD = exchange(x_SD, outbound, inbound, shape.received, shape.axes, shape.platform)
        y_RD = feed_forward(x_RD, experts, sizes_E, shape)
        y_SD = exchange(y_RD, inbound, outbound, x_SD.shape[0], shape.axes, shape.platform)
        lost = jnp.sum(count_X) - jnp.sum(outbound.size)
    # Products in the compute dtype, summed in float32 in the order of a token's choices.
    y_TKD = _collect(y_SD, order_S, slots_TK)
    weights_TK = jnp.where(chosen_TK < shape.experts, weights_TK, 0.0).astype(y_TKD.dtype)
    y_TD = jnp.einsum("tk,tkd->td", weights_TK, y_TKD, preferred_element_type=jnp.float32)
    return y_TD.astype(x_TD.dtype), lost, sent_N


def _routes(count_X: jax.Array, shape: DispatchShape) -> tuple[RaggedSlices, RaggedSlices, jax.Array, jax.Array]:
    """Slices to the experts and back, tokens of each local expert [E], tokens sent to each other device [N].

    A buffer is sorted by expert, and within an expert by sender; tokens past its end are not sent.
    """
    n, local, me = shape.peers, shape.experts // shape.peers, lax.axis_index(shape.axes)
    count_NNE = lax.all_gather(count_X, shape.axes).reshape(n, n, local)
    start_NNE = _offsets(count_NNE.reshape(n, -1)).reshape(n, n, local)
    # [owner, expert, source]
    count_NEN = count_NNE.transpose(1, 2, 0)
    target_NEN = jnp.minimum(_offsets(count_NEN.reshape(n, -1)).reshape(n, local, n), shape.received)
    size_NEN = jnp.minimum(count_NEN, shape.received - target_NEN)
    outbound = jax.tree.map(
        jnp.ravel, RaggedSlices(start_NNE[me], size_NEN[:, :, me], target_NEN[:, :, me], size_NEN[me].T)
    )
    inbound = jax.tree.map(
        jnp.ravel, RaggedSlices(target_NEN[me].T, size_NEN[me].T, start_NNE[:, me], size_NEN[:, :, me])
    )
    sent_N = jnp.where(jnp.arange(n) == me, 0, jnp.sum(size_NEN[:, :, me], axis=1))
    sizes_E = jnp.sum(size_NEN[me], axis=1)
    return outbound, inbound, sizes_E, sent_N


def _offsets(sizes: jax.Array) -> jax.Array:
    """Exclusive cumulative sum along the last dim."""
    return jnp.cumsum(sizes, axis=-1) - sizes


def _feed_forward(
    hidden: HiddenFunction,
    sharding: ExpertSharding,
    x_RD: jax.Array,
    experts: Experts,
    sizes_E: jax.Array,
    shape: DispatchShape,
) -> jax.Array:
    """Apply each expert to its tokens [R, D], sorted by expert; a partial sum over F where F is sharded."""
    group_R = groups_of(sizes_E, x_RD.shape[0])

    def apply(x: jax.Array, linear: ExpertLinear, shards: int = 1) -> jax.Array:
        y = grouped_matmul(x, linear.weight, sizes_E, shape.platform)
        return y if linear.bias is None else add_group_bias(y, linear.bias / shards, group_R)

    gate_RF = None if experts.gate is None else apply(x_RD, experts.gate)
    h_RF = hidden(gate_RF, apply(x_RD, experts.up))
    # Each shard of F adds an equal part of the bias.
    return apply(h_RF, experts.down, _extent(sharding.mlp))


@jax.custom_vjp
def _expand(x_TD: jax.Array, order_S: jax.Array, slots_TK: jax.Array) -> jax.Array:
    """Copies of tokens sorted by expert [S, D]: copy s is token order_S[s] // K. The gradient is a gather and a sum."""
    return x_TD[order_S // slots_TK.shape[1]]


def _expand_backward(residuals: tuple[jax.Array, jax.Array], cotangent_SD: jax.Array) -> tuple[jax.Array, None, None]:
    order_S, slots_TK = residuals
    cotangent_TD = jnp.sum(_collect(cotangent_SD, order_S, slots_TK), axis=1, dtype=jnp.float32)
    return cotangent_TD.astype(cotangent_SD.dtype), None, None


_expand.defvjp(lambda x, order, slots: (_expand(x, order, slots), (order, slots)), _expand_backward)


@jax.custom_vjp
def _collect(y_SD: jax.Array, order_S: jax.Array, slots_TK: jax.Array) -> jax.Array:
    """Sorted results in the order of their tokens' choices [T, K, D]; the gradient is the inverse permutation."""
    return y_SD[slots_TK]


def _collect_backward(order_S: jax.Array, cotangent_TKD: jax.Array) -> tuple[jax.Array, None, None]:
    return cotangent_TKD.reshape(-1, cotangent_TKD.shape[-1])[order_S], None, None


_collect.defvjp(lambda y, order, slots: (_collect(y, order, slots), order), _collect_backward)


def _loop(
    x_BLD: jax.Array, chosen_BLK: jax.Array, weights_BLK: jax.Array, experts: Experts, hidden: HiddenFunction
) -> jax.Array:
    """The reference: every expert on every token, weighted."""

    def apply(x: jax.Array, linear: ExpertLinear) -> jax.Array:
        y = contract("BLI,IO->BLO", x, linear.weight)
        return y if linear.bias is None else add_bias(y, linear.bias)

    dtype, wide_BLD = x_BLD.dtype, x_BLD.astype(jnp.float32)

    def one(total_BLD: jax.Array, expert: tuple[jax.Array, Experts]) -> tuple[jax.Array, None]:
        number, (gate, up, down) = expert
        x_BLD = wide_BLD.astype(dtype)
        weight_BL = jnp.sum(jnp.where(chosen_BLK == number, weights_BLK, 0.0), axis=-1)
        y_BLD = apply(hidden(None if gate is None else apply(x_BLD, gate), apply(x_BLD, up)), down)
        return total_BLD + weight_BL[..., None] * y_BLD, None

    numbers = jnp.arange(experts.up.weight.shape[0])
    return lax.scan(one, jnp.zeros_like(wide_BLD), (numbers, experts))[0].astype(dtype)
