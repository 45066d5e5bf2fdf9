"""The rank of this process in its job, from arguments or the variables of Open MPI and Slurm. Does not import jax."""

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
    """This process in a job. Without a coordinator, jax finds it by its detection method `found_by`."""

    coordinator: str | None
    processes: int
    process_id: int
    local_devices: tuple[int, ...] | None = None
    """Indices of the visible devices that this process uses; None is all of them."""
    found_by: str | None = None


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


def scheduled_process(env: Mapping[str, str]) -> ProcessInfo | None:
    """The process that the variables of Open MPI or Slurm describe; None outside of both or for a single task.

    Open MPI is read first: mpirun starts its daemons by srun, and the Slurm variables then count the daemons.
    """
    return _open_mpi(env) or _slurm(env)


def _open_mpi(env: Mapping[str, str]) -> ProcessInfo | None:
    processes = int(env.get("OMPI_COMM_WORLD_SIZE", "1"))
    if processes < 2:
        return None
    local, tasks = int(env["OMPI_COMM_WORLD_LOCAL_RANK"]), int(env.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1"))
    # Without local_device_ids, jax gives each process under Open MPI one GPU.
    gpus = visible_gpus(env)
    devices = local_devices(local, tasks, gpus, None) or tuple(range(gpus)) or None
    return ProcessInfo(None, processes, int(env["OMPI_COMM_WORLD_RANK"]), devices, "ompi")


def _slurm(env: Mapping[str, str]) -> ProcessInfo | None:
    # SLURM_STEP_NODELIST tells a task of srun from a batch script, which also has SLURM_PROCID and SLURM_NTASKS.
    hosts = env.get("SLURM_STEP_NODELIST")
    processes = int(env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS") or 1)
    if hosts is None or processes < 2 or "SLURM_PROCID" not in env:
        return None
    # Every task computes the same port; each step of a job has another port.
    port = (
        env.get("JAX_COORDINATOR_PORT") or 61440 + (int(env["SLURM_JOB_ID"]) + int(env.get("SLURM_STEP_ID", 0))) % 4096
    )
    on_node = env.get("SLURM_GPUS_ON_NODE")
    devices = local_devices(
        int(env["SLURM_LOCALID"]), slurm_tasks_here(env), visible_gpus(env), int(on_node) if on_node else None
    )
    return ProcessInfo(f"{first_host(hosts)}:{port}", processes, int(env["SLURM_PROCID"]), devices, "slurm")


def first_host(nodes: str) -> str:
    """First host of a Slurm node list: rack[1-2]n[007,009-12],other -> rack1n007."""
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodes).split(",")[0]


def slurm_tasks_here(env: Mapping[str, str]) -> int:
    """Number of tasks of this step on this node, from lists such as 4(x2),3."""
    counts: list[int] = []
    for part in (env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_NTASKS_PER_NODE") or "1").split(","):
        number, _, times = part.partition("(x")
        counts += [int(number)] * int(times.rstrip(")") or 1)
    return counts[min(int(env.get("SLURM_NODEID", "0")), len(counts) - 1)]


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


def split_address(address: str) -> tuple[str, int]:
    """(host, port) of host:port or [ipv6]:port; raises ConfigError for another form."""
    match = re.fullmatch(r"\[?([^\[\]]+?)\]?:(\d+)", address.strip())
    if match is None or not 0 < int(match[2]) < 65536:
        raise ConfigError(f"--coordinator {address!r} is not HOST:PORT, such as node0:12345")
    return match[1], int(match[2])


def enough_threads(devices: int) -> None:
    """Enlarge the thread pool of XLA's CPU client for `devices` simulated devices; call before the first use of jax.

    Simulated devices share one pool, and each may block several threads in a collective. A pool of the machine's size
    can run out of threads, and all devices then wait for ever.
    """
    if devices > 1:
        os.environ.setdefault("NPROC", str(8 * devices))  # read by XLA's CPU client
