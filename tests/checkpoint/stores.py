"""Small states, and stores that hold them: shared by the tests of checkpoint/."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.checkpoint import Checkpoints
from jaxtrain.config import CheckpointConfig

ROOT = Path(__file__).resolve().parents[2]
DATA = {"shards": {"0": {"document": 3}, "1": {"document": 5}}, "epoch": 1}
KINDS = ("device", "pinned_host")
META = {"tokens": 12345678901234, "config": {"a": [1, None, "x"]}}


def mesh_of(*sizes):
    count = int(np.prod(sizes))
    return jax.make_mesh(sizes, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:count])


def shard(tree, mesh, spec):
    """Each leaf sharded by `spec` where its shape allows, else replicated."""

    def one(leaf):
        usable = spec if leaf.ndim >= len(spec) and all(n % 8 == 0 for n in leaf.shape[: len(spec)]) else P()
        return NamedSharding(mesh, usable)

    return jax.jit(lambda t: t, out_shardings=jax.tree.map(one, tree))(tree)


def state_of(seed, mesh=None, spec=("data",), width=64):
    """A tree with every kind of leaf of a train state; float32 noise does not compress."""
    rng = np.random.default_rng(seed)
    tree = {
        "params": {
            "w": jnp.asarray(rng.normal(size=(width, 64)), jnp.float32),
            "b": jnp.full((8,), seed, jnp.bfloat16),
        },
        "opt": [{"half": jnp.asarray(rng.normal(size=(16,)), jnp.float16)}, {"count": jnp.int32(seed)}],
        "words": jnp.asarray(rng.integers(0, 2**32, size=(64, 64)), jnp.uint32),
        "key": jax.random.key(seed),
        "flags": jnp.array([True, False]),
    }
    return shard(tree, mesh or mesh_of(8, 1), P(*spec))


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def raw(tree):
    """Leaves as numpy; keys as their words."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return [np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf) for leaf in jax.tree.leaves(tree)]


def assert_equal_trees(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(raw(left), raw(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def store(directory, keep=3, asynchronous=True):
    return Checkpoints(directory, CheckpointConfig(keep=keep, asynchronous=asynchronous))


@functools.cache
def two_checkpoints(root):
    """A directory with checkpoints 1 and 2, copied by each test."""
    checkpoints = store(root)
    for step in (1, 2):
        checkpoints.save(step, state_of(step), DATA, {**META, "step": step})
    checkpoints.close()
    return root


def largest_file(step):
    return max((f for f in step.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)


def flip(path, position=None):
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if position is None else position] ^= 0x10
    path.write_bytes(content)
