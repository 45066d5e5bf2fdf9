"""The lease of a run directory: one holder, stale ones taken over, clocks of hosts not compared."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jaxtrain.config import ConfigError, RunError, StorageError
from jaxtrain.train.lease import LEASE, SIZE, take

HOLDER = """
import sys, time
from pathlib import Path
from jaxtrain.train.lease import take
lease = take(Path(sys.argv[1]), every=0.1)
print("held", flush=True)
for line in sys.stdin:
    try:
        lease.check()
        print("still held", flush=True)
    except Exception as error:
        print(type(error).__name__, error, flush=True)
lease.close()
"""


@contextmanager
def holder(run: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()


def claim_of(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / LEASE).read_text()))


def write_claim(run: Path, **changes: Any) -> None:
    with (run / LEASE).open("r+b") as file:
        file.write(json.dumps({**claim_of(run), **changes}).encode().ljust(SIZE - 1) + b"\n")


def test_a_living_holder_is_named_a_dead_one_replaced_at_once(tmp_path: Path) -> None:
    run, lines = tmp_path / "runs" / "new", list[str]()
    with holder(run) as process:
        with pytest.raises(ConfigError, match=rf"is being trained by pid {process.pid} of user .* on .* \(since "):
            take(run, lines.append)
        process.send_signal(signal.SIGKILL)
        process.wait()
        lease = take(run, lines.append)
    assert len(lines) == 1 and f"left by pid {process.pid} " in lines[0] and "does not run any more" in lines[0]
    assert claim_of(run)["pid"] == os.getpid()
    lease.close()
    assert not list(run.iterdir())


def test_a_suspended_holder_loses_the_lease_and_hears_of_it(tmp_path: Path) -> None:
    lines = list[str]()
    with holder(tmp_path) as process:
        assert process.stdin is not None and process.stdout is not None
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.0)
        lease = take(tmp_path, lines.append, stale=0.7)
        assert "gave no heartbeat for 1 s" in lines[0]
        process.send_signal(signal.SIGCONT)
        time.sleep(0.5)
        assert claim_of(tmp_path)["pid"] == os.getpid(), "a late heartbeat of the old holder changed the new lease"
        print("?", file=process.stdin, flush=True)
        answer = process.stdout.readline()
        assert answer.startswith("RunError") and f"now pid {os.getpid()} of user" in answer
        process.stdin.close()
        process.wait()
    lease.check()
    lease.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("clock", [0.0, 4e9])
def test_a_holder_on_another_host_is_judged_by_its_heartbeats(tmp_path: Path, clock: float) -> None:
    take_away = take(tmp_path)
    lines, stop = list[str](), threading.Event()
    write_claim(tmp_path, host="node7", boot="another", since=clock, clock=clock, boottime=clock)

    def beat() -> None:
        beats = 1
        while not stop.wait(0.2):
            write_claim(tmp_path, beat=(beats := beats + 1))

    thread = threading.Thread(target=beat)
    thread.start()
    begin = time.monotonic()
    with pytest.raises(ConfigError, match=r"being trained by .* on node7"):
        take(tmp_path, lines.append, stale=30)
    assert time.monotonic() - begin < 5
    stop.set()
    thread.join()
    lease = take(tmp_path, lines.append, stale=0.6)
    assert "watching" in lines[0] and "gave no heartbeat for 1 s: taken over" in lines[-1]
    lease.check()
    with pytest.raises(RunError, match="no longer held"):
        take_away.check()
    take_away.close()
    lease.check()
    lease.close()


def test_of_many_that_take_a_stale_lease_one_holds_it(tmp_path: Path) -> None:
    leases = [take(tmp_path)]
    for _ in range(5):
        write_claim(tmp_path, pid=2**22 + 1)  # beyond any pid

        def attempt(_: int) -> Any:
            try:
                return take(tmp_path, lambda line: None)
            except ConfigError as error:
                return str(error)

        with ThreadPoolExecutor(12) as pool:
            found = list(pool.map(attempt, range(12)))
        held = [each for each in found if not isinstance(each, str)]
        assert len(held) == 1, found
        held[0].check()
        leases += held
        assert [path.name for path in tmp_path.iterdir()] == [LEASE]
    for lease in leases:
        lease.close()
    assert not list(tmp_path.iterdir())


def test_an_unreadable_lease_is_taken_over_and_an_unwritable_folder_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / LEASE).write_bytes(b"\0" * 100)
    lines = list[str]()
    take(tmp_path, lines.append, stale=0.3).close()
    assert "an unknown process" in lines[-1]
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        take(tmp_path / "file" / "run")
