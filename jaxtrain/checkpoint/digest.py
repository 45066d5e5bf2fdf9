"""A fingerprint of a state that does not depend on how it is sharded.

Each leaf is read as unsigned words; the digest is the wrap-around sum of word x odd weight of its global position.
An odd weight is invertible modulo 2^32, so one altered word always alters the sum, and position-dependent weights
notice exchanged words. Integer sums are exact in any order: every sharding gives the same digest.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def digest(tree: Any) -> dict[str, int]:
    """Path -> digest below 2^32 of each leaf; floats, integers, booleans and random keys, on any mesh."""
    leaves = flatten(tree)
    meshes = {leaf.sharding.mesh for leaf in leaves.values() if isinstance(leaf.sharding, NamedSharding)}
    assert len(meshes) <= 1, f"a state lives on one mesh, not on {len(meshes)}"
    sums = jax.device_get(_digester(meshes.pop() if meshes else None)(list(leaves.values())))
    return {path: int(value) for path, value in zip(leaves, sums, strict=True)}


def flatten(tree: Any) -> dict[str, Any]:
    """'a/b/c' -> leaf, in tree order."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    flat = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    assert len(flat) == len(leaves), "two leaves of the state have the same path"
    return flat


@lru_cache
def _digester(mesh: Mesh | None) -> Any:
    """One jitted function a mesh; its result, one number a leaf, is on every device."""
    everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return jax.jit(lambda leaves: jnp.stack([_sum(leaf) for leaf in leaves]), out_shardings=everywhere)


def _sum(leaf: jax.Array) -> jax.Array:
    words = _words(leaf)
    position = jnp.zeros(words.shape, jnp.uint32)
    for dim, length in enumerate(words.shape):
        position = position * jnp.uint32(length) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim)
    # an even multiple of a mixed position plus one is odd, and neighbours' weights are far apart
    weight = (position ^ (position >> 15)) * jnp.uint32(0x9E3779B2) + jnp.uint32(1)
    return jnp.sum(words.astype(jnp.uint32) * weight, dtype=jnp.uint32)


def _words(leaf: jax.Array) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    leaf = jax.device_put(leaf, jax.memory.Space.Device)  # offloaded leaves rest in host memory
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(leaf, WORDS[min(leaf.dtype.itemsize, 4)])
