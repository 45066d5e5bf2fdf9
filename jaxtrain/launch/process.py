"""Where this process stands in its job: read from arguments, Open MPI's or Slurm's variables. Pure, without jax."""

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
    """This process' place in a job; a None coordinator is left to jax' detection of `found_by`."""

    coordinator: str | None
    processes: int
    process_id: int
    local_devices: tuple[int, ...] | None = None
    """Indices of the visible devices that are this process' own; None is all of them."""
    found_by: str | None = None


def explicit_process(coordinator: str | None, processes: int | None, process_id: int | None) -> ProcessInfo | None:
    """The place that arguments name, None without any; raises ConfigError when some are missing or impossible."""
    given = {"--coordinator": coordinator, "--processes": processes, "--process-id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if coordinator is None or processes is None or process_id is None:
        have = ", ".join(f"{name} {value}" for name, value in given.items() if value is not None)
        raise ConfigError(
            f"{have} is given without {' and '.join(missing)}: joining a job by hand needs all three "
            "(--coordinator HOST:PORT of process 0, the same everywhere; --processes N; --process-id 0 to N-1)"
        )
    split_address(coordinator)
    if processes < 1 or not 0 <= process_id < processes:
        raise ConfigError(
            f"--process-id {process_id} with --processes {processes}: the processes of a job are numbered 0 to N-1"
        )
    return ProcessInfo(coordinator, processes, process_id)


def scheduled_process(env: Mapping[str, str]) -> ProcessInfo | None:
    """The place that Open MPI's or Slurm's variables name; None outside of them or for a single task.

    Open MPI comes first: its mpirun starts its own daemons by srun, whose Slurm variables count those.
    """
    return _open_mpi(env) or _slurm(env)


def _open_mpi(env: Mapping[str, str]) -> ProcessInfo | None:
    processes = int(env.get("OMPI_COMM_WORLD_SIZE", "1"))
    if processes < 2:
        return None
    local, tasks = int(env["OMPI_COMM_WORLD_LOCAL_RANK"]), int(env.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1"))
    # jax would give a process here one GPU where none are named.
    gpus = visible_gpus(env)
    devices = local_devices(local, tasks, gpus, None) or tuple(range(gpus)) or None
    return ProcessInfo(None, processes, int(env["OMPI_COMM_WORLD_RANK"]), devices, "ompi")


def _slurm(env: Mapping[str, str]) -> ProcessInfo | None:
    # Only a task started by srun has a step's node list; a batch script alone has SLURM_PROCID and SLURM_NTASKS too.
    hosts = env.get("SLURM_STEP_NODELIST")
    processes = int(env.get("SLURM_STEP_NUM_TASKS") or env.get("SLURM_NTASKS") or 1)
    if hosts is None or processes < 2 or "SLURM_PROCID" not in env:
        return None
    # Every task computes the same port, another one for each step of a job.
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
    """Tasks of this step on this node, from lists such as 4(x2),3."""
    counts: list[int] = []
    for part in (env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_NTASKS_PER_NODE") or "1").split(","):
        number, _, times = part.partition("(x")
        counts += [int(number)] * int(times.rstrip(")") or 1)
    return counts[min(int(env.get("SLURM_NODEID", "0")), len(counts) - 1)]


def local_devices(local_id: int, tasks: int, visible: int, on_node: int | None) -> tuple[int, ...] | None:
    """Which of the visible GPUs are this task's, of `tasks` on its node; None is all that it sees.

    Tasks that see a part of the node's GPUs were bound by the scheduler and keep what they see; tasks that see the same
    GPUs split them evenly: one task a node takes all, one task a GPU takes one. Raises ConfigError when they do not
    split.
    """
    bound = visible < tasks if on_node is None else visible * tasks <= on_node
    if visible == 0 or tasks == 1 or bound:
        return None
    if visible % tasks:
        raise ConfigError(
            f"{tasks} tasks on a node see the same {visible} GPUs, which do not split evenly: "
            "start one task a node or one a GPU, or bind GPUs to tasks (srun --gpus-per-task)"
        )
    share = visible // tasks
    return tuple(range(local_id * share, (local_id + 1) * share))


def visible_gpus(env: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """NVIDIA GPUs that a process with these variables sees, without starting a driver."""
    listed = env.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return sum(1 for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    names = [name.strip() for name in listed.split(",")]
    return len(list(itertools.takewhile(lambda name: name not in ("", "-1", "NoDevFiles"), names)))


def split_address(address: str) -> tuple[str, int]:
    """host:port or [ipv6]:port -> (host, port); raises ConfigError."""
    match = re.fullmatch(r"\[?([^\[\]]+?)\]?:(\d+)", address.strip())
    if match is None or not 0 < int(match[2]) < 65536:
        raise ConfigError(f"--coordinator {address!r} is not HOST:PORT, such as node0:12345")
    return match[1], int(match[2])


def enough_threads(devices: int) -> None:
    """Room for `devices` simulated devices to wait for each other; must come before jax' first use.

    A device may wait in several threads of the one pool: no larger than the machine it runs dry, and all wait for ever.
    """
    if devices > 1:
        os.environ.setdefault("NPROC", str(8 * devices))  # where XLA's CPU client reads the size of its pool
