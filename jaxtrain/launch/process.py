"""The rank of this process in its job, its devices, the address of process 0. Does not import jax."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.config import ConfigError


@dataclass(frozen=True)
class ProcessInfo:
    """This process in a job; process 0 listens at `coordinator`, HOST:PORT."""

    coordinator: str
    processes: int
    process_id: int
    local_devices: tuple[int, ...] | None = None
    """Indices of the visible devices that this process uses; None is all of them."""
    found_by: str | None = None
    """The launcher that started it, None if arguments describe it."""


def explicit_process(coordinator: str | None, processes: int | None, process_id: int | None) -> ProcessInfo | None:
    """The process that arguments describe, None without any; raises ConfigError if some are missing or impossible."""
    given = {"--coordinator": coordinator, "--processes": processes, "--process-id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if coordinator is None or processes is None or process_id is None:
        have = ", ".join(f"{name} {value}" for name, value in given.items() if value is not None)
        raise ConfigError(
            f"{have} is set without {' and '.join(missing)}: joining a job by hand needs all three "
            "(--coordinator HOST:PORT of process 0, the same everywhere; --processes N; --process-id 0 to N-1)"
        )
    split_address(coordinator)
    if processes < 1 or not 0 <= process_id < processes:
        raise ConfigError(
            f"--process-id {process_id} with --processes {processes}: the processes of a job are numbered 0 to N-1"
        )
    return ProcessInfo(coordinator, processes, process_id)


def local_devices(local_id: int, tasks: int, visible: int, on_node: int | None) -> tuple[int, ...] | None:
    """Indices of the visible GPUs that one of `tasks` tasks on a node uses; None is all of them.

    Tasks that see only a part of the GPUs of the node were bound by the scheduler and use all that they see. Tasks that
    see the same GPUs split them evenly. Raises ConfigError if the number of tasks does not divide the number of GPUs.
    """
    bound = visible < tasks if on_node is None else visible * tasks <= on_node
    if visible == 0 or tasks == 1 or bound:
        return None
    if visible % tasks:
        raise ConfigError(
            f"{tasks} tasks on a node see the same {visible} GPUs, which do not split evenly: "
            "start one task per node or one per GPU, or bind GPUs to tasks (srun --gpus-per-task)"
        )
    share = visible // tasks
    return tuple(range(local_id * share, (local_id + 1) * share))


def visible_gpus(env: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """Number of NVIDIA GPUs that a process with these variables sees; does not load the driver."""
    listed = env.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return sum(1 for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    names = [name.strip() for name in listed.split(",")]
    return len(list(itertools.takewhile(lambda name: name not in ("", "-1", "NoDevFiles"), names)))


def split_address(address: str, name: str = "--coordinator") -> tuple[str, int]:
    """(host, port) of host:port or [ipv6]:port; raises ConfigError for another form."""
    match = re.fullmatch(r"\[?([^\[\]]+?)\]?:(\d+)", address.strip())
    if match is None or not 0 < int(match[2]) < 65536:
        raise ConfigError(f"{name} {address!r} is not HOST:PORT, such as node0:12345")
    return match[1], int(match[2])


def show_devices(own: tuple[int, ...] | None, visible: int) -> str:
    """'GPUs 0-3 of 8', 'all 8 GPUs' or 'the devices that jax finds'."""
    if own is None:
        return f"all {visible} GPUs" if visible else "the devices that jax finds"
    return f"GPU {own[0]} of {visible}" if len(own) == 1 else f"GPUs {own[0]}-{own[-1]} of {visible}"


def enough_threads(devices: int) -> None:
    """Enlarge the thread pool of XLA's CPU client for `devices` simulated devices; call before the first use of jax.

    Simulated devices share one pool, and each may block several threads in a collective. A pool of the machine's size
    can run out of threads, and all devices then wait for ever.
    """
    if devices > 1:
        os.environ.setdefault("NPROC", str(8 * devices))  # read by XLA's CPU client
