"""Verdicts and small values of the processes of a job, exchanged through jax's coordination service.

Never by device collectives: those would race with a step that is still in flight, and on CPU each group has a deadline
of 30 s. The service is a key-value store with barriers in process 0; its Python client has no public name in jax.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from jaxtrain.config import RunError

CHUNK = 1 << 20
"""Characters of a value under one key."""
NOTICE_S = 60.0
"""Seconds after which a wait prints, again and again, for whom it waits."""
SLICE_S = 1.0
"""Seconds of one request: a signal's handler runs between two of them, and a failure of another process is seen."""
INSTANT_S = 0.001
"""Seconds of a request that asks whether a key is there now."""
FAILURES = "jaxtrain/failed"
"""Folder of the keys under which processes announce that they failed."""
VERDICT_S = 30.0
"""Seconds beyond the limit of a wait that others give process 0 to say who was absent."""


class AbsentError(RunError):
    """Processes did not come to an exchange within its limit, or failed before; the message names them."""

    status = 13

    def __init__(self, message: str, status: int = 13) -> None:
        super().__init__(message)
        self.status = status  # type: ignore[misc]


def exchange(name: str, value: Any, timeout: float = 300.0) -> list[Any]:
    """The values (JSON) of all processes, in order of rank; all call it with the same names in the same order.

    Raises AbsentError naming the processes (rank and host) that gave nothing within `timeout` seconds or failed.
    """
    return list(combine(name, value, list, timeout))


def wait_for_all(name: str, timeout: float = 300.0) -> None:
    """Wait until every process is here; raises AbsentError like `exchange`."""
    combine(name, None, len, timeout)


def combine(name: str, value: Any, function: Callable[[list[Any]], Any], timeout: float = 300.0) -> Any:
    """`function` of the values (JSON) of all processes in order of rank, computed by process 0 and given to all.

    N processes make O(N) requests. Raises AbsentError like `exchange`, and on all processes the ValueError of
    `function`.
    """
    rank, processes = rank_and_count()
    if processes == 1:
        return function([json.loads(json.dumps(value))])
    turn = next(_counts[name])
    here, before = f"jaxtrain/{name}/{turn}", f"jaxtrain/{name}/{turn - 1}"
    put(f"{here}/{rank}", json.dumps(value))
    if rank:
        result = _wait_for_result(name, here, timeout)
    else:
        result = _collect(name, here, timeout)
        if "values" in result:
            result = _apply(function, result["values"])
        put(f"{here}/all", json.dumps(result))
        if turn:
            # Whoever entered this exchange has left the one before.
            client().key_value_delete(before)
    if "error" in result:
        raise ValueError(result["error"])
    if "absent" in result:
        raise AbsentError(f"{name}: {result['absent']}", result["status"])
    return result["result"]


def _apply(function: Callable[[list[Any]], Any], values: list[Any]) -> dict[str, Any]:
    try:
        return {"result": function(values)}
    except ValueError as error:
        return {"error": str(error)}


def _collect(name: str, here: str, timeout: float) -> dict[str, Any]:
    """In process 0: {"values"} of all, or {"absent": who and why, "status"}."""
    begin, processes = time.monotonic(), rank_and_count()[1]
    texts: list[str] = []
    notice = NOTICE_S
    while len(texts) < processes:
        text = get(f"{here}/{len(texts)}", SLICE_S)
        waited = time.monotonic() - begin
        if text is not None:
            texts.append(text)
        elif failed := client().key_value_dir_get(FAILURES):
            return dict(json.loads(failed[0][1].partition(" ")[2]))
        elif waited >= min(timeout, notice):
            rest = range(len(texts), processes)
            absent = ", ".join(process_name(i) for i in rest if not present(f"{here}/{i}"))
            if waited >= timeout:
                return {"absent": f"no answer within {timeout:.0f} s from {absent}", "status": AbsentError.status}
            notice = waited + NOTICE_S
            _print_wait(name, absent, waited, timeout)
    return {"values": [json.loads(text) for text in texts]}


def _wait_for_result(name: str, here: str, timeout: float) -> dict[str, Any]:
    """In the other processes: what process 0 published."""
    begin = time.monotonic()
    notice = NOTICE_S
    while (waited := time.monotonic() - begin) < timeout + VERDICT_S:
        if (text := get(f"{here}/all", SLICE_S)) is not None:
            return dict(json.loads(text))
        if (failure := get(f"{FAILURES}/0", INSTANT_S)) is not None:
            return dict(json.loads(failure))
        if waited >= notice:
            notice = waited + NOTICE_S
            # One process tells it, and only of process 0, which tells of all others.
            if rank_and_count()[0] == 1 and not present(f"{here}/0"):
                _print_wait(name, process_name(0), waited, timeout)
    absent = f"no answer within {timeout + VERDICT_S:.0f} s from {process_name(0)}"
    return {"absent": absent, "status": AbsentError.status}


def _print_wait(name: str, absent: str, waited: float, timeout: float) -> None:
    print(
        f"jaxtrain: {name}: {waited:.0f} s of at most {timeout:.0f} s waited for {absent}", file=sys.stderr, flush=True
    )


def put(key: str, text: str) -> None:
    """Publish a text under a fresh key."""
    parts = [text[i : i + CHUNK] for i in range(0, len(text), CHUNK)] or [""]
    for number, part in enumerate(parts[1:], 1):
        client().key_value_set(f"{key}/part{number}", part)
    client().key_value_set(f"{key}/part0", f"{len(parts)} {parts[0]}")


def get(key: str, timeout: float) -> str | None:
    """The text that `put` published under a key, None if it is not there within `timeout` seconds."""
    try:
        first = client().blocking_key_value_get(f"{key}/part0", max(int(timeout * 1000), 1))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return None
        raise AbsentError(
            f"the coordination service of process 0 does not answer ({str(error).splitlines()[0]}): "
            "process 0 ended, or its host cannot be reached"
        ) from None
    number, _, text = first.partition(" ")
    rest = [client().blocking_key_value_get(f"{key}/part{i}", 60_000) for i in range(1, int(number))]
    return "".join([text, *rest])


def present(key: str) -> bool:
    """Whether something was published under a key."""
    return get(key, INSTANT_S) is not None


def announce_failure(text: str, status: int) -> None:
    """Tell processes that wait for this one that it ends, why and with which status; process 0 gives them time."""
    rank, processes = rank_and_count()
    if processes == 1:
        return
    why = f"{process_name(rank)} ended with status {status}: {text[: CHUNK // 2]}"
    with suppress(Exception):  # the service may be gone
        put(f"{FAILURES}/{rank}", json.dumps({"absent": why, "status": status}))
        if rank == 0:
            time.sleep(2 * SLICE_S)


def meet() -> None:
    """Tell the others this process's host and pid, for messages, and hear on which hosts they are; after joining."""
    rank, processes = rank_and_count()
    if processes > 1:
        put(f"jaxtrain/host/{rank}", f"{socket.gethostname()} pid {os.getpid()}")
        machines = exchange("hosts", machine())
        _hosts[:] = [machines.index(name) for name in machines]


def host_numbers() -> tuple[int, ...]:
    """For each process, the lowest rank on its host; empty for a single process."""
    return tuple(_hosts)


def machine() -> str:
    """What the processes of one machine have in common: JAXTRAIN_HOST, or the kernel's boot id, or the host's name."""
    if name := os.environ.get("JAXTRAIN_HOST"):
        return name
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def process_name(rank: int) -> str:
    """'process 3 (node1 pid 77)'; the host is left out where it was never announced."""
    host = get(f"jaxtrain/host/{rank}", 0.1) if rank_and_count()[1] > 1 else None
    return f"process {rank} ({host})" if host else f"process {rank}"


def rank_and_count() -> tuple[int, int]:
    """(rank of this process, processes of the job), as they joined; unlike jax.process_count() it starts no device."""
    from jax._src import distributed

    state = distributed.global_state
    return (0, 1) if state.client is None else (state.process_id, state.num_processes)


def client() -> Any:
    """The client of the coordination service; only in a job of several processes."""
    from jax._src import distributed

    return distributed.global_state.client


_hosts: list[int] = []
_counts: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
