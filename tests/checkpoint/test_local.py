"""Local checkpoints: what is on which disk, what a loss leaves, files that are altered, and who gets them."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.checkpoint.local import LocalTier, run_identity
from jaxtrain.checkpoint.peers import PeerError, Peers
from jaxtrain.checkpoint.units import Held, Unit, choose, layout_hash, plan_units, tier_bytes
from jaxtrain.config import ConfigError, LocalTierConfig, StorageError

SPECS = {
    "ddp": [(), ()],
    "fsdp": [("data",), ("data", None)],
    "hsdp": [("inner",), (None, "inner")],
    "tensor": [("inner",), ()],
    "mixed": [("data",), ("inner",), (None, ("data", "inner")), ()],
}
PER_NODE = (1, 2, 4)
RUN = "0123456789abcdef" * 2


@cache
def leaves_of(kind: str) -> dict[str, jax.ShapeDtypeStruct]:
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "inner"))
    return {
        f"leaf{i}": jax.ShapeDtypeStruct((16, 8), np.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
        for i, spec in enumerate(SPECS[kind])
    }


@cache
def plan(kind: str, per_node: int, peers: int) -> tuple[list[Unit], tuple[int, ...]]:
    """The units of 8 processes of one device, so many of them on a node."""
    nodes = tuple(rank // per_node * per_node for rank in range(8))
    first = min(device.id for device in jax.devices())
    return plan_units(leaves_of(kind), lambda device: device.id - first, nodes, peers), nodes


@given(kind=st.sampled_from(sorted(SPECS)), per_node=st.sampled_from(PER_NODE), peers=st.integers(0, 3))
def test_every_shard_is_on_enough_disks_and_every_process_finds_its_own(kind: str, per_node: int, peers: int) -> None:
    units, nodes = plan(kind, per_node, peers)
    disks: dict[int, set[Any]] = {node: set() for node in nodes}
    for unit in units:
        for node, rank in unit.keepers.items():
            assert nodes[rank] == node
            disks[node] |= {(shard.path, shard.where) for shard in unit.shards}
        assert all(rank in unit.holders for rank in unit.writers.values())
    first = min(device.id for device in jax.devices())
    for path, leaf in leaves_of(kind).items():
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
            where = tuple(part.indices(size)[:2] for part, size in zip(index, leaf.shape, strict=True))
            assert (path, where) in disks[nodes[device.id - first]], "its own node has it"
            copies = sum((path, where) in disk for disk in disks.values())
            assert copies >= min(1 + peers, len(disks))


@given(
    kind=st.sampled_from(sorted(SPECS)),
    per_node=st.sampled_from(PER_NODE),
    peers=st.integers(0, 2),
    lost=st.sets(st.integers(0, 7)),
    unfinished=st.none() | st.integers(0, 7),
    durable=st.sampled_from([-1, 20, 30, 40]),
)
def test_lost_disks_within_the_redundancy_restore_and_beyond_it_fall_back(
    kind: str, per_node: int, peers: int, lost: set[int], unfinished: int | None, durable: int
) -> None:
    units, nodes = plan(kind, per_node, peers)
    gone = {nodes[rank] for rank in lost}
    # Save 30 is on all disks; in 40, one node was killed before its files were there. Then disks are lost.
    late = None if unfinished is None else nodes[unfinished]
    held: list[list[Held]] = [[] for _ in nodes]
    for step, token, without in ((30, "a", None), (40, "b", late)):
        for unit in units:
            for node in unit.keepers.keys() - gone - {without}:
                held[node + unit.number % per_node].append((step, token, unit.number))
    whole = {
        step: all(unit.keepers.keys() - gone - {without} for unit in units)
        for step, without in ((30, None), (40, late))
    }
    want = next((step for step in (40, 30) if whole[step] and step > durable), None)
    found = choose(held, len(units), durable)
    assert (found.step if found else None) == want
    if len(gone) <= min(peers, len({*nodes}) - 1):
        assert whole[30], "within the redundancy the older save is always whole"
        assert late is not None or whole[40]
    if found is not None:
        # Every file comes from a node that is left and that holds it, of one and the same save.
        for unit in units:
            assert {nodes[rank] for rank in found.sources[unit.number]} <= unit.keepers.keys() - gone


def test_replicas_in_other_nodes_are_the_copies_and_the_layout_is_told_apart() -> None:
    size = 16 * 8 * 4
    ddp, fsdp = (tier_bytes(plan(kind, 2, 1)[0]) for kind in ("ddp", "fsdp"))
    assert (ddp.own, ddp.copies, ddp.sent, ddp.total) == (2 * size, 0, 0, 4 * 2 * size)
    # Each node of two processes has a quarter of both leaves, and that of another node.
    assert (fsdp.own, fsdp.copies, fsdp.sent) == (size // 2, size // 2, 2 * size)
    # The two processes of a node write its replicas together, one leaf each.
    assert {rank for unit in plan("ddp", 2, 1)[0] for rank in unit.writers.values()} == set(range(8))
    hashes = {layout_hash(plan(kind, per_node, 1)[0]) for kind in SPECS for per_node in PER_NODE}
    assert len(hashes) == len(SPECS) * len(PER_NODE)


def state_of(value: float) -> dict[str, Any]:
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "inner"))

    def leaf(array: np.ndarray, *spec: Any) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*spec)))

    return {
        "params": {"w": leaf(np.full((16, 8), value, np.float32), "data"), "b": leaf(np.arange(8.0) * value, "inner")},
        "half": leaf(np.full((4, 8), value).astype(jax.numpy.bfloat16), None, ("data", "inner")),
        "steps": leaf(np.int32(value)),
    }


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[LocalTier]:
    with closing(tier_at(tmp_path, RUN)) as found:
        yield found


def tier_at(folder: Path, run: str, **settings: Any) -> LocalTier:
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_of(0))
    return LocalTier(LocalTierConfig(directory=str(folder), every=10, **settings), run, abstract)


def restored(tier: LocalTier, newer_than: int = -1) -> int | None:
    """The step that is restored, which is the value of all leaves."""
    found = tier.restore(newer_than)
    if found is None:
        return None
    for got, want in zip(jax.tree.leaves(found.state), jax.tree.leaves(state_of(found.step)), strict=True):
        assert got.sharding == want.sharding and got.dtype == want.dtype
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    assert found.data == {"at": found.step} and found.meta == {"good": True}
    return found.step


def files_of(folder: Path, step: int) -> list[Path]:
    return sorted(folder.glob(f"{RUN}/{step}-*/*.shards"))


def test_a_save_is_restored_bit_for_bit_and_altered_files_fall_back(
    tier: LocalTier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert restored(tier) is None
    assert [step for step in range(1, 31) if tier.due(step)] == [10, 20, 30]
    for step in (10, 20, 30):
        tier.save(step, state_of(step), {"at": step}, {"good": True})
    assert restored(tier) == 30 and tier.newest == 30
    assert not files_of(tmp_path, 10), "keep is 2"
    assert restored(tier, newer_than=30) is None, "the durable checkpoint is as new"

    # One bit of a shard, and a cut file: the save before is restored.
    path = files_of(tmp_path, 30)[0]
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)
    assert restored(tier) == 20
    assert "altered bytes" in caplog.text
    # A header that is altered.
    path = files_of(tmp_path, 20)[0]
    path.write_bytes(path.read_bytes().replace(b'"step": 20', b'"step": 21', 1))
    assert restored(tier) is None
    assert "is left out: header: altered bytes" in caplog.text

    tier.save(40, state_of(40), {"at": 40}, {"good": True})
    tier.save(50, state_of(50), {"at": 50}, {"good": True})
    tier.discard_after(45)
    assert restored(tier) == 40 and tier.newest == 40
    assert tier.notes()[0].startswith("local checkpoints: every 10 steps in ")
    assert not list(tmp_path.rglob("*.tmp")) and not list(tmp_path.glob(".node-*"))


def test_files_of_another_run_or_layout_are_ignored_and_a_failed_save_does_not_end_the_run(
    tier: LocalTier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier.save(10, state_of(10), {"at": 10}, {"good": True})
    tier.wait()
    with closing(tier_at(tmp_path, "a" * 32)) as other:
        assert restored(other) is None
        assert "1 folders of other runs are ignored" in other.notes()[1]
    for path in files_of(tmp_path, 10):
        line, text = path.read_bytes().split(b"\n", 2)[:2]
        assert json.loads(text)["run"] == RUN and len(line) == 64
    with closing(tier_at(tmp_path, RUN)) as again:
        again._layout = "that of another mesh"
        assert restored(again) is None
        assert "local checkpoints of another mesh" in caplog.text
        (tmp_path / RUN).rename(tmp_path / "away")
        (tmp_path / RUN).write_text("in the way")
        again.save(20, state_of(20), {"at": 20}, {"good": True})
        again.wait()
        assert "local checkpoint of step 20 failed, the run goes on" in caplog.text and again.newest is None


def test_a_directory_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"names a variable that is not set"):
        tier_at(tmp_path / "$NO_SUCH_VARIABLE", RUN)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"checkpoint.local.directory .*file/ckpt cannot be written"):
        tier_at(tmp_path / "file" / "ckpt", RUN)
    first = run_identity(tmp_path)
    assert first == run_identity(tmp_path) and (tmp_path / "local_id").exists()
    (tmp_path / "local_id").unlink()
    assert run_identity(tmp_path) != first, "a directory that was made again is another run"


def test_files_are_served_to_processes_of_the_job_alone(tmp_path: Path) -> None:
    (tmp_path / "run" / "10-abc").mkdir(parents=True)
    content = np.random.default_rng(0).bytes(3 << 20)
    (tmp_path / "run" / "10-abc" / "3.shards").write_bytes(content)
    (tmp_path / "secret.shards").write_text("not for you")
    with closing(Peers(tmp_path / "run", (0,), "127.0.0.1")) as peers:
        got = io.BytesIO()
        peers.fetch(0, "10-abc/3.shards", got)
        assert got.getvalue() == content
        for name, why in (("10-abc/4.shards", "cannot be read"), ("../secret.shards", "no file of a local")):
            with pytest.raises(PeerError, match=why):
                peers.fetch(0, name, io.BytesIO())
        secret, peers._secret = peers._secret, b"a guess"
        stranger = Peers.__new__(Peers)
        stranger._addresses, stranger._secret = peers._addresses, b"another guess"
        with pytest.raises(PeerError, match="not a process of this job"):
            stranger.fetch(0, "10-abc/3.shards", io.BytesIO())
        peers._secret = secret
    with pytest.raises(PeerError, match="did not deliver"):
        peers.fetch(0, "10-abc/3.shards", io.BytesIO())
