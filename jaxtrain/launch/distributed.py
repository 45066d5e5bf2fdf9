"""Joining the processes of one job: by hand, under Open MPI, under Slurm, or not at all."""

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
from jaxtrain.launch.coordination import announce_failure, announce_host
from jaxtrain.launch.process import ProcessInfo, explicit_process, scheduled_process, split_address

FAILED = 13
"""Exit status of one of several processes that ended by an exception other than ConfigError."""


def join(
    coordinator: str | None = None,
    processes: int | None = None,
    process_id: int | None = None,
    timeout: float = 300.0,
) -> None:
    """Join this process to its job, before the first computation of jax; does nothing for a single process.

    Arguments come first, then the variables of Open MPI, then those of Slurm. Raises ConfigError for missing or
    impossible arguments, and if the coordinator (process 0) cannot be reached or cannot listen. If a process is still
    missing after `timeout` seconds, the message is printed and this process exits with status 2.
    """
    process = explicit_process(coordinator, processes, process_id) or scheduled_process(os.environ)
    if process is None:
        return
    deadline = time.monotonic() + timeout
    if process.coordinator is not None:
        host, port = split_address(process.coordinator)
        if process.process_id == 0:
            _check_free(host, port)
        else:
            _wait_for_listener(host, port, deadline)
    with _exit_at(deadline, _missing_processes(process, timeout)):
        _initialize(process, timeout)
    announce_host()


def under_scheduler() -> bool:
    """Whether Open MPI or Slurm started this process as one of several."""
    return scheduled_process(os.environ) is not None


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


def _initialize(process: ProcessInfo, timeout: float) -> None:
    bind = None
    if process.coordinator is not None and _is_loopback(split_address(process.coordinator)[0]):
        bind = process.coordinator
    # The service would swallow SIGTERM: a run saves by a handler of its own.
    jax.config.update("jax_enable_preemption_service", False)
    keep_env = process.local_devices is None or "JAX_LOCAL_DEVICE_IDS" in os.environ
    try:
        jax.distributed.initialize(
            coordinator_address=process.coordinator,
            num_processes=process.processes,
            process_id=process.process_id,
            local_device_ids=None if keep_env else process.local_devices,
            cluster_detection_method="deactivate" if process.coordinator else process.found_by,
            # At its timeout jax aborts the process: ours is earlier and prints a message.
            initialization_timeout=int(timeout) + 60,
            coordinator_bind_address=bind,
        )
    except (ValueError, RuntimeError) as error:
        if process.coordinator is not None:
            raise
        raise ConfigError(
            f"Open MPI started this process, but jax cannot join it ({error}): "
            "pass --coordinator HOST:PORT --processes N --process-id I"
        ) from None


def _check_free(host: str, port: int) -> None:
    """Raise ConfigError if process 0 cannot listen; jax would crash without a message."""
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


def _missing_processes(process: ProcessInfo, timeout: float) -> str:
    where = process.coordinator or "the coordinator that Open MPI names"
    return (
        f"jaxtrain: process {process.process_id} waited {timeout:.0f} s at {where} for all {process.processes} "
        "processes of the job: check that each was started, with the same --coordinator and --processes and a "
        "different --process-id, and that no firewall closes the port"
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
