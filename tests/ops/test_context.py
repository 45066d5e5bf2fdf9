"""Context parallelism, each method, against one dense softmax over whole sequences."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.config import AXES, RulesConfig
from jaxtrain.mesh.constraints import active_axes, use_rules
from jaxtrain.mesh.rules import resolve_rules
from jaxtrain.ops import context
from jaxtrain.ops.blocks import TokenPositions
from jaxtrain.ops.kernels import ScoreOptions
from jaxtrain.ops.zigzag import zigzag_order

L, H, K, E, V = 32, 8, 2, 6, 4
# One document over all shards; a document of length 1, one that ends inside a shard, then only padding; many short
# documents; only padding.
SIZES = ([32], [1, 10], [3, 1, 7, 2, 9, 5, 5], [])


def tokens() -> tuple[np.ndarray, np.ndarray]:
    segments, positions = np.zeros((2, len(SIZES), L), np.int32)
    for b, sizes in enumerate(SIZES):
        ends = np.cumsum(sizes, dtype=int)
        for number, (size, end) in enumerate(zip(sizes, ends, strict=True)):
            segments[b, end - size : end] = number + 1
            positions[b, end - size : end] = np.arange(size)
    return segments, positions


def inputs(seed: int) -> tuple[jax.Array, ...]:
    shapes = ((L, H, E), (L, K, E), (L, K, V), (L, H, V))
    keys = jax.random.split(jax.random.key(seed), 5)
    normals = (2 * jax.random.normal(key, (len(SIZES), *shape)) for key, shape in zip(keys, shapes, strict=False))
    return (*normals, jax.random.normal(keys[4], (H,)))


def dense(q: Any, k: Any, v: Any, sinks: Any, score: ScoreOptions) -> jax.Array:
    """Softmax over whole sequences in natural order, from the definition."""
    segments, positions = tokens()
    k, v = (jnp.repeat(x, H // K, axis=2) for x in (k, v))
    scores = jnp.einsum("blhe,bmhe->bhlm", q, k) * score.scale
    if score.softcap is not None:
        scores = score.softcap * jnp.tanh(scores / score.softcap)
    distance = positions[:, :, None] - positions[:, None, :]
    mask = (segments[:, :, None] == segments[:, None, :]) & (segments[:, :, None] > 0) & (distance >= 0)
    if score.window is not None:
        mask &= distance < int(score.window)
    weights = jnp.where(mask[:, None], jnp.exp(scores), 0)
    total = weights.sum(-1) + (0 if sinks is None else jnp.exp(sinks)[:, None])
    weights = weights / jnp.where(total > 0, total, 1)[..., None]
    return jnp.einsum("bhlm,bmhv->blhv", weights, v)


def sharded(context_method: str, mesh: Mesh, score: ScoreOptions, deferred: bool = False) -> Any:
    """The same on a mesh; inputs and output in natural order."""
    rules = resolve_rules(RulesConfig(preset=["tensor"]))
    order = zigzag_order(L, mesh.shape["seq"])
    back = np.argsort(order)
    segments, positions = (jnp.asarray(x[:, order]) for x in tokens())

    def attend(q: Any, k: Any, v: Any, sinks: Any, segments: Any, positions: Any) -> jax.Array:
        with use_rules(rules, mesh, without=("data",) if deferred else ()):
            assert active_axes("seq_len") == ("seq",)
            return context.attend_sharded(q, k, v, TokenPositions(segments, positions), score, sinks, context_method)

    def whole(q: Any, k: Any, v: Any, sinks: Any) -> jax.Array:
        fields = q[:, order], k[:, order], v[:, order], segments, positions
        if not deferred:
            return attend(*fields[:3], sinks, *fields[3:])[:, back]
        q, k, v, *others = (x.reshape(mesh.shape["data"], -1, *x.shape[1:]) for x in fields)
        run = jax.vmap(attend, in_axes=(0, 0, 0, None, 0, 0), spmd_axis_name="data")
        return run(q, k, v, sinks, *others).reshape(len(SIZES), L, H, V)[:, back]

    return whole


def mesh_of(**sizes: int) -> Mesh:
    shape = [sizes.get(axis, 1) for axis in AXES]
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), AXES)


def check(context_method: str, mesh: Mesh, score: ScoreOptions, sinks: bool, deferred: bool = False) -> None:
    *qkv, weight, sinks_H = inputs(0)
    arguments = (*qkv, sinks_H if sinks else None)

    def both(attend: Any) -> Any:
        def total(*arguments: Any) -> tuple[jax.Array, jax.Array]:
            out = attend(*arguments)
            return jnp.sum(out * weight), out

        numbers = (0, 1, 2, 3) if sinks else (0, 1, 2)
        (_, out), gradients = jax.jit(jax.value_and_grad(total, numbers, has_aux=True))(*arguments)
        return (out, *gradients)

    want = both(lambda *a: dense(*a, score))
    for name, a, b in zip(
        ("out", "dq", "dk", "dv", "dsinks"), both(sharded(context_method, mesh, score, deferred)), want, strict=False
    ):
        assert np.isfinite(a).all(), name
        # With a window of 1 the gradients of q and k are exactly 0: terms of a few units cancel.
        assert np.abs(a - b).max() <= 5e-6 * max(np.abs(b).max(), 2), name


DEFAULT = ScoreOptions(None, None, E**-0.5)
WINDOW = ScoreOptions(jnp.int32(5), 4.0, 0.3)
CASES = {
    "seq=2": ({"seq": 2}, DEFAULT, False),
    "seq=8, window, sinks": ({"seq": 8}, WINDOW, True),
    "seq=4, tensor=2, window, sinks": ({"seq": 4, "tensor": 2}, WINDOW, True),
    "seq=2, tensor=4, kv heads repeated": ({"seq": 2, "tensor": 4}, DEFAULT, False),
    "seq=4, data=2, sinks": ({"seq": 4, "data": 2}, DEFAULT, True),
}
QUICK = {
    ("ring", "seq=8, window, sinks"), ("ring", "seq=2, tensor=4, kv heads repeated"),
    ("all_gather", "seq=4, tensor=2, window, sinks"), ("ulysses", "seq=4, tensor=2, window, sinks"),
}  # fmt: skip
PAIRS = [
    pytest.param(context_method, name, marks=() if (context_method, name) in QUICK else pytest.mark.prove)
    for context_method in context.CONTEXT_METHODS
    for name in CASES
]


@pytest.mark.parametrize(("context_method", "name"), PAIRS)
def test_values_and_gradients_are_those_of_one_softmax(context_method: str, name: str) -> None:
    sizes, score, sinks = CASES[name]
    check(context_method, mesh_of(**sizes), score, sinks)


@pytest.mark.parametrize("context_method", ["ring", pytest.param("all_gather", marks=pytest.mark.prove), "ulysses"])
def test_replicas_under_vmap(context_method: str) -> None:
    check(context_method, mesh_of(seq=4, data=2), DEFAULT, sinks=True, deferred=True)


def test_few_heads_make_a_ring_of_groups() -> None:
    assert context.sequence_sharding("ulysses", ("seq",), 8, 4) == context.SequenceSharding(("seq",), hops=2, group=4)
    assert context.sequence_sharding("ulysses", ("seq",), 8, 32).hops == 1
    assert context.sequence_sharding("ring", ("seq",), 8, 32).group == 1


def test_exchange_and_ring_in_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    # Eight heads would make one group of eight devices: force two groups of four.
    monkeypatch.setattr(context.math, "gcd", lambda heads, devices: 4)
    check("ulysses", mesh_of(seq=8), WINDOW, sinks=True)


@pytest.mark.prove
@pytest.mark.parametrize("window", [1, 2, 31, 32])
def test_windows_at_the_edges(window: int) -> None:
    check("ring", mesh_of(seq=2), ScoreOptions(window, None, 0.5), sinks=False)


def temporaries(context_method: str, seq: int, local: int = 1024) -> int:
    """Compiler's bytes per device of one attention, forward and backward, on `local` tokens per device."""
    mesh, rules = mesh_of(seq=seq), resolve_rules(RulesConfig())

    def total(q: Any, k: Any, v: Any, tokens: Any) -> jax.Array:
        with use_rules(rules, mesh):
            out = context.attend_sharded(q, k, v, TokenPositions(tokens, tokens), DEFAULT, None, context_method)
        return jnp.sum(jnp.square(out))

    length = local * seq
    q, k = (jax.ShapeDtypeStruct((1, length, heads, 32), jnp.float32) for heads in (8, 8))
    shardings = (NamedSharding(mesh, PartitionSpec(None, "seq")),) * 4
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    lowered = jax.jit(jax.grad(total, (0, 1, 2)), in_shardings=shardings).lower(q, k, k, tokens)
    return lowered.compile().memory_analysis().temp_size_in_bytes


def test_memory_of_a_ring_does_not_grow_with_it() -> None:
    two, eight = temporaries("ring", 2), temporaries("ring", 8)
    assert eight <= 1.05 * two
    # q, k, v, the output and their gradients are 7 MiB; the scores of a device's queries with all keys are 256 MiB.
    assert eight < 64 * 2**20
    # Gathered keys and their gradients grow.
    assert temporaries("all_gather", 8) > 1.5 * temporaries("all_gather", 2)
