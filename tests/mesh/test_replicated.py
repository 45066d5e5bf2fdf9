"""Devices that compute the same sum no gradients with each other: the values stay, the messages go."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxtrain.config import AXES, RulesConfig
from jaxtrain.mesh.constraints import use_rules
from jaxtrain.mesh.rules import resolve_rules
from jaxtrain.mesh.shard_map import replicated_over, shard_mapped

MESH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2, 1, 1, 1), AXES)
DATA, WHOLE = PartitionSpec("data"), PartitionSpec()
X, W = (np.random.default_rng(0).normal(size=shape).astype(np.float32) for shape in ((4, 6), (6, 3)))
PLACES = np.arange(4)[:, None]


def loss(x: jax.Array, w: dict[str, jax.Array], axes: tuple[Any, ...]) -> jax.Array:
    def local(x: jax.Array, places: jax.Array, w: dict[str, jax.Array | None]) -> tuple[jax.Array, jax.Array]:
        y = jnp.tanh(x @ w["map"]) * places
        return y, jax.lax.psum(jnp.sum(places), "data")

    with use_rules(resolve_rules(RulesConfig()), MESH), replicated_over(*axes) if axes else contextlib.nullcontext():
        y, total = shard_mapped(local, (DATA, DATA, {"map": WHOLE, "bias": WHOLE}), (DATA, WHOLE))(
            x, PLACES, {**w, "bias": None}
        )
    return jnp.sum(y**2) / total


def test_gradients_stay_and_no_message_goes_along_the_axis() -> None:
    want = jax.grad(lambda x, w: jnp.sum((jnp.tanh(x @ w) * PLACES) ** 2) / PLACES.sum(), (0, 1))(X, W)
    messages = {}
    for axes in ((), ("pipe",), ("pipe", "seq")):
        both = jax.jit(jax.grad(lambda x, w, axes=axes: loss(x, w, axes), (0, 1))).lower(X, {"map": W}).compile()
        got = both(X, {"map": W})
        np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(got[1]["map"], want[1], rtol=1e-5, atol=1e-6)
        messages[axes] = re.findall(r"replica_groups=mesh\[[^]]*\] \{([^}]*)\}", both.as_text())
    assert "pipe" in " ".join(messages[()]), "a shard_map sums over what it does not cut no more: alike_along can go"
    for axes in (("pipe",), ("pipe", "seq")):
        assert "data" in " ".join(messages[axes]) and "pipe" not in " ".join(messages[axes])
