"""Checkpoints on real files: other meshes, damage, kill -9, donation, several processes."""

import contextlib
import functools
import json
import logging
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.checkpoint import CheckpointReader, Checkpoints, digest, files, gather_json, inspect_checkpoint
from jaxtrain.checkpoint.digest import digest_array
from jaxtrain.checkpoint.gather import merge_nested
from jaxtrain.cli import main
from jaxtrain.config import CheckpointConfig, ConfigError, StorageError

# The array reader leaves unawaited coroutines when a file is damaged.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

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


@pytest.fixture
def two(tmp_path, tmp_path_factory):
    base = tmp_path_factory.getbasetemp() / "two-steps"
    subprocess.run(["cp", "-r", two_checkpoints(base), tmp_path / "run"], check=True)
    return tmp_path / "run"


def largest_file(step):
    return max((f for f in step.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)


def flip(path, position=None):
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if position is None else position] ^= 0x10
    path.write_bytes(content)


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


def falls_back(directory, caplog, *words):
    """Checkpoint 2 is damaged: restore returns 1 and logs the reason, and a new checkpoint 2 can be saved."""
    checkpoints = store(directory)
    with caplog.at_level(logging.WARNING):
        step, state, data, meta = checkpoints.restore(abstract(state_of(0)))[:4]
    assert (step, data, meta) == (1, DATA, {**META, "step": 1})
    assert_equal_trees(state, state_of(1))
    messages = [r.getMessage() for r in caplog.records if r.name.startswith("jaxtrain")]
    assert any("checkpoint 2 of" in line and all(word in line for word in words) for line in messages), messages
    checkpoints.save(2, state_of(22), DATA, META)
    checkpoints.close()
    again = store(directory)
    step, state = again.restore(abstract(state_of(0)))[:2]
    again.close()
    assert step == 2
    assert_equal_trees(state, state_of(22))
    assert (directory / "damaged-2-0").is_dir()


def test_a_flipped_byte_in_an_array_falls_back(two, caplog):
    flip(largest_file(two / "2" / "state"))
    falls_back(two, caplog)


def test_the_digest_detects_a_flipped_byte_that_the_file_format_does_not(two, caplog):
    """A byte inside an incompressible chunk: only the digest covers it."""
    row = np.asarray(state_of(2)["words"])[1].tobytes()
    holders = [f for f in (two / "2").rglob("*") if f.is_file() and row in f.read_bytes()]
    assert holders, "the array's bytes are not stored as they are"
    for path in holders:
        flip(path, path.read_bytes().find(row) + 5)
    falls_back(two, caplog, "altered bytes in words")


@pytest.mark.parametrize("damage", ["truncated", "deleted", "empty", "no record", "altered record", "bad metadata"])
def test_missing_or_altered_files_fall_back(two, caplog, damage):
    target, record = largest_file(two / "2" / "state"), two / "2" / "record" / "metadata"
    if damage == "truncated":
        target.write_bytes(target.read_bytes()[:100])
    elif damage == "deleted":
        target.unlink()
    elif damage == "empty":
        target.write_bytes(b"")
    elif damage == "no record":
        record.unlink()
    elif damage == "altered record":
        record.write_text(record.read_text().replace('"document": 3', '"document": 4'))
    else:
        (two / "2" / "state" / "_METADATA").write_text("{")
    falls_back(two, caplog)


def test_no_readable_step_is_one_clear_error(two):
    for step in ("1", "2"):
        flip(largest_file(two / step / "state"))
    (two / "2" / "record" / "metadata").write_text("not json")
    checkpoints = store(two)
    with pytest.raises(ConfigError) as error:
        checkpoints.restore(abstract(state_of(0)))
    message = str(error.value)
    assert all(words in message for words in (str(two), "step 1:", "step 2: record", "move it away"))
    with pytest.raises(ConfigError, match=f"checkpoint 2 of {two}"):
        checkpoints.read_meta(2)
    checkpoints.close()


def test_the_state_of_another_model_is_reported_leaf_by_leaf(two):
    other = state_of(0, width=128)
    other["params"]["extra"] = other["params"].pop("b")
    checkpoints = store(two)
    with pytest.raises(ConfigError) as error:
        checkpoints.restore(abstract(other))
    checkpoints.close()
    for words in (
        "checkpoint 2",
        "params/w: checkpoint has float32[64, 64], configuration needs float32[128, 64]",
        "params/b: checkpoint has bfloat16[8], configuration needs nothing",
        "params/extra: checkpoint has nothing, configuration needs bfloat16[8]",
    ):
        assert words in str(error.value)


def test_a_directory_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        store(tmp_path / "file" / "run")


def test_a_directory_that_is_removed_is_not_made_again(tmp_path):
    checkpoints = store(tmp_path / "run", asynchronous=False)
    checkpoints.save(1, state_of(1), DATA, META)
    shutil.rmtree(tmp_path / "run")
    for _ in range(2):
        with pytest.raises(StorageError, match="run was removed or replaced while this process trained there"):
            checkpoints.save(2, state_of(2), DATA, META)
    assert not (tmp_path / "run").exists()
    checkpoints.close()


def test_a_full_disk_is_a_clear_error_and_later_saves_go_on(two):
    """A limit on file sizes simulates the full disk."""
    checkpoints, soft_hard = store(two), resource.getrlimit(resource.RLIMIT_FSIZE)
    large = state_of(3, width=40_000)
    digest(large)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, soft_hard[1]))
    try:
        with pytest.raises(StorageError, match=f"{two} cannot be written .*[Tt]oo large"):
            checkpoints.save(3, large, DATA, META)
            checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft_hard)
    assert checkpoints.latest() == 2
    checkpoints.save(3, large, DATA, META)
    checkpoints.close()
    again = store(two)
    assert again.restore(abstract(large)).step == 3
    again.close()


def test_a_checkpoint_is_inspected_leaf_by_leaf(two, capsys):
    found, state = inspect_checkpoint(two / "2"), state_of(2)
    assert (found["step"], found["meta"], found["intact"]) == (2, {**META, "step": 2}, True)
    assert list(found["arrays"]) == list(digest(state))
    want = np.linalg.norm(np.asarray(state["params"]["w"], np.float64))
    entry = found["arrays"]["params/w"]
    assert entry == {"array": "float32[64, 64]", "bytes": 4 * 64 * 64, "norm": pytest.approx(want), "intact": True}
    assert found["arrays"]["key"]["norm"] is None
    row = np.asarray(state["words"])[1].tobytes()
    for path in (f for f in (two / "2").rglob("*") if f.is_file() and row in f.read_bytes()):
        flip(path, path.read_bytes().find(row) + 5)
    assert main(["inspect", str(two / "2"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [path for path, entry in found["arrays"].items() if not entry["intact"]] == ["words"]
    assert main(["inspect", str(two / "1")]) == 0
    shown = capsys.readouterr().out
    assert "params/w" in shown and "float32[64, 64]" in shown and "every digest holds" in shown


# errors that say nothing about the content


@contextmanager
def later(seconds, undo):
    """Undo a fault after some time, while the body runs."""
    timer = threading.Timer(seconds, undo)
    timer.start()
    try:
        yield
    finally:
        timer.join()


def test_an_input_output_error_of_a_moment_is_read_again(two, caplog):
    """/proc/self/mem at offset 0 gives EIO."""
    record, away = two / "2" / "record" / "metadata", two / "away"
    record.rename(away)
    record.symlink_to("/proc/self/mem")
    with later(0.3, lambda: away.rename(record)):
        assert CheckpointReader(two).restore(abstract(state_of(0))).step == 2
    assert "Input/output error" in caplog.text and "trying again" in caplog.text


def test_arrays_that_cannot_be_opened_for_a_moment_are_read_again(two, caplog):
    """No file can be opened beyond the limit of this process."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
    reader = CheckpointReader(two)
    reader.restore(abstract(state_of(0)))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    fillers = []
    with contextlib.suppress(OSError):
        while True:
            fillers.append(os.dup(0))
    try:
        with later(0.3, lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits)):
            assert reader.restore(abstract(state_of(0))).step == 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for filler in fillers:
            os.close(filler)
    assert "Too many open files" in caplog.text and "damaged" not in caplog.text


@pytest.mark.parametrize("place", ["2", "2/record/metadata", "."])
def test_a_lost_permission_condemns_nothing(two, monkeypatch, place):
    monkeypatch.setattr(files, "READ_DELAYS", (0.01, 0.01))
    checkpoints = store(two)
    (two / place).chmod(0)
    with unprivileged(two), pytest.raises(StorageError, match=r"cannot be read .*Permission denied.* may be intact"):
        checkpoints.restore(abstract(state_of(0)))
    (two / place).chmod(0o755)
    assert checkpoints.restore(abstract(state_of(0))).step == 2
    checkpoints.save(3, state_of(3), DATA, META)
    checkpoints.close()
    assert sorted(p.name for p in two.iterdir()) == ["1", "2", "3"]


def test_a_lost_permission_to_write_is_a_storage_error(two):
    checkpoints = store(two)
    checkpoints.restore(abstract(state_of(0)))
    two.chmod(0o555)
    with unprivileged(two), pytest.raises(StorageError, match=f"{two} cannot be written .*Permission denied") as error:
        checkpoints.save(3, state_of(3), DATA, META)
    assert error.value.status == 74
    two.chmod(0o755)
    checkpoints.save(3, state_of(3), DATA, META)
    checkpoints.close()
    assert CheckpointReader(two).latest() == 3


@contextmanager
def unprivileged(directory):
    """Permissions count for root, too: as user `nobody`, who may enter the folders above `directory`."""
    if os.geteuid() != 0:
        yield
        return
    modes = {parent: parent.stat().st_mode for parent in directory.parents if parent.stat().st_uid == 0}
    for parent, mode in modes.items():
        parent.chmod(mode | 0o055)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
        for parent, mode in modes.items():
            parent.chmod(mode)


# processes


SAVES = """
import itertools, sys, time
from pathlib import Path
from test_store import *
checkpoints = store(Path(sys.argv[1]) / "checkpoints", keep=1)
for step in itertools.count(1):
    checkpoints.save(step, state_of(step), DATA, {"step": step})
    if (Path(sys.argv[1]) / "enough").exists():
        break
    time.sleep(0.02 * (step % 8))
checkpoints.close()
print(step, flush=True)
"""


def test_a_reader_while_another_process_saves_harms_nobody(tmp_path):
    """Every save removes the checkpoint before it."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    process = python(SAVES, tmp_path)
    reader, read = CheckpointReader(folder), []
    while process.poll() is None:
        restored = reader.restore(abstract(state_of(0)))
        if restored is not None:
            read.append(restored.step)
            assert restored.meta == {"step": restored.step}
            assert_equal_trees(restored.state, state_of(restored.step))
        if len(set(read)) > 4:
            (tmp_path / "enough").touch()
    assert process.wait() == 0 and read == sorted(read)
    assert [p.name for p in folder.iterdir()] == [process.stdout.read().strip()]


def python(source, *arguments, **environment):
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}", **environment}
    return subprocess.Popen(
        [sys.executable, "-c", source, *map(str, arguments)], env=env, stdout=subprocess.PIPE, text=True
    )


KILLED = """
import sys
from pathlib import Path
from test_store import *
checkpoints = store(Path(sys.argv[1]))
checkpoints.save(1, state_of(1, width=100_000), DATA, META)
checkpoints.wait()
checkpoints.save(2, state_of(2, width=100_000), DATA, META)
print("saving", flush=True)
import time; time.sleep(60)
"""


def test_killing_a_save_leaves_the_previous_checkpoint(tmp_path):
    process = python(KILLED, tmp_path)
    assert process.stdout.readline() == "saving\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    names = [p.name for p in tmp_path.iterdir()]
    assert any("tmp" in name for name in names), f"killed after the save had finished: {names}"
    checkpoints = store(tmp_path)
    assert checkpoints.latest() == 1
    step, state = checkpoints.restore(abstract(state_of(0, width=100_000)))[:2]
    checkpoints.close()
    assert step == 1
    assert_equal_trees(state, state_of(1, width=100_000))
    assert not any("tmp" in p.name for p in tmp_path.iterdir())


TWO = """
import sys
from pathlib import Path
import jax
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))
from test_store import *
me = jax.process_index()
data = gather_json({"shards": {str(me): {"document": 10 ** (3 * me)}}, "epoch": 1})
try:
    gather_json({"epoch": me})
    clash = ""
except ValueError as error:
    clash = str(error)
state = state_of(4, mesh_of(8, 1))
checkpoints = store(Path(sys.argv[1]))
checkpoints.save(4, state, data, META)
checkpoints.save(5, state, data, META)
checkpoints.wait()
if me == 0:
    flip(largest_file(Path(sys.argv[1]) / "5" / "state"))
from jaxtrain.launch.coordination import wait_for_all
wait_for_all("flipped")
step, restored, read = checkpoints.restore(abstract(state))[:3]
checkpoints.save(5, restored, data, META)
checkpoints.close()
print(json.dumps({"step": step, "data": read, "digest": digest(restored), "clash": clash}), flush=True)
"""


def test_two_processes_save_and_one_restores(tmp_path):
    with socket.socket() as s:
        s.bind(("localhost", 0))
        address = f"localhost:{s.getsockname()[1]}"
    processes = [python(TWO, tmp_path, address, i, JAX_NUM_CPU_DEVICES="4") for i in range(2)]
    outputs = [json.loads(p.communicate(timeout=120)[0].splitlines()[-1]) for p in processes]
    assert [p.returncode for p in processes] == [0, 0] and outputs[0] == outputs[1]
    assert outputs[0]["step"] == 4
    assert outputs[0]["data"] == {"shards": {"0": {"document": 1}, "1": {"document": 1000}}, "epoch": 1}
    assert outputs[0]["digest"] == digest(state_of(4))
    assert outputs[0]["clash"] == "processes disagree on epoch: 0 and 1"
    checkpoints = store(tmp_path)
    step, state, data = checkpoints.restore(abstract(state_of(0, mesh_of(2, 1))))[:3]
    checkpoints.close()
    assert step == 5 and data == outputs[0]["data"]
    assert_equal_trees(state, state_of(4))
    assert (tmp_path / "damaged-5-0").is_dir()


def test_gather_in_one_process_returns_its_input_and_merging_is_recursive():
    assert gather_json(DATA) == DATA
    assert merge_nested({"a": {"x": 1}, "c": 3}, {"a": {"y": 2}, "c": 3}) == {"a": {"x": 1, "y": 2}, "c": 3}
    with pytest.raises(ValueError, match="disagree on a/x: 1 and 2"):
        merge_nested({"a": {"x": 1}}, {"a": {"x": 2}})
