"""Starting several processes of one job on this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence

from jaxtrain.config import ConfigError
from jaxtrain.launch.generation import SETTLE_S, Generation, Job, Outcome, Place
from jaxtrain.launch.node import Nodes, launch_node
from jaxtrain.launch.ports import free_port
from jaxtrain.launch.process import visible_gpus
from jaxtrain.launch.restarts import RestartPolicy
from jaxtrain.launch.signals import GRACE_S, Signals
from jaxtrain.launch.stragglers import Stragglers
from jaxtrain.launch.supervisor import Recorder, supervise
from jaxtrain.launch.watchdog import Limits


def launch(
    command: Sequence[str],
    processes: int,
    devices_per_process: int | None = None,
    settle: float = SETTLE_S,
    grace: float = GRACE_S,
    restarts: int = 0,
    limits: Limits | None = None,
    record: Recorder = lambda kind, **values: None,
    newest_checkpoint: Callable[[], int] = lambda: -1,
    nodes: Nodes | None = None,
) -> int:
    """Run `command --coordinator 127.0.0.1:PORT --processes N --process-id i` N times; 0, or the first failed status.

    Lines of process 0 are printed as they are, lines of process i after "[i] ". When a process fails or is stuck, the
    others get SIGTERM, and SIGKILL after `settle` seconds; then all are started again with another port, as
    `restarts.RestartPolicy` decides. SIGINT, SIGTERM and SIGUSR1 are forwarded: the processes have `grace` seconds. No
    process outlives the launcher, even if that is killed. Each process gets `devices_per_process` CPU devices, or as
    many GPUs. With `nodes`, this machine is one of several, each of which calls `launch`. Raises ConfigError for
    impossible numbers, and where the nodes cannot meet.
    """
    environments = list(worker_environments(processes, devices_per_process, os.environ))
    job = Job(command, environments, limits or Limits(), settle)
    policy = RestartPolicy(restarts, newest_checkpoint)
    if nodes is not None:
        return launch_node(nodes, job, policy, Signals(grace), record)
    stragglers = Stragglers(record)
    with Signals(grace).handled() as signals:

        def run_generation(number: int) -> Outcome:
            place = Place(f"127.0.0.1:{free_port()}", processes, generation=number)
            return Generation(job, place, signals, on_watch=stragglers.look).run()

        return supervise(run_generation, policy, signals.wait, record)


def worker_environments(processes: int, devices: int | None, env: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Environment of each process: its number of CPU devices, and its GPUs if this machine has some.

    Raises ConfigError if there are too few GPUs.
    """
    if processes < 1 or (devices is not None and devices < 1):
        raise ConfigError(f"--processes {processes} --devices-per-process {devices}: use positive numbers")
    gpus = 0 if env.get("JAX_PLATFORMS") == "cpu" else visible_gpus(env)
    each = devices or gpus // processes
    if gpus and (each == 0 or each * processes > gpus):
        raise ConfigError(
            f"--processes {processes} with {each or 1} GPUs each needs {(each or 1) * processes}, this machine shows "
            f"{gpus}: lower --processes or --devices-per-process, or set JAX_PLATFORMS=cpu to simulate devices"
        )
    names = env.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    width = shutil.get_terminal_size().columns - len("[0] ")
    for i in range(processes):
        # A crash in native code prints the stacks of Python.
        added = {"PYTHONUNBUFFERED": "1", "COLUMNS": str(width), "PYTHONFAULTHANDLER": "1"}
        if devices is not None:
            added["JAX_NUM_CPU_DEVICES"] = str(devices)
        if gpus:
            added["CUDA_VISIBLE_DEVICES"] = ",".join(names[i * each : (i + 1) * each])
        yield {**env, **added}
