"""Joining the processes of one job: by hand, under a launcher, or not at all."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax

from jaxtrain.config import ConfigError, RunError
from jaxtrain.launch.coordination import announce_failure, meet
from jaxtrain.launch.detect import describe_process, detected_process, find_process, note_alone
from jaxtrain.launch.process import ProcessInfo, split_address

FAILED = 13
"""Exit status of one of several processes that ended by an exception other than ConfigError."""

HEARTBEAT_S = 60
"""Seconds without a sign of life after which a process counts as lost, and the job ends."""


def join(
    coordinator: str | None = None,
    processes: int | None = None,
    process_id: int | None = None,
    timeout: float = 300.0,
) -> None:
    """Join this process to its job, before the first computation of jax; does nothing for a single process.

    Arguments come first, then the variables of a launcher (launch/detect.py); process 0 prints what it found. Raises
    ConfigError for missing or impossible arguments and variables, and if the coordinator (process 0) cannot be reached
    or cannot listen. If a process is still missing after `timeout` seconds, the message is printed and this process
    exits with status 2.
    """
    process = find_process(coordinator, processes, process_id, os.environ, os.getppid())
    if process is None:
        _print_note(note_alone(os.environ))
        return
    if process.found_by and process.process_id == 0:
        _print_note(describe_process(process, os.environ))
    deadline = time.monotonic() + timeout
    host, port = split_address(process.coordinator)
    bind = None
    if process.process_id == 0:
        bind = _bind_address(host, port)
    else:
        _wait_for_listener(host, port, deadline)
    with _exit_at(deadline, _missing_processes(process, timeout)):
        _initialize(process, bind, timeout)
    meet()


def under_scheduler() -> bool:
    """Whether a launcher started this process as one of several; raises ConfigError for impossible variables."""
    return detected_process(os.environ, os.getppid()) is not None


def guard(main: Callable[[], int]) -> int:
    """Run `main`. If it fails in one of several processes, print why and exit at once, with status 2 for a ConfigError.

    An exception would make the process wait in the exit barrier of jax for processes that wait for this one. A single
    process raises as usual.
    """
    try:
        status = main()
    except BaseException as error:
        if not jax.distributed.is_initialized():
            raise
        text, status = _describe_error(error)
        print(text, end="", file=sys.stderr, flush=True)
        told = isinstance(error, ConfigError | RunError)
        announce_failure(str(error) if told else text.strip().rpartition("\n")[2], status)
    if not status or not jax.distributed.is_initialized():
        return status
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(status)


def _initialize(process: ProcessInfo, bind: str | None, timeout: float) -> None:
    # The service would swallow SIGTERM: a run saves by a handler of its own.
    jax.config.update("jax_enable_preemption_service", False)
    keep_env = process.local_devices is None or "JAX_LOCAL_DEVICE_IDS" in os.environ
    jax.distributed.initialize(
        coordinator_address=process.coordinator,
        num_processes=process.processes,
        process_id=process.process_id,
        local_device_ids=None if keep_env else process.local_devices,
        cluster_detection_method="deactivate",
        # At its timeout jax aborts the process: ours is earlier and prints a message.
        initialization_timeout=int(timeout) + 60,
        heartbeat_timeout_seconds=HEARTBEAT_S,
        coordinator_bind_address=bind,
    )


def _bind_address(host: str, port: int) -> str | None:
    """The one address of this machine that `host` names; None, and a printed note, to listen on all.

    Raises ConfigError if process 0 cannot listen there; jax would crash without a message.
    """
    try:
        found = dict.fromkeys(entry[4][0] for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    except OSError as error:
        raise ConfigError(
            f"the coordinator's host {host} has no address here ({error.strerror or error}): name the host of process 0"
        ) from None
    problems = {str(address): _check_free(str(address), port) for address in found}
    usable = [address for address, problem in problems.items() if problem is None]
    if not usable:
        raise ConfigError(
            f"process 0 cannot listen at {host}:{port} ({next(iter(problems.values()))}): another job may use the "
            "port, or process 0 does not run on this host; choose another --coordinator (JAX_COORDINATOR_PORT "
            "changes the port under a launcher)"
        )
    # Debian gives a host's own name a loopback address, at which other hosts do not find it.
    if not _is_loopback(host) and (len(usable) > 1 or _is_loopback(usable[0])):
        _print_note(
            f"{host} is {' and '.join(usable)} here: the coordinator listens on all interfaces, without "
            "authentication; name one address in --coordinator or JAX_COORDINATOR_ADDRESS to listen there only"
        )
        return None
    return f"[{usable[0]}]:{port}" if ":" in usable[0] else f"{usable[0]}:{port}"


def _check_free(address: str, port: int) -> str | None:
    """Why this machine cannot listen at an address, None if it can."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            return str(error.strerror or error)
    return None


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


def _missing_processes(process: ProcessInfo, timeout: float) -> str:
    return (
        f"jaxtrain: process {process.process_id} waited {timeout:.0f} s at {process.coordinator} for all "
        f"{process.processes} processes of the job: check that each was started, with the same --coordinator and "
        "--processes and a different --process-id, and that no firewall closes the port"
    )


@contextmanager
def _exit_at(deadline: float, message: str) -> Iterator[None]:
    """Print and exit with status 2 if the body has not ended by then: Python cannot interrupt waits in native code."""

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


def _print_note(text: str | None) -> None:
    if text is not None:
        print(f"jaxtrain: {text}", file=sys.stderr, flush=True)


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host == "::1" or host.startswith("127.")


def _describe_error(error: BaseException) -> tuple[str, int]:
    """What a process prints on stderr when it ends by an exception, and its exit status."""
    if isinstance(error, ConfigError | RunError):
        return f"jaxtrain: {error}\n", error.status
    if isinstance(error, SystemExit):
        told = isinstance(error.code, str)
        return (f"{error.code}\n", 1) if told else ("", int(error.code or 0))
    if isinstance(error, KeyboardInterrupt):
        return f"jaxtrain: {str(error) or 'interrupted'}\n", getattr(error, "status", 130)
    return "".join(traceback.format_exception(error)), FAILED
