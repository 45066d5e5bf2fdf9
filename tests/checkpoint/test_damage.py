"""Damaged checkpoints, and storage that fails: what falls back, what is condemned, what is said."""

import contextlib
import json
import logging
import os
import resource
import shutil
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from stores import (
    DATA,
    META,
    abstract,
    assert_equal_trees,
    flip,
    largest_file,
    state_of,
    store,
)

from jaxtrain.checkpoint import CheckpointReader, digest, files, inspect_checkpoint
from jaxtrain.cli import main
from jaxtrain.config import ConfigError, StorageError

# The array reader leaves unawaited coroutines when a file is damaged.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


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
