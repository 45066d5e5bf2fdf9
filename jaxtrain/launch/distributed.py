"""Joining the processes of one job: by hand, under Open MPI, under Slurm, or not at all."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax

from jaxtrain.config import ConfigError
from jaxtrain.launch.process import ProcessInfo, explicit_process, scheduled_process, split_address

FAILED = 13
"""Exit status of a process of several that ended by an exception which is no ConfigError."""


def join(
    coordinator: str | None = None,
    processes: int | None = None,
    process_id: int | None = None,
    timeout: float = 300.0,
) -> None:
    """Join this process to its job before jax computes anything; a single process does nothing.

    Explicit arguments win, then Open MPI's variables, then Slurm's. Raises ConfigError for arguments that are missing
    or impossible and when the coordinator (process 0) cannot be reached or cannot listen; when processes stay away
    until `timeout` seconds have passed, a like message is printed and the process exits with status 2.
    """
    place = explicit_process(coordinator, processes, process_id) or scheduled_process(os.environ)
    if place is None:
        return
    deadline = time.monotonic() + timeout
    if place.coordinator is not None:
        host, port = split_address(place.coordinator)
        if place.process_id == 0:
            _check_free(host, port)
        else:
            _wait_for_listener(host, port, deadline)
    with _exit_at(deadline, _missing_processes(place, timeout)):
        _initialize(place, timeout)


def under_scheduler() -> bool:
    """Whether Open MPI's or Slurm's variables say that this process is one of several."""
    return scheduled_process(os.environ) is not None


def barrier(key: str, timeout: float = 300.0) -> None:
    """Wait until every process is here, on the coordination service; one process does not wait.

    A collective would not do: the CPU's device groups give up 30 s after their first use. Every process must pass its
    barriers in the same order. Raises jax.errors.JaxRuntimeError when `timeout` seconds have passed.
    """
    import orbax.checkpoint as ocp

    # The service refuses a key that it has seen.
    fresh = f"jaxtrain/{key}/{next(_passed[key])}"
    ocp.multihost.get_barrier_sync_fn()(key=fresh, timeout_ms=int(timeout * 1000))


_passed: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)


def guard(main: Callable[[], int]) -> int:
    """Run `main`; when one of several processes fails, print why and leave at once, with status 2 for a ConfigError.

    Leaving by an exception would wait in jax' exit barrier for processes that wait for this one. A single process
    raises as usual.
    """
    try:
        status = main()
    except BaseException as error:
        if not jax.distributed.is_initialized():
            raise
        status = _report(error)
    if not status or not jax.distributed.is_initialized():
        return status
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(status)


def _initialize(place: ProcessInfo, timeout: float) -> None:
    bind = None
    if place.coordinator is not None and _is_loopback(split_address(place.coordinator)[0]):
        bind = place.coordinator
    keep_env = place.local_devices is None or "JAX_LOCAL_DEVICE_IDS" in os.environ
    try:
        jax.distributed.initialize(
            coordinator_address=place.coordinator,
            num_processes=place.processes,
            process_id=place.process_id,
            local_device_ids=None if keep_env else place.local_devices,
            cluster_detection_method="deactivate" if place.coordinator else place.found_by,
            # jax aborts the process at its own timeout: ours, with a message, comes first.
            initialization_timeout=int(timeout) + 60,
            coordinator_bind_address=bind,
        )
    except (ValueError, RuntimeError) as error:
        if place.coordinator is not None:
            raise
        raise ConfigError(
            f"Open MPI started this process, but jax cannot join it ({error}): "
            "pass --coordinator HOST:PORT --processes N --process-id I"
        ) from None


def _check_free(host: str, port: int) -> None:
    """Raise ConfigError where process 0 cannot listen; jax would crash there without a word."""
    address = (host, port) if _is_loopback(host) else ("", port)
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise ConfigError(
                f"process 0 cannot listen at {host}:{port} ({error.strerror}): "
                "another job may be using the port, choose another one in --coordinator"
            ) from None


def _wait_for_listener(host: str, port: int, deadline: float) -> None:
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"nothing answers at the coordinator {host}:{port} ({error.strerror or error}): check that "
                    "process 0 runs there, that every process names the same --coordinator, "
                    "and that no firewall closes the port"
                ) from None
        time.sleep(0.1)


def _missing_processes(place: ProcessInfo, timeout: float) -> str:
    where = place.coordinator or "the coordinator that Open MPI names"
    return (
        f"jaxtrain: process {place.process_id} waited {timeout:.0f} s at {where} for all {place.processes} processes "
        "of the job: check that each was started, with the same --coordinator and --processes and a --process-id "
        "of its own, and that no firewall closes the port"
    )


@contextmanager
def _exit_at(deadline: float, message: str) -> Iterator[None]:
    """Print and exit with status 2 if the body is not over by then: it waits in native code, out of Python's reach."""

    def leave() -> None:
        print(message, file=sys.stderr, flush=True)
        os._exit(2)

    timer = threading.Timer(max(deadline - time.monotonic(), 1.0), leave)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host == "::1" or host.startswith("127.")


def _report(error: BaseException) -> int:
    """Say on stderr why a process ends; its exit status."""
    if isinstance(error, ConfigError):
        print(f"jaxtrain: {error}", file=sys.stderr)
        return 2
    if isinstance(error, SystemExit):
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        return 1 if isinstance(error.code, str) else int(error.code or 0)
    if isinstance(error, KeyboardInterrupt):
        return 130
    traceback.print_exception(error)
    return FAILED
