"""The process of a job that the environment variables of its launcher describe. Does not import jax.

Open MPI, MPICH and Intel MPI, torchrun, Slurm, Kubernetes, or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
JAX_PROCESS_ID set by hand. A launcher that started several processes without saying where process 0 runs is an error:
each of them would train alone in one run directory.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace

from jaxtrain.config import ConfigError
from jaxtrain.launch.process import (
    ProcessInfo,
    explicit_process,
    local_devices,
    show_devices,
    split_address,
    visible_gpus,
)

Env = Mapping[str, str]

FIRST_PORT, PORTS = 61440, 4096
"""Ports of coordinators, above those that Linux gives to outgoing connections."""


def find_process(
    coordinator: str | None, processes: int | None, process_id: int | None, env: Env, parent: int
) -> ProcessInfo | None:
    """The process that arguments describe, else the launcher's variables; None for one that is alone.

    `parent` is the pid of the parent process. --coordinator alone is the address for a launcher that does not say where
    process 0 runs. Raises ConfigError for arguments or variables that are incomplete or impossible.
    """
    if coordinator is not None and processes is None and process_id is None:
        found = detected_process({**env, "JAX_COORDINATOR_ADDRESS": coordinator}, parent)
        if found is not None:
            return found
    return explicit_process(coordinator, processes, process_id) or detected_process(env, parent)


def detected_process(env: Env, parent: int) -> ProcessInfo | None:
    """The process that a launcher's variables describe, None for one that is alone; raises ConfigError as above."""
    for find in LAUNCHERS:
        found = find(env, parent)
        if found is not None:
            if found.process_id >= found.processes:
                raise ConfigError(
                    f"{found.found_by} gives this process the rank {found.process_id} of {found.processes}: the "
                    "variables contradict each other, unset those that were left from another job"
                )
            address = env.get("JAX_COORDINATOR_ADDRESS") or found.coordinator
            split_address(address, "--coordinator or JAX_COORDINATOR_ADDRESS")
            return replace(found, coordinator=address)
    return None


def describe_process(found: ProcessInfo, env: Env) -> str:
    """The line that process 0 prints: what was found, and what was chosen."""
    return (
        f"{found.found_by} started {found.processes} processes; coordinator {found.coordinator}; "
        f"this one uses {show_devices(found.local_devices, visible_gpus(env))}"
    )


def note_alone(env: Env) -> str | None:
    """What to say where a process is alone although a scheduler may have meant several, None elsewhere."""
    tasks = env.get("SLURM_NTASKS", "1")
    if "SLURM_JOB_ID" in env and tasks.isdecimal() and int(tasks) > 1 and "SLURM_STEP_NODELIST" not in env:
        return (
            f"Slurm allocated {tasks} tasks (SLURM_NTASKS), but this process was not started by srun and is alone: "
            "write srun before the command to start all of them"
        )
    if env.get("JOB_COMPLETION_INDEX") == "0":
        return (
            "this pod belongs to an indexed Job (JOB_COMPLETION_INDEX), but JAX_COORDINATOR_ADDRESS and "
            "JAX_NUM_PROCESSES are not set: it is alone"
        )
    return None


def _variables(env: Env, parent: int) -> ProcessInfo | None:
    processes = _number(env, "JAX_NUM_PROCESSES", None)
    if processes is None or processes < 2:
        return None
    index = "JAX_PROCESS_ID" if "JAX_PROCESS_ID" in env else "JOB_COMPLETION_INDEX"
    rank = _need(env, index, "JAX_PROCESS_ID is the rank of this process, from 0")
    found = ProcessInfo("", processes, rank, None, f"JAX_NUM_PROCESSES and {index}")
    return _placed(found, env, None)


def _open_mpi(env: Env, parent: int) -> ProcessInfo | None:
    processes = _number(env, "OMPI_COMM_WORLD_SIZE", 1)
    if processes < 2:
        return None
    hint = "start the processes by mpirun"
    rank, local = _need(env, "OMPI_COMM_WORLD_RANK", hint), _need(env, "OMPI_COMM_WORLD_LOCAL_RANK", hint)
    here = _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE", 1)
    # The host of mpirun: in version 4 by address, in version 5 by name in the namespace prterun-HOST-PID@1.
    job = env.get("PMIX_NAMESPACE", "")
    uri = re.search(r";tcp6?://\[?([^,:\]]+)", env.get("OMPI_MCA_orte_hnp_uri", ""))
    named = re.match(r"prterun-(.+)-\d+@\d+$", job)
    host = "127.0.0.1" if here == processes else _first_slurm_host(env) or next((m[1] for m in (uri, named) if m), None)
    found = ProcessInfo("", processes, rank, _own_gpus(env, local, here), "Open MPI")
    return _placed(found, env, host and f"{_bracketed(host)}:{_port(env, zlib.crc32(job.encode()))}")


def _hydra(env: Env, parent: int) -> ProcessInfo | None:
    processes = _number(env, "PMI_SIZE", 1)
    # srun sets PMI_RANK too, without a local one.
    name = next((name for name in ("MPI_LOCALRANKID", "PMI_LOCAL_RANK") if name in env), None)
    if processes < 2 or (name is None and "SLURM_STEP_NODELIST" in env):
        return None
    rank = _need(env, "PMI_RANK", "start the processes by mpiexec")
    local = _number(env, name, 0) if name else 0
    here = _number(env, "MPI_LOCALNRANKS", _number(env, "PMI_LOCAL_SIZE", 1))
    host = "127.0.0.1" if here == processes else _first_slurm_host(env)
    # The processes of one host are children of one proxy.
    port = _port(env, parent if here == processes else _number(env, "SLURM_JOB_ID", 0))
    found = ProcessInfo("", processes, rank, _own_gpus(env, local, here), "MPICH or Intel MPI (PMI_SIZE)")
    return _placed(found, env, host and f"{host}:{port}")


def _torchrun(env: Env, parent: int) -> ProcessInfo | None:
    return _torch(env, parent) if "TORCHELASTIC_RUN_ID" in env else None


def _torch(env: Env, parent: int) -> ProcessInfo | None:
    processes = _number(env, "WORLD_SIZE", 1)
    if processes < 2:
        return None
    hint = "torchrun sets it; unset WORLD_SIZE if it was left from another job"
    rank = _need(env, "RANK", hint)
    local, here = _number(env, "LOCAL_RANK", 0), _number(env, "LOCAL_WORLD_SIZE", 1)
    name = "torchrun" if "TORCHELASTIC_RUN_ID" in env else "a launcher that sets RANK and WORLD_SIZE"
    address = env.get("MASTER_ADDR") or None
    if address:
        # torchrun's own store listens on MASTER_PORT.
        port = env.get("JAX_COORDINATOR_PORT") or _need(env, "MASTER_PORT", hint) % 65535 + 1
        address = f"{_bracketed(address)}:{port}"
    return _placed(ProcessInfo("", processes, rank, _own_gpus(env, local, here), name), env, address)


def _slurm(env: Env, parent: int) -> ProcessInfo | None:
    # SLURM_STEP_NODELIST tells a task of srun from a batch script, which also has SLURM_PROCID and SLURM_NTASKS.
    hosts = env.get("SLURM_STEP_NODELIST")
    processes = _number(env, "SLURM_STEP_NUM_TASKS", _number(env, "SLURM_NTASKS", 1))
    if hosts is None or processes < 2 or "SLURM_PROCID" not in env:
        return None
    job = _need(env, "SLURM_JOB_ID", "Slurm sets it") + _number(env, "SLURM_STEP_ID", 0)
    here = slurm_tasks_here(env)
    local = _need(env, "SLURM_LOCALID", "it is the rank of a task on its node") if here > 1 else 0
    devices = local_devices(local, here, visible_gpus(env), slurm_gpus(env))
    # Every task computes the same port; each step of a job has another port.
    address = f"{first_host(hosts)}:{_port(env, job)}"
    return ProcessInfo(address, processes, _need(env, "SLURM_PROCID", "Slurm sets it"), devices, "Slurm")


def _kubernetes(env: Env, parent: int) -> ProcessInfo | None:
    # Kubeflow's JAXJob.
    processes = _number(env, "NUM_PROCESSES", 1)
    if processes > 1 and "PROCESS_ID" in env and "COORDINATOR_ADDRESS" in env:
        address, port = env["COORDINATOR_ADDRESS"], env.get("COORDINATOR_PORT")
        address = f"{_bracketed(address)}:{port}" if port else address
        return ProcessInfo(address, processes, _need(env, "PROCESS_ID", ""), None, "Kubeflow (NUM_PROCESSES)")
    index = _number(env, "JOB_COMPLETION_INDEX", 0)
    if index:
        raise ConfigError(
            f"JOB_COMPLETION_INDEX={index}: this pod is one of several of an indexed Job, which does not say how many: "
            "set JAX_NUM_PROCESSES and JAX_COORDINATOR_ADDRESS=HOST:PORT of pod 0 in the manifest "
            "(jaxtrain launch --kubernetes writes one)"
        )
    return None


LAUNCHERS: tuple[Callable[[Env, int], ProcessInfo | None], ...] = (
    _variables, _torchrun, _open_mpi, _hydra, _slurm, _torch, _kubernetes,
)  # fmt: skip
"""The innermost launcher comes first: mpirun and torchrun start their daemons by srun, whose variables count those."""


def first_host(nodes: str) -> str:
    """First host of a Slurm node list: rack[1-2]n[007,009-12],other -> rack1n007."""
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodes).split(",")[0]


def slurm_tasks_here(env: Env) -> int:
    """Number of tasks of this step on this node, from lists such as 4(x2),3; raises ConfigError for another form."""
    name = "SLURM_STEP_TASKS_PER_NODE" if env.get("SLURM_STEP_TASKS_PER_NODE") else "SLURM_NTASKS_PER_NODE"
    counts: list[int] = []
    for part in (env.get(name) or "1").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigError(f"{name}={env[name]!r} is not a list such as 4(x2),3: start the processes by srun")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[min(_number(env, "SLURM_NODEID", 0), len(counts) - 1)]


def slurm_gpus(env: Env) -> int | None:
    """GPUs of the job on this node: 8, h100:8, or gpu:a100:4,gpu:h100:2; None if Slurm does not say.

    Raises ConfigError for another form.
    """
    text = env.get("SLURM_GPUS_ON_NODE")
    if not text:
        return None
    counts = [re.fullmatch(r"(?:[^:,()]+:){0,2}(\d+)(?:\([^)]*\))?", part.strip()) for part in text.split(",")]
    if None in counts:
        raise ConfigError(
            f"SLURM_GPUS_ON_NODE={text!r} is not a number of GPUs such as 8 or h100:8: unset it, and each task uses "
            "the GPUs that it sees"
        )
    return sum(int(match[1]) for match in counts if match)


def _number(env: Env, name: str, default: int | None) -> int:
    """The number of a variable; raises ConfigError naming it for another text."""
    text = env.get(name)
    if not text:
        return default  # type: ignore[return-value]
    if re.fullmatch(r"\d+", text.strip()) is None:
        raise ConfigError(f"{name}={text!r} is not a number: the launcher sets it, unset it or set it right")
    return int(text)


def _need(env: Env, name: str, hint: str) -> int:
    if not env.get(name):
        raise ConfigError(
            f"{name} is not set, although other variables say that this process is one of several ({hint}): set it, or "
            "pass --coordinator HOST:PORT --processes N --process-id I"
        )
    return _number(env, name, 0)


def _placed(found: ProcessInfo, env: Env, address: str | None) -> ProcessInfo:
    """With the address of the coordinator; raises ConfigError where nothing says where process 0 runs."""
    address = env.get("JAX_COORDINATOR_ADDRESS") or address
    if address is None:
        raise ConfigError(
            f"{found.found_by} started this process as {found.process_id} of {found.processes}, but no variable says "
            "where process 0 runs: set JAX_COORDINATOR_ADDRESS=HOST:PORT for all processes, or pass --coordinator"
        )
    return replace(found, coordinator=address)


def _own_gpus(env: Env, local: int, here: int) -> tuple[int, ...] | None:
    return local_devices(local, here, visible_gpus(env), None)


def _first_slurm_host(env: Env) -> str | None:
    nodes = env.get("SLURM_JOB_NODELIST")
    return first_host(nodes) if nodes else None


def _port(env: Env, number: int) -> int:
    return _number(env, "JAX_COORDINATOR_PORT", None) or FIRST_PORT + number % PORTS


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
