"""Verdicts and small values of the processes of a job, exchanged through jax's coordination service.

Never by device collectives: those would race with a step that is still in flight, and on CPU each group has a deadline
of 30 s. The service is a key-value store with barriers in process 0; its Python client has no public name in jax.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jax

from jaxtrain.config import RunError

CHUNK = 1 << 20
"""Characters of a value under one key."""


class AbsentError(RunError):
    """Processes did not come to an exchange or a barrier within its limit; the message names them."""

    status = 13


def exchange(name: str, value: Any, timeout: float = 300.0) -> list[Any]:
    """The values (JSON) of all processes, in order of rank; all call it with the same names in the same order.

    Process 0 collects and publishes, so that N processes make O(N) requests. Raises AbsentError naming the processes
    (rank and host) that gave nothing within `timeout` seconds.
    """
    processes, rank = jax.process_count(), jax.process_index()
    if processes == 1:
        return [json.loads(json.dumps(value))]
    turn = next(_counts[name])
    here, before = f"jaxtrain/{name}/{turn}", f"jaxtrain/{name}/{turn - 1}"
    if rank:
        put(f"{here}/{rank}", json.dumps(value))
        # Process 0 gives the absent their full time first.
        result = json.loads(get(f"{here}/all", timeout + 30.0) or '{"absent": [0]}')
    else:
        texts, deadline = {0: json.dumps(value)}, time.monotonic() + timeout
        for other in range(1, processes):
            if (text := get(f"{here}/{other}", max(deadline - time.monotonic(), 0.1))) is not None:
                texts[other] = text
        absent = [other for other in range(processes) if other not in texts]
        result = {"absent": absent} if absent else {"values": [json.loads(texts[i]) for i in range(processes)]}
        put(f"{here}/all", json.dumps(result))
        if turn:
            # Whoever entered this exchange has left the one before.
            client().key_value_delete(before)
    if "absent" in result:
        raise AbsentError(
            f"{name}: no answer within {timeout:.0f} s from {', '.join(map(process_name, result['absent']))}"
        )
    return list(result["values"])


def wait_for_all(name: str, timeout: float = 300.0) -> None:
    """Wait until every process is here; raises AbsentError naming those that are not within `timeout` seconds."""
    exchange(name, None, timeout)


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
        raise
    number, _, text = first.partition(" ")
    rest = [client().blocking_key_value_get(f"{key}/part{i}", 60_000) for i in range(1, int(number))]
    return "".join([text, *rest])


def announce_host() -> None:
    """Publish this process's host name and pid once, for messages of others; call after joining."""
    if jax.process_count() > 1:
        put(f"jaxtrain/host/{jax.process_index()}", f"{socket.gethostname()} pid {os.getpid()}")


def process_name(rank: int) -> str:
    """'process 3 (node1 pid 77)'; the host is left out where it was never announced."""
    host = get(f"jaxtrain/host/{rank}", 0.1) if jax.process_count() > 1 else None
    return f"process {rank} ({host})" if host else f"process {rank}"


def client() -> Any:
    """The client of the coordination service; only in a job of several processes."""
    from jax._src import distributed

    return distributed.global_state.client


_counts: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
