"""Tokens to the devices that own their experts, through grouped matmuls, and back in their own order.

Rows are sorted by expert on the device that holds the tokens, so one ragged all-to-all lays them into the owner's
buffer expert by expert, and another brings the results back. Nothing is dropped unless the buffer is bounded below the
worst case. Results are combined by a gather and a sum in the order of a token's choices: the same every time.

B batch, L length, T tokens of a turn, D model, F feed-forward, X experts, K experts a token visits, N devices of an
expert group, E experts of a device, S rows sorted by expert (T x K), R rows of the receive buffer, M devices of F.
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
from jaxtrain.ops.grouped import grouped_matmul, groups_of, platform_of
from jaxtrain.ops.ragged import Slices, exchange
from jaxtrain.ops.reference import uses_reference

BUFFER_BYTES = 2**28
"""Tokens are taken in as many turns as keep one buffer of rows of width D within this; about eight live at once."""

Axes = tuple[Axis, ...]
Hidden = Callable[[jax.Array | None, jax.Array], jax.Array]
"""(gate or None, up) -> what the down projection reads."""


class Map(NamedTuple):
    """A linear map an expert: weight [X, in, out], bias [X, out] or None."""

    weight: Any
    bias: Any


class Experts(NamedTuple):
    """The maps of each expert's feed-forward layer; gate None: no gate."""

    gate: Map | None
    up: Map
    down: Map


def mixture(
    x_BLD: jax.Array,
    chosen_BLK: jax.Array,
    weights_BLK: jax.Array,
    experts: Experts,
    hidden: Hidden,
    capacity: int | None = None,
    buffer: float | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sum over a token's choices of weight x expert [B, L, D]; choices that did not fit; rows sent [N, N].

    chosen_BLK holds expert numbers, X for nowhere. `capacity`: no expert is chosen by more tokens of a row. `buffer`:
    rows that a device can receive, as a multiple of its tokens x K; None is the worst case. Experts may be sharded as
    the names experts, embed, mlp and norm say, tokens as batch and length. Raises ConfigError where the experts lie on
    axes over which the length cannot be split.
    """
    if uses_reference():
        y_BLD = _loop(x_BLD, chosen_BLK, weights_BLK, experts, hidden)
        return y_BLD, jnp.zeros((), jnp.int32), jnp.zeros((1, 1), jnp.int32)
    split = _split(x_BLD.shape, experts)
    plan = _plan(x_BLD, chosen_BLK.shape[-1], experts.up.weight.shape[0], split, capacity, buffer)
    others = tuple(axis for axis in split.tokens if axis not in split.experts)

    def local(x_BLD: jax.Array, chosen_BLK: jax.Array, weights_BLK: jax.Array, experts: Experts) -> Any:
        whole = _gathered(experts, split)
        y_BLD, lost, sent_N = _in_turns(
            x_BLD, chosen_BLK, weights_BLK, whole, partial(_feed_forward, hidden, split), plan
        )
        return y_BLD[None], lax.psum(lost, split.tokens), lax.psum(sent_N[None], others)

    if active_mesh() is None:
        y_1BLD, lost, traffic_NN = local(x_BLD, chosen_BLK, weights_BLK, experts)
        return y_1BLD[0], lost, traffic_NN
    tokens = make_spec((split.batch, split.length, ()))
    y_MBLD, lost, traffic_NN = shard_mapped(
        local,
        (tokens, tokens, tokens, split.maps),
        (make_spec((split.mlp, split.batch, split.length, ())), PartitionSpec(), make_spec((split.experts, ()))),
    )(x_BLD, chosen_BLK, weights_BLK, experts)
    if not split.mlp:
        return y_MBLD[0], lost, traffic_NN
    # Each made its part of the sum over F. lax.reduce keeps the dtype on the wire, jnp.sum would widen it.
    return lax.reduce(y_MBLD, jnp.zeros((), y_MBLD.dtype), lax.add, (0,)), lost, traffic_NN


class ExpertSharding(NamedTuple):
    """Mesh axes of the dims of tokens and experts here."""

    batch: Axes
    length: Axes
    experts: Axes
    mlp: Axes
    maps: Experts
    """Specs of the experts' arrays."""

    @property
    def tokens(self) -> Axes:
        """Axes whose devices hold other tokens."""
        return self.batch + self.length


class Plan(NamedTuple):
    """How one device deals with its tokens: known while tracing."""

    axes: Axes
    """Axes of an expert group; () where each device holds all experts."""
    peers: int
    """Devices of a group."""
    experts: int
    turns: int
    """Parts in which the tokens are taken."""
    tokens: int
    """Tokens of a turn; the last is filled up with some that go nowhere."""
    rows: int
    """Rows of the receive buffer of a turn."""
    platform: str


def _split(shape: tuple[int, ...], experts: Experts) -> ExpertSharding:
    X, D, F = experts.up.weight.shape
    owners, batch, length = _axes("experts", X), active_axes("batch"), active_axes("seq_len")
    # Devices of a group that hold the same tokens take a part of them each.
    length += tuple(axis for axis in owners if axis not in batch + length)
    if shape[1] % _extent(length):
        raise ConfigError(
            f"data.seq_len {shape[1]} is not divisible by {show_axes(length)} = {_extent(length)}, over which "
            "rules.seq_len and rules.experts split the tokens of a mixture: change data.seq_len, mesh or rules.experts"
        )
    mlp = tuple(axis for axis in _axes("mlp", F) if axis not in owners)
    embed, norm = _axes("embed", D), _axes("norm", D)

    def specs(a: Map, *dims: Axes, bias: Axes) -> Map:
        return Map(make_spec((owners, *dims)), None if a.bias is None else make_spec((owners, bias)))

    gate = experts.gate and specs(experts.gate, embed, mlp, bias=mlp)
    maps = Experts(gate, specs(experts.up, embed, mlp, bias=mlp), specs(experts.down, mlp, embed, bias=norm))
    return ExpertSharding(batch, length, owners, mlp, maps)


def _axes(name: str, size: int) -> Axes:
    """Axes of a parameter's dim here; one that they do not divide is whole (rules.allow: indivisible)."""
    axes = active_axes(name)
    return () if size % _extent(axes) else axes


def _extent(axes: Axes) -> int:
    mesh = active_mesh()
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in axes)


def _plan(
    x_BLD: jax.Array, top_k: int, experts: int, split: ExpertSharding, capacity: int | None, buffer: float | None
) -> Plan:
    B, L, D = x_BLD.shape
    B, L, peers = B // _extent(split.batch), L // _extent(split.length), _extent(split.experts)
    own = experts // peers

    def rows(tokens: int) -> int:
        """Receive buffer of a turn: what its devices can send at most, or the stated bound."""
        worst = peers * tokens * min(top_k, own)
        if capacity is not None:
            # A turn touches so many rows of the batch, whole or in part.
            touched = min(B, (tokens - 1) // L + 2)
            worst = min(worst, peers * own * min(capacity * touched, tokens))
        bounded = worst if buffer is None or peers == 1 else min(worst, math.ceil(buffer * tokens * top_k))
        return bounded if peers > 1 else tokens * top_k

    turns = 1
    while rows(-(-B * L // turns)) * D * x_BLD.dtype.itemsize > BUFFER_BYTES and turns < B * L:
        turns *= 2
    tokens = -(-B * L // turns)
    return Plan(split.experts, peers, experts, turns, tokens, rows(tokens), platform_of(active_mesh()))


def _gathered(experts: Experts, split: ExpertSharding) -> Experts:
    """Shards of a device's experts with what other names split (FSDP) made whole; backward reduce-scatters."""

    def whole(a: jax.Array, spec: PartitionSpec) -> jax.Array:
        for dim, axes in enumerate(spec_axes(spec, a.ndim)):
            rest = tuple(axis for axis in axes if axis not in split.experts + split.mlp)
            a = lax.all_gather(a, rest, axis=dim, tiled=True) if rest else a
        return a

    return jax.tree.map(whole, experts, split.maps)


def _in_turns(
    x_BLD: jax.Array, chosen_BLK: jax.Array, weights_BLK: jax.Array, experts: Experts, feed_forward: Any, plan: Plan
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A device's tokens through the experts, part by part: [B, L, D], choices lost, rows sent to each peer [N]."""
    B, L, D = x_BLD.shape
    spare = plan.turns * plan.tokens - B * L

    def parts(a: jax.Array, fill: int) -> jax.Array:
        flat = a.reshape(B * L, a.shape[-1])
        padded = jnp.concatenate([flat, jnp.full((spare, a.shape[-1]), fill, a.dtype)]) if spare else flat
        return padded.reshape(plan.turns, plan.tokens, a.shape[-1])

    fields = parts(x_BLD, 0), parts(chosen_BLK, plan.experts), parts(weights_BLK, 0)

    def turn(_: None, part: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[None, Any]:
        return None, _turn(*part, experts, feed_forward, plan)

    if plan.turns == 1:
        y_TD, lost, sent_N = turn(None, jax.tree.map(lambda a: a[0], fields))[1]
    else:
        # What a turn keeps would add up to what turns are there to avoid.
        _, (y_TD, lost, sent_N) = lax.scan(jax.checkpoint(turn, prevent_cse=False), None, fields)
        lost, sent_N = jnp.sum(lost), jnp.sum(sent_N, axis=0)
    return y_TD.reshape(-1, D)[: B * L].reshape(B, L, D), lost, sent_N


def _turn(
    x_TD: jax.Array, chosen_TK: jax.Array, weights_TK: jax.Array, experts: Experts, feed_forward: Any, plan: Plan
) -> tuple[jax.Array, jax.Array, jax.Array]:
    order_S = jnp.argsort(chosen_TK.reshape(-1), stable=True)
    places_TK = jnp.argsort(order_S).reshape(chosen_TK.shape)
    count_X = jnp.sum(chosen_TK.reshape(-1, 1) == jnp.arange(plan.experts), axis=0, dtype=jnp.int32)
    x_SD = _spread(x_TD, order_S, places_TK)
    if plan.peers == 1:
        y_SD, lost, sent_N = (
            feed_forward(x_SD, experts, count_X, plan),
            jnp.zeros((), jnp.int32),
            jnp.zeros(1, jnp.int32),
        )
    else:
        there, back, sizes_E, sent_N = _routes(count_X, plan)
        x_RD = exchange(x_SD, there, back, plan.rows, plan.axes, plan.platform)
        y_RD = feed_forward(x_RD, experts, sizes_E, plan)
        y_SD = exchange(y_RD, back, there, x_SD.shape[0], plan.axes, plan.platform)
        lost = jnp.sum(count_X) - jnp.sum(there.size)
    # float32 sums of the compute dtype's products: the order of a token's choices is the order of the sum.
    y_TKD = _collect(y_SD, order_S, places_TK)
    weights_TK = jnp.where(chosen_TK < plan.experts, weights_TK, 0.0).astype(y_TKD.dtype)
    y_TD = jnp.einsum("tk,tkd->td", weights_TK, y_TKD, preferred_element_type=jnp.float32)
    return y_TD.astype(x_TD.dtype), lost, sent_N


def _routes(count_X: jax.Array, plan: Plan) -> tuple[Slices, Slices, jax.Array, jax.Array]:
    """Ways there and back, rows of each expert of this device [E], rows sent to each other device [N].

    A buffer holds its experts in order, and of each expert the rows of the first device first; what lies beyond the
    buffer's end is not sent.
    """
    n, own, me = plan.peers, plan.experts // plan.peers, lax.axis_index(plan.axes)
    count_NNE = lax.all_gather(count_X, plan.axes).reshape(n, n, own)
    start_NNE = _before(count_NNE.reshape(n, -1)).reshape(n, n, own)
    # [owner, expert, source]
    count_NEN = count_NNE.transpose(1, 2, 0)
    target_NEN = jnp.minimum(_before(count_NEN.reshape(n, -1)).reshape(n, own, n), plan.rows)
    size_NEN = jnp.minimum(count_NEN, plan.rows - target_NEN)
    there = jax.tree.map(jnp.ravel, Slices(start_NNE[me], size_NEN[:, :, me], target_NEN[:, :, me], size_NEN[me].T))
    back = jax.tree.map(jnp.ravel, Slices(target_NEN[me].T, size_NEN[me].T, start_NNE[:, me], size_NEN[:, :, me]))
    sent_N = jnp.where(jnp.arange(n) == me, 0, jnp.sum(size_NEN[:, :, me], axis=1))
    sizes_E = jnp.sum(size_NEN[me], axis=1)
    return there, back, sizes_E, sent_N


def _before(sizes: jax.Array) -> jax.Array:
    """Sum of the sizes before each, along the last dim."""
    return jnp.cumsum(sizes, axis=-1) - sizes


def _feed_forward(
    hidden: Hidden, split: ExpertSharding, x_RD: jax.Array, experts: Experts, sizes_E: jax.Array, plan: Plan
) -> jax.Array:
    """Rows grouped by expert through their expert's maps [R, D]; a part of the sum over F where F is split."""
    group_R = groups_of(sizes_E, x_RD.shape[0])

    def apply(x: jax.Array, a: Map, share: int = 1) -> jax.Array:
        y = grouped_matmul(x, a.weight, sizes_E, plan.platform)
        return y if a.bias is None else y + (a.bias / share)[group_R].astype(y.dtype)

    gate_RF = None if experts.gate is None else apply(x_RD, experts.gate)
    h_RF = hidden(gate_RF, apply(x_RD, experts.up))
    # Where F is split each adds its share of the bias.
    return apply(h_RF, experts.down, _extent(split.mlp))


@jax.custom_vjp
def _spread(x_TD: jax.Array, order_S: jax.Array, places_TK: jax.Array) -> jax.Array:
    """Rows sorted by expert: row s is token order_S[s] // K. The gradient gathers too, in the order of the choices."""
    return x_TD[order_S // places_TK.shape[1]]


def _spread_backward(kept: tuple[jax.Array, jax.Array], cotangent_SD: jax.Array) -> tuple[jax.Array, None, None]:
    order_S, places_TK = kept
    cotangent_TD = jnp.sum(_collect(cotangent_SD, order_S, places_TK), axis=1, dtype=jnp.float32)
    return cotangent_TD.astype(cotangent_SD.dtype), None, None


_spread.defvjp(lambda x, order, places: (_spread(x, order, places), (order, places)), _spread_backward)


@jax.custom_vjp
def _collect(y_SD: jax.Array, order_S: jax.Array, places_TK: jax.Array) -> jax.Array:
    """Sorted rows back at their tokens' choices [T, K, D]; the gradient is the permutation the other way."""
    return y_SD[places_TK]


def _collect_backward(kept: jax.Array, cotangent_TKD: jax.Array) -> tuple[jax.Array, None, None]:
    return cotangent_TKD.reshape(-1, cotangent_TKD.shape[-1])[kept], None, None


_collect.defvjp(lambda y, order, places: (_collect(y, order, places), order), _collect_backward)


def _loop(
    x_BLD: jax.Array, chosen_BLK: jax.Array, weights_BLK: jax.Array, experts: Experts, hidden: Hidden
) -> jax.Array:
    """Every expert on every token, weighted: plain mathematics."""

    def apply(x: jax.Array, a: Map) -> jax.Array:
        return x @ a.weight if a.bias is None else x @ a.weight + a.bias

    def one(total_BLD: jax.Array, expert: tuple[jax.Array, Experts]) -> tuple[jax.Array, None]:
        number, (gate, up, down) = expert
        weight_BL = jnp.sum(jnp.where(chosen_BLK == number, weights_BLK, 0.0), axis=-1)
        y_BLD = apply(hidden(None if gate is None else apply(x_BLD, gate), apply(x_BLD, up)), down)
        return total_BLD + (weight_BL[..., None] * y_BLD).astype(x_BLD.dtype), None

    return lax.scan(one, jnp.zeros_like(x_BLD), (jnp.arange(experts.up.weight.shape[0]), experts))[0]
