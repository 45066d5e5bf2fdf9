"""Dispatch against a loop over experts; the ragged all-to-all against its definition; lost tokens are counted."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from jaxtrain.config import AXES, ConfigError, RulesConfig
from jaxtrain.mesh.constraints import use_rules
from jaxtrain.mesh.rules import resolve_rules
from jaxtrain.ops import dispatch
from jaxtrain.ops.dispatch import ExpertLinear, Experts, mixture
from jaxtrain.ops.grouped import grouped_matmul
from jaxtrain.ops.ragged import RaggedSlices, exchange
from jaxtrain.ops.reference import use_reference

D, F, X, K = 8, 12, 8, 2


def mesh_of(**sizes: int) -> Mesh:
    shape = [sizes.get(axis, 1) for axis in AXES]
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), AXES)


def swiglu(gate: jax.Array | None, up: jax.Array) -> jax.Array:
    return up if gate is None else jax.nn.silu(gate) * up


def experts_of(rng: np.random.Generator, bias: bool = True) -> Experts:
    def one(*shape: int) -> ExpertLinear:
        a = rng.normal(size=shape), rng.normal(size=(shape[0], shape[2]))
        return ExpertLinear(jnp.asarray(a[0] / 3, jnp.float32), jnp.asarray(a[1], jnp.float32) if bias else None)

    return Experts(one(X, D, F), one(X, D, F), one(X, F, D))


def case(seed: int, sequences: int, length: int, kind: str) -> tuple[Any, ...]:
    """x, chosen, weights: random experts, the same two for all, or one idle (`kind`); some tokens choose no expert."""
    rng = np.random.default_rng(seed)
    scores = rng.random((sequences, length, X))
    if kind == "one expert":
        scores[..., 5] = 2
        scores[..., 4] = 1.5
    if kind == "idle expert":
        scores[..., 3] = -1
    chosen = np.argsort(-scores, axis=-1)[..., :K]
    weights = rng.random((sequences, length, K))
    padding = rng.random((sequences, length)) < 0.2
    chosen[padding], weights[padding] = X, 0
    x = rng.normal(size=(sequences, length, D))
    return jnp.asarray(x, jnp.float32), jnp.asarray(chosen), jnp.asarray(weights, jnp.float32)


def results(x: Any, chosen: Any, weights: Any, experts: Experts, **options: Any) -> Any:
    """Output, counts, and gradients of every float."""

    def loss(x: Any, weights: Any, experts: Experts) -> Any:
        y, lost, traffic = mixture(x, chosen, weights, experts, swiglu, **options)
        return jnp.sum(jnp.sin(y)), (y, lost, traffic)

    (_, aux), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(x, weights, experts)
    return aux, gradients


def assert_close(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.max(np.abs(a - b)) <= 2e-5 * max(np.max(np.abs(b)), 1e-6)


LAYOUTS = {
    "expert=2": ({"expert": 2}, {}),
    "expert=4 x tensor=2": ({"expert": 4, "tensor": 2}, {"preset": ["tensor_sequence"]}),
    "data=2 x tensor=2 x expert=2, fsdp": ({"data": 2, "tensor": 2, "expert": 2}, {"preset": ["fsdp", "tensor"]}),
    "experts over expert=2 x tensor=2, seq=2": (
        {"expert": 2, "tensor": 2, "seq": 2}, {"preset": ["tensor"], "experts": ["expert", "tensor"]},
    ),
    "experts over tensor=2, batch whole": ({"tensor": 2}, {"experts": "tensor"}),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_loop_over_experts(name: str) -> None:
    sizes, rules = LAYOUTS[name]
    experts = experts_of(np.random.default_rng(0))
    with use_reference():
        kinds = ("random", "one expert", "idle expert")
        wants = [jax.jit(partial(results, experts=experts))(*case(1, 8, 12, kind)) for kind in kinds]

    @jax.jit
    def run(*args: Any) -> Any:
        with use_rules(resolve_rules(RulesConfig(**rules)), mesh_of(**sizes)):
            return results(*args, experts)

    for kind, want in zip(kinds, wants, strict=True):
        (y, lost, traffic), gradients = run(*case(1, 8, 12, kind))
        assert int(lost) == 0, "dropless dispatch lost tokens"
        assert np.asarray(traffic).diagonal().sum() == 0
        assert_close(y, want[0][0])
        assert_close(gradients, want[1])


@pytest.mark.parametrize(("sequences", "length", "limit"), [(3, 7, 64), (4, 5, 256)])
def test_chunks_of_any_size_give_the_same_result(
    sequences: int, length: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    args, experts = case(sequences, sequences, length, "random"), experts_of(np.random.default_rng(1), bias=False)
    with use_reference():
        want = jax.jit(partial(results, experts=experts))(*args)
    monkeypatch.setattr(dispatch, "BUFFER_BYTES", limit)
    got = jax.jit(lambda *args: results(*args, experts))(*args)
    assert_close(got[0][0], want[0][0])
    assert_close(got[1], want[1])


def test_a_bounded_buffer_counts_lost_choices() -> None:
    x, chosen, weights = case(2, 4, 8, "one expert")
    experts, mesh = experts_of(np.random.default_rng(0), bias=False), mesh_of(expert=4)

    def run(buffer: float | None, *args: Any) -> Any:
        with use_rules(resolve_rules(RulesConfig()), mesh):
            return mixture(*args, experts, swiglu, buffer=buffer)

    y, lost, traffic = jax.jit(partial(run, None))(x, chosen, weights)
    assert int(lost) == 0
    bounded, lost, _ = jax.jit(partial(run, 1.0))(x, chosen, weights)
    # Experts 4 and 5 are on device 2, whose buffer holds 8 x K tokens; all real tokens choose both.
    real = np.asarray(chosen)[..., 0] < X
    assert int(lost) == 2 * real.sum() - 8 * K
    assert int(np.asarray(traffic).sum()) == 2 * real[[0, 1, 3]].sum()
    assert np.isfinite(bounded).all() and np.abs(bounded - y).max() > 0.1


def test_a_length_that_the_axes_of_experts_do_not_divide_is_an_error() -> None:
    x, chosen, weights = case(0, 2, 7, "random")
    with (
        use_rules(resolve_rules(RulesConfig(experts="tensor")), mesh_of(tensor=2)),
        pytest.raises(ConfigError, match=r"data\.seq_len 7 is not divisible by tensor = 2"),
    ):
        mixture(x, chosen, weights, experts_of(np.random.default_rng(0)), swiglu)


@settings(max_examples=6, deadline=None)
@given(sizes=st.lists(st.integers(0, 5), min_size=3, max_size=3), spare=st.integers(0, 4))
def test_grouped_matmul_against_a_loop_over_groups(sizes: list[int], spare: int) -> None:
    rng = np.random.default_rng(sum(sizes))
    rows = sum(sizes) + spare
    x, w = rng.normal(size=(rows, 4)), rng.normal(size=(3, 4, 5))
    cotangent = rng.normal(size=(rows, 5))
    parts = np.split(np.arange(rows), np.cumsum(sizes))[:3]
    want, dx, dw = np.zeros((rows, 5)), np.zeros_like(x), np.zeros_like(w)
    for group, part in enumerate(parts):
        want[part], dx[part] = x[part] @ w[group], cotangent[part] @ w[group].T
        dw[group] = x[part].T @ cotangent[part]
    f32 = [jnp.asarray(a, jnp.float32) for a in (x, w, cotangent)]
    got, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, jnp.asarray(sizes), "cpu"), *f32[:2])
    for a, b in zip((got, *pull(f32[2])), (want, dx, dw), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batched", [False, True])
def test_emulated_exchange(batched: bool) -> None:
    n, each, rows, width = 4, 2, 24, 3
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 4, (n, n, each))
    start = np.cumsum(sizes.reshape(n, -1), axis=1).reshape(sizes.shape) - sizes
    # At the receiver: sorted by expert, then by sender.
    order = sizes.transpose(1, 2, 0).reshape(n, -1)
    target = (np.cumsum(order, axis=1) - order).reshape(n, each, n).transpose(2, 0, 1)
    x = rng.normal(size=(n, 24, width)).astype(np.float32)
    want = np.zeros((n, rows, width), np.float32)
    for src, dst, i in np.ndindex(n, n, each):
        s, a, b = sizes[src, dst, i], start[src, dst, i], target[src, dst, i]
        want[dst, b : b + s] = x[src, a : a + s]

    def flat(field: np.ndarray) -> np.ndarray:
        return field.reshape(n, -1)

    received = sizes.transpose(1, 0, 2)
    outbound = RaggedSlices(*map(flat, (start, sizes, target, received)))
    inbound = RaggedSlices(*map(flat, (target.transpose(1, 0, 2), received, start.transpose(1, 0, 2), sizes)))

    def body(x: Any, outbound: Any, inbound: Any) -> Any:
        outbound, inbound = (jax.tree.map(lambda a: a[0], s) for s in (outbound, inbound))
        return exchange(x[0], outbound, inbound, rows, ("expert",), "cpu")[None]

    spec = PartitionSpec("expert")
    run = jax.shard_map(body, mesh=mesh_of(expert=n), in_specs=(spec,) * 3, out_specs=spec, check_vma=False)
    if batched:
        run_one = run
        run = lambda x, t, b: jax.vmap(run_one, in_axes=(0, None, None))(x[None], t, b)[0]  # noqa: E731
    got, pull = jax.vjp(lambda x: jax.jit(run)(x, outbound, inbound), jnp.asarray(x))
    np.testing.assert_array_equal(got, want)
    # The gradient of a sent row is its received cotangent; rows that are not sent have gradient 0.
    gradient = pull(jnp.asarray(want))[0]
    for src in range(n):
        sent = sizes[src].sum()
        np.testing.assert_array_equal(gradient[src, :sent], x[src, :sent])
        assert not np.asarray(gradient[src, sent:]).any()
