"""A digest of each leaf of a state that is the same for every sharding.

Each leaf is read as unsigned words. Its digest is the sum modulo 2^32 of word x weight, where the weight is an odd
number that depends on the word's global position. An odd weight is invertible modulo 2^32, so changing one word always
changes the sum; weights differ between positions, so exchanging words changes it too. Integer sums are exact in any
order, so the digest does not depend on the sharding.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.mesh.layout import flatten_paths

BLOCK = 1 << 20
WORD_DTYPES = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def digest(tree: Any) -> dict[str, int]:
    """{path: digest below 2^32} of every leaf: floats, integers, booleans and random keys, on any mesh."""
    leaves = flatten_state(tree)
    meshes = {leaf.sharding.mesh for leaf in leaves.values() if isinstance(leaf.sharding, NamedSharding)}
    assert len(meshes) <= 1, f"the leaves of a state must share one mesh, these have {len(meshes)}"
    digester = _digester(meshes.pop() if meshes else None)
    host = {path: leaf for path, leaf in leaves.items() if leaf.sharding.memory_kind == "pinned_host"}
    there = {path: leaf for path, leaf in leaves.items() if path not in host}
    sums = dict(zip(there, jax.device_get(digester(list(there.values()))), strict=True)) if there else {}
    # Leaves in host memory pass through the devices one at a time.
    sums |= {path: jax.device_get(digester([leaf]))[0] for path, leaf in host.items()}
    return {path: int(sums[path]) for path in leaves}


def device_digests(tree: Any) -> dict[int, tuple[int, ...]]:
    """{device id: digest of its own shard of each leaf, in order of `flatten_state`} of this process's devices.

    Nothing is exchanged. The leaves must be sharded over one mesh.
    """
    leaves = list(flatten_state(tree).values())
    specs = tuple(leaf.sharding.spec for leaf in leaves)
    rows = _device_digester(leaves[0].sharding.mesh, specs)(*leaves)
    return {shard.device.id: tuple(np.asarray(shard.data)[0].tolist()) for shard in rows.addressable_shards}


@lru_cache
def _device_digester(mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> Any:
    """The jitted function whose result [devices, leaves] has one row on each device."""

    def row(*leaves: jax.Array) -> jax.Array:
        return jnp.stack([_weighted_sum(leaf) for leaf in leaves])[None]

    rows = PartitionSpec(mesh.axis_names)
    return jax.jit(jax.shard_map(row, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False))


def digest_array(array: np.ndarray) -> int:
    """The digest of one array in host memory, in blocks of about a million words."""
    size = min(array.dtype.itemsize, 4)
    words = np.ascontiguousarray(array).reshape(-1).view({1: np.uint8, 2: np.uint16, 4: np.uint32}[size])
    total = 0
    for begin in range(0, words.size, BLOCK):
        block = words[begin : begin + BLOCK].astype(np.uint64)
        position = np.arange(begin, begin + block.size, dtype=np.uint64) & 0xFFFFFFFF
        weight = ((position ^ (position >> 15)) * np.uint64(0x9E3779B2) + np.uint64(1)) & np.uint64(0xFFFFFFFF)
        total += int(np.sum((block * weight) & np.uint64(0xFFFFFFFF), dtype=np.uint64))
    return total % 2**32


def flatten_state(tree: Any) -> dict[str, Any]:
    """{'a/b/c': leaf} in tree order; the paths must be distinct."""
    flat = flatten_paths(tree)
    assert len(flat) == len(jax.tree.leaves(tree)), "two leaves of the state have the same path"
    return flat


@lru_cache
def _digester(mesh: Mesh | None) -> Any:
    """The jitted function for one mesh; its result [leaves] is replicated over the mesh."""
    replicated = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return jax.jit(lambda leaves: jnp.stack([_weighted_sum(leaf) for leaf in leaves]), out_shardings=replicated)


def _weighted_sum(leaf: jax.Array) -> jax.Array:
    words = _words(leaf)
    position = jnp.zeros(words.shape, jnp.uint32)
    for dim, size in enumerate(words.shape):
        position = position * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim)
    # An even multiple of the mixed position, plus one, is odd; the weights of neighbours differ in many bits.
    weight = (position ^ (position >> 15)) * jnp.uint32(0x9E3779B2) + jnp.uint32(1)
    return jnp.sum(words.astype(jnp.uint32) * weight, dtype=jnp.uint32)


def _words(leaf: jax.Array) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    leaf = jax.device_put(leaf, jax.memory.Space.Device)  # offloaded leaves are in host memory
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(leaf, WORD_DTYPES[min(leaf.dtype.itemsize, 4)])
