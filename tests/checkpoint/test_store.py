"""Checkpoints on real files: other meshes, donation, retention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from stores import DATA, KINDS, META, abstract, assert_equal_trees, flip, mesh_of, raw, state_of, store

from jaxtrain.checkpoint import CheckpointReader, Checkpoints, digest
from jaxtrain.checkpoint.digest import digest_array
from jaxtrain.config import CheckpointConfig, ConfigError

# The array reader leaves unawaited coroutines when a file is damaged.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

# digest


def test_digest_does_not_depend_on_the_sharding():
    want = digest(state_of(5, mesh_of(1, 1), P()))
    assert want.keys() >= {"params/w", "opt/0/half", "opt/1/count", "key", "words", "flags"}
    for sizes, spec in [
        ((8, 1), P("data")),
        ((4, 2), P("data", "tensor")),
        ((2, 4), P(("tensor", "data"))),
        ((4, 2), P(None, "tensor")),
        ((8, 1), P()),
    ]:
        assert digest(state_of(5, mesh_of(*sizes), spec)) == want


@settings(deadline=None, max_examples=25)
@given(
    shape=st.lists(st.integers(1, 5), max_size=3).map(tuple),
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "int32", "uint32", "int8", "float8_e4m3fn"]),
    where=st.integers(0, 2**31),
    bit=st.integers(0, 7),
    seed=st.integers(0, 100),
)
def test_digest_sees_any_flipped_bit(shape, dtype, where, bit, seed):
    words = np.random.default_rng(seed).integers(0, 256, size=(*shape, jnp.dtype(dtype).itemsize), dtype=np.uint8)
    altered = words.copy()
    altered.reshape(-1)[where % words.size] ^= 1 << bit
    one, other = ({"a": jnp.asarray(w.view(dtype).reshape(shape))} for w in (words, altered))
    assert digest(one) != digest(other)


def test_the_digest_in_host_memory_is_that_on_devices():
    state = {"a": jnp.arange(3_000_000, dtype=jnp.int32).reshape(3, -1), "b": jnp.full((7, 5), 1.5, jnp.bfloat16)}
    state |= {"c": jnp.array([True, False]), "d": jnp.float32(3), "e": jnp.arange(9, dtype=jnp.int8)}
    assert {path: digest_array(np.asarray(leaf)) for path, leaf in state.items()} == digest(state)


def test_digest_sees_exchanged_elements_and_the_sign_of_zero():
    a = jnp.arange(4096.0)
    assert digest({"a": a}) != digest({"a": a.at[jnp.array([7, 4000])].set(a[jnp.array([4000, 7])])})
    assert digest({"a": jnp.zeros(3)}) != digest({"a": -jnp.zeros(3)})


def test_leaves_in_host_memory_have_the_same_digest_and_are_restored_to_it(tmp_path):
    w = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    on_device, on_host = (
        {"w": jax.device_put(w, NamedSharding(mesh_of(8, 1), P("data"), memory_kind=kind))} for kind in KINDS
    )
    assert digest(on_device) == digest(on_host)
    checkpoints = store(tmp_path)
    checkpoints.save(1, on_host, {}, {})
    restored = checkpoints.restore(abstract(on_host)).state
    checkpoints.close()
    assert restored["w"].sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(restored["w"], w)


# save and restore


@pytest.mark.parametrize("asynchronous", [True, False])
def test_round_trip_on_another_mesh(tmp_path, asynchronous):
    state = state_of(7, mesh_of(4, 2), P("data", "tensor"))
    with_mesh = [((2, 4), P("tensor", "data")), ((1, 1), P()), ((8, 1), P(None, "data"))]
    first = store(tmp_path, asynchronous=asynchronous)
    assert first.latest() is None and first.restore(abstract(state)) is None
    first.save(7, state, DATA, META)
    first.close()
    for sizes, spec in with_mesh:
        target = abstract(state_of(0, mesh_of(*sizes), spec))
        again = store(tmp_path)
        step, restored, data, meta = again.restore(target)[:4]
        assert (step, data, meta) == (7, DATA, META)
        assert_equal_trees(restored, state)
        assert jax.tree.map(lambda x: x.sharding, restored) == jax.tree.map(lambda x: x.sharding, target)
        again.close()


def test_a_part_of_the_leaves_is_restored_alone(two):
    """No file of the other leaves is read: those may be damaged."""
    wanted = {"params": abstract(state_of(0))["params"]}
    row = np.asarray(state_of(2)["words"])[1].tobytes()
    for path in (f for f in (two / "2").rglob("*") if f.is_file() and row in f.read_bytes()):
        flip(path, path.read_bytes().find(row) + 5)
    restored = CheckpointReader(two).restore(wanted, subset=True)
    assert (restored.step, restored.data, restored.bytes) == (2, DATA, 64 * 64 * 4 + 8 * 2)
    assert_equal_trees(restored.state, {"params": state_of(2)["params"]})
    with pytest.raises(ConfigError, match=r"words: checkpoint has uint32.64, 64., configuration needs nothing"):
        CheckpointReader(two).restore(wanted)


def test_restored_leaves_may_be_donated(two):
    checkpoints = store(two)
    state = state_of(2)
    bump = jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)
    for _ in range(3):
        restored = checkpoints.restore(abstract(state)).state
        bumped = bump({"w": restored["params"]["w"]})
        np.testing.assert_array_equal(bumped["w"], np.asarray(state["params"]["w"]) + 1)
    checkpoints.close()


def test_state_may_be_donated_right_after_save(tmp_path):
    checkpoints = store(tmp_path)
    state = state_of(3, width=40_000)
    spoil = jax.jit(lambda t: jax.tree.map(lambda x: x * 0, t), donate_argnums=0)
    checkpoints.save(3, state, DATA, META)
    spoiled = spoil({"params": state["params"], "words": state["words"]})
    jax.block_until_ready(spoiled)
    restored = checkpoints.restore(abstract(state_of(0, width=40_000))).state
    checkpoints.close()
    assert_equal_trees(restored, state_of(3, width=40_000))


def test_saving_a_restored_step_again_keeps_it(two):
    checkpoints = store(two)
    assert checkpoints.latest() == 2
    checkpoints.restore(abstract(state_of(0)))
    checkpoints.save(2, state_of(9), {}, {})
    step, state, _, meta = checkpoints.restore(abstract(state_of(0)))[:4]
    assert (step, meta["step"]) == (2, 2)
    assert_equal_trees(state, state_of(2))
    checkpoints.close()


def test_a_step_of_another_history_is_replaced_or_discarded(two, caplog):
    checkpoints = store(two)
    checkpoints.save(1, state_of(11), DATA, {})
    checkpoints.wait()
    assert "checkpoint 1 of" in caplog.text and "replaced" in caplog.text
    checkpoints.discard_after(1)
    assert checkpoints.latest() == 1
    assert_equal_trees(checkpoints.restore(abstract(state_of(0))).state, state_of(11))
    checkpoints.close()


def test_each_save_reports_its_times_and_bytes(tmp_path):
    reports = []
    config = CheckpointConfig(keep=1, keep_every=2, keep_best=1)
    checkpoints = Checkpoints(tmp_path, config, lambda **values: reports.append(values))
    for step in (1, 2, 3, 4, 5):
        checkpoints.save(step, state_of(step), DATA, {"eval_loss": 2.0 if step == 3 else 3.0, "good": step != 5})
    checkpoints.close()
    assert [report["step"] for report in reports] == [1, 2, 3, 4, 5]
    arrays = sum(leaf.nbytes for leaf in raw(state_of(0)))
    assert all(report["bytes"] == arrays for report in reports)
    assert all(0 < report["blocked_s"] < 5 and 0 < report["write_s"] < 5 for report in reports)
    # 2 and 4 for ever, 3 is the best, 4 the newest good one, 5 the newest.
    assert CheckpointReader(tmp_path).steps() == [2, 3, 4, 5]


def test_only_the_newest_checkpoints_remain_and_incomplete_ones_are_deleted(tmp_path):
    for name in ("9.orbax-checkpoint-tmp-1", "8.tmp", "7.removed"):
        (tmp_path / name / "state").mkdir(parents=True)
    checkpoints = store(tmp_path, keep=2)
    for step in (10, 20, 30):
        checkpoints.save(step, state_of(step), DATA, {"step": step})
    assert checkpoints.read_meta(20) == {"step": 20}
    checkpoints.close()
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["20", "30"]


# damage
