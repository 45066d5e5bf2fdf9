"""`jaxtrain launch`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from pydantic.dataclasses import dataclass

from jaxtrain.cli.train import Train, default_run
from jaxtrain.cli.verb import VERB, Config, Verb, run_verb
from jaxtrain.config import ConfigError, load_config
from jaxtrain.launch import manifests
from jaxtrain.launch.detect import first_host
from jaxtrain.launch.node import Nodes
from jaxtrain.launch.process import split_address
from jaxtrain.launch.restarts import GONE
from jaxtrain.launch.watchdog import Limits
from jaxtrain.observe.events import record_event


@dataclass(frozen=True, config=VERB)
class Launch(Verb):
    """Train a run in several processes on this machine, or join one process by hand or under Slurm."""

    config: Config
    """YAML file, name of a shipped configuration, or a run directory, which is resumed."""
    run: Path | None = None
    """Run directory; default runs/CONFIG, or CONFIG if that is a run directory."""
    processes: int | None = None
    """Processes to start here; with --process-id, processes of the whole job."""
    devices_per_process: int | None = None
    """Devices of each process started here; default all that it sees."""
    coordinator: str | None = None
    """HOST:PORT on which process 0 listens; with --processes and --process-id, this process joins the job by hand.
    With --nodes, the address where the launchers of all nodes meet: a host name of node 0 and a free port of it."""
    process_id: int | None = None
    """Rank of this process, from 0; no other process is started then."""
    from_: Path | None = None
    """Run, or RUN/checkpoints/STEP, whose weights a new run starts with."""
    from_optimizer: bool = False
    """With --from: take over the optimizer's state too."""
    restarts: int = 10
    """Restarts after failures that may follow each other without progress; 0: a failure ends the job. Default 10."""
    grace: float = 120.0
    """Seconds to save and exit after a signal to the launcher; a second signal ends all at once. Default 120."""

    nodes: int | None = None
    """Nodes of the job: run the same command on each, with its --node-rank. Under srun, one launch a node finds it."""
    node_rank: int | None = None
    """Number of this node, from 0; the launcher of node 0 listens at --coordinator."""
    node_timeout: float = 30.0
    """Seconds without a word after which a node is cut off and all start again together. Default 30."""
    node_wait: float = 600.0
    """Seconds to wait for nodes that are missing, at the start or after a failure. Default 600."""
    slurm: bool = False
    """Start nothing; print a batch script for sbatch: one launcher on each of --nodes (default cluster.nodes)."""
    partition: str | None = None
    """With --slurm: the partition."""
    account: str | None = None
    """With --slurm: the account."""
    time: str | None = None
    """With --slurm: the time limit, such as 24:00:00; the run is saved before it and queued again."""
    kubernetes: bool = False
    """Start nothing; print a JobSet for kubectl apply; needs --image, --claim and --run."""
    image: str | None = None
    """With --kubernetes: the container image."""
    claim: str | None = None
    """With --kubernetes: CLAIM:/PATH, the volume claim that all nodes share and where it is mounted."""
    namespace: str | None = None
    """With --kubernetes: the namespace."""

    example: ClassVar[str] = "jaxtrain launch tiny --processes 2 --devices-per-process 2 --mesh.data 4"

    def __call__(self, overrides: Sequence[str]) -> int:
        """Start the processes and wait for them; the first failure ends the others."""
        from jaxtrain.launch.distributed import under_scheduler
        from jaxtrain.launch.local import launch

        directory = self.run or default_run(self.config)
        self._check_numbers()
        if self.slurm or self.kubernetes:
            print(self._manifest(directory, overrides), end="")
            return 0
        self._refuse_unused(("partition", "account", "time"), "--slurm")
        self._refuse_unused(("image", "claim", "namespace"), "--kubernetes")
        nodes = self._nodes()
        by_hand = self.process_id is not None or (self.coordinator is not None and nodes is None)
        if by_hand or (self.processes is None and under_scheduler()):
            job = (self.coordinator, self.processes, self.process_id)
            verb = Train(self.config, directory, *job, from_=self.from_, from_optimizer=self.from_optimizer)
            return run_verb(verb, overrides)
        if self.processes is None:
            raise ConfigError("launch needs --processes N, the number of processes to start on this machine")
        config = load_config(self.config, overrides)
        command = [sys.executable, "-m", "jaxtrain", "train", self.config, "--run", str(directory)]
        command += ["--from", str(self.from_)] if self.from_ else []
        command += ["--from-optimizer"] if self.from_optimizer else []
        command += [f"--{override}" for override in overrides]
        return launch(
            command, self.processes, self.devices_per_process, grace=self.grace, restarts=self.restarts,
            limits=Limits(config.watchdog.factor, config.watchdog.floors), record=partial(record_in, directory),
            newest_checkpoint=partial(newest_checkpoint, directory), nodes=nodes,
        )  # fmt: skip

    def _check_numbers(self) -> None:
        least = {"processes": 1, "devices_per_process": 1, "nodes": 1, "restarts": 0, "grace": 0}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ConfigError(f"--{name.replace('_', '-')} {value:g}: use a number from {bound}")
        for name in ("partition", "account", "time"):
            value = getattr(self, name)
            if value is not None and not re.fullmatch(r"[\w.,:@+-]+", value):
                raise ConfigError(f"--{name} {value!r} is no name or time that Slurm takes: use one word")

    def _manifest(self, directory: Path, overrides: Sequence[str]) -> str:
        """What --slurm or --kubernetes prints."""
        if self.slurm and self.kubernetes:
            raise ConfigError("--slurm and --kubernetes exclude each other: print one manifest at a time")
        for name in ("process_id", "coordinator", "node_rank"):
            if getattr(self, name) is not None:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{option} goes with processes that are started here: the manifest sets it itself")
        self._refuse_unused(("image", "claim", "namespace") if self.slurm else ("partition", "account", "time"), None)
        cluster = load_config(self.config, overrides).cluster
        options = ["--run", str(directory), "--processes", str(1 if self.processes is None else self.processes)]
        for name in ("devices_per_process", "restarts", "grace", "node_timeout", "node_wait"):
            value = getattr(self, name)
            if value != type(self).__dataclass_fields__[name].default:
                options += [f"--{name.replace('_', '-')}", str(value)]
        options += ["--from", str(self.from_)] if self.from_ else []
        options += ["--from-optimizer"] if self.from_optimizer else []
        python = sys.executable if self.slurm else "python"
        words = manifests.launch_words(python, self.config, options, overrides)
        nodes = next((count for count in (self.nodes, cluster.nodes) if count is not None), 1)
        job = manifests.Job(manifests.job_name(directory.name), words, nodes, cluster.devices_per_node, self.grace)
        if self.slurm:
            return manifests.slurm_script(job, manifests.Slurm(self.partition, self.account, self.time), os.getcwd())
        return manifests.kubernetes_manifest(job, self._kubernetes(directory))

    def _kubernetes(self, directory: Path) -> manifests.Kubernetes:
        claim, colon, mount = (self.claim or "").partition(":")
        if self.image is None or not (claim and colon and mount.startswith("/")):
            raise ConfigError(
                f"--kubernetes needs --image IMAGE and --claim CLAIM:/PATH (given: {self.image}, {self.claim}): the "
                "image with jaxtrain, and the volume claim with the path at which it is mounted"
            )
        if self.run is None or not directory.is_relative_to(mount):
            raise ConfigError(f"--kubernetes needs --run below {mount}, on the shared volume, not {self.run}")
        return manifests.Kubernetes(self.image, claim, mount, self.namespace)

    def _refuse_unused(self, names: Sequence[str], wanted: str | None) -> None:
        for name in names:
            if getattr(self, name) is not None:
                other = wanted or ("--kubernetes" if self.slurm else "--slurm")
                raise ConfigError(f"--{name} {getattr(self, name)} has no effect without {other}")

    def _nodes(self) -> Nodes | None:
        """The nodes of the job, from the options or from srun; None for this machine alone."""
        given = {"--nodes": self.nodes, "--node-rank": self.node_rank, "--coordinator": self.coordinator}
        if self.nodes is None and self.node_rank is None:
            found = slurm_nodes(os.environ) if self.processes is not None and self.process_id is None else None
            if found is None or self.coordinator is not None:
                return None
            count, rank, where = found
        else:
            missing = [name for name, value in given.items() if value is None]
            if missing or self.nodes is None or self.node_rank is None or self.coordinator is None:
                raise ConfigError(
                    f"a job of several nodes needs {' and '.join(missing)} too: --nodes N, --node-rank 0 to N-1, "
                    "--coordinator HOST:PORT of node 0 (the same everywhere), --processes P of this node"
                )
            count, rank, where = self.nodes, self.node_rank, self.coordinator
        return Nodes(count, rank, split_address(where), self.node_timeout, self.node_wait)


def slurm_nodes(env: Mapping[str, str]) -> tuple[int, int, str] | None:
    """(nodes, rank of this node, HOST:PORT) where srun started one task on each of several nodes, else None."""
    hosts, count = env.get("SLURM_STEP_NODELIST"), int(env.get("SLURM_STEP_NUM_NODES") or 1)
    tasks = int(env.get("SLURM_STEP_NUM_TASKS") or 0)
    if hosts is None or count < 2 or tasks != count:
        return None
    # Not the port that the tasks of a step without a launcher use.
    port = 57344 + (int(env.get("SLURM_JOB_ID", 0)) + int(env.get("SLURM_STEP_ID", 0))) % 4096
    return count, int(env["SLURM_NODEID"]), f"{first_host(hosts)}:{port}"


def record_in(directory: Path, kind: str, **values: Any) -> None:
    """Record an event of the supervisor; nothing in a directory that is not a run yet, or is something else."""
    if (directory / "config.yaml").exists():
        record_event(directory, kind, **values)


def newest_checkpoint(directory: Path) -> int:
    """The newest committed step of a run directory, -1 without one, GONE without the directory.

    A save in progress has another name.
    """
    try:
        return max((int(name) for name in os.listdir(directory / "checkpoints") if name.isdecimal()), default=-1)
    except OSError:
        return -1 if directory.exists() else GONE
