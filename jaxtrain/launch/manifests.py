"""Manifests that start a job: a batch script for Slurm, a JobSet for Kubernetes.

Both start one launcher a node, which starts and supervises the node's processes. The scheduler replaces nodes; the
launchers restart processes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

PORT = 23456
"""Port at which the launchers of a JobSet meet; each pod has an address of its own."""
MARGIN = 60
"""Seconds beyond --grace until the scheduler kills."""
USELESS = (2, 3)
"""Exit statuses after which the same command would fail again: a wrong setting, a run that diverged."""
STOPPED = 75
"""Exit status of a run that was saved after a signal."""


@dataclass(frozen=True)
class Job:
    """What a manifest describes.

    command: the words of `jaxtrain launch CONFIG ... --processes P`, without the options of nodes. gpus: GPUs of a
    node, None where none are to be requested. grace: seconds that a stopping run needs.
    """

    name: str
    command: tuple[str, ...]
    nodes: int
    gpus: int | None
    grace: float


@dataclass(frozen=True)
class Slurm:
    """Options of sbatch; None leaves the cluster's default."""

    partition: str | None = None
    account: str | None = None
    time: str | None = None


@dataclass(frozen=True)
class Kubernetes:
    """What a JobSet needs beside the job: the image, a volume claim and its mount path, the namespace."""

    image: str
    claim: str
    mount: str
    namespace: str | None = None


def slurm_script(job: Job, slurm: Slurm, folder: str) -> str:
    """The batch script of a job that is started in `folder`.

    A run that is saved after Slurm's early signal, which comes before the time limit, queues itself again.
    """
    options = {
        "job-name": job.name, "nodes": job.nodes, "ntasks-per-node": 1, "gpus-per-node": job.gpus,
        "partition": slurm.partition, "account": slurm.account, "time": slurm.time,
        "output": "%x-%j.log", "open-mode": "append", "signal": f"TERM@{round(job.grace + MARGIN)}",
    }  # fmt: skip
    lines = [f"#SBATCH --{key}={value}" for key, value in options.items() if value is not None]
    lines += ["#SBATCH --exclusive", "#SBATCH --requeue"]
    notes = []
    if job.gpus is None:
        notes.append("# No GPUs are requested: cluster.devices_per_node is not set.")
    if slurm.time is None:
        notes.append("# No --time: the partition's default limit holds.")
    return "\n".join([
        "#!/bin/bash", *lines, *notes, "",
        f"cd {shlex.quote(folder)}",
        "status=0",
        f"srun --ntasks-per-node=1 --kill-on-bad-exit=1 {shlex.join(job.command)} || status=$?",
        f"# {STOPPED}: saved after a signal, such as the one before the time limit. The job goes on from there.",
        f'if [ "$status" -eq {STOPPED} ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
        'exit "$status"', "",
    ])  # fmt: skip


def job_set(job: Job, kubernetes: Kubernetes) -> dict[str, Any]:
    """The JobSet (jobset.x-k8s.io/v1alpha2) of a job: one pod a node, with the host name of pod 0 as coordinator.

    A pod that is lost starts all again; statuses that no restart fixes end the JobSet.
    """
    name = job.name
    coordinator = f"{name}-nodes-0-0.{name}:{PORT}"
    # $(JOB_COMPLETION_INDEX) is replaced by Kubernetes; $$ is a $ of the command itself.
    words = [word.replace("$", "$$") for word in job.command]
    if job.nodes > 1:
        words += ["--nodes", str(job.nodes), "--node-rank", "$(JOB_COMPLETION_INDEX)", "--coordinator", coordinator]
    container = {
        "name": "jaxtrain",
        "image": kubernetes.image,
        "command": words,
        **({} if job.gpus is None else {"resources": {"limits": {"nvidia.com/gpu": str(job.gpus)}}}),
        "volumeMounts": [
            {"name": "shared", "mountPath": kubernetes.mount},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": round(job.grace + MARGIN),
        "containers": [container],
        # NCCL needs more shared memory between the processes of a node than containers have.
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": kubernetes.claim}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    useless = {"containerName": "jaxtrain", "operator": "In", "values": list(USELESS)}
    template = {
        "parallelism": job.nodes,
        "completions": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": useless}]},
        "template": {"spec": pod},
    }
    not_retried = {"name": "useless", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    namespace = {} if kubernetes.namespace is None else {"namespace": kubernetes.namespace}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, **namespace},
        "spec": {
            "network": {"enableDNSHostnames": True, "subdomain": name},
            "failurePolicy": {"maxRestarts": 10, "rules": [not_retried]},
            "replicatedJobs": [{"name": "nodes", "replicas": 1, "template": {"spec": template}}],
        },
    }


def kubernetes_manifest(job: Job, kubernetes: Kubernetes) -> str:
    """`job_set` as YAML, with what must exist before it is applied."""
    head = (
        f"# Needs the JobSet controller, the image {kubernetes.image} with jaxtrain and its configuration, and the\n"
        f"# volume claim {kubernetes.claim}, which every node can mount at once (ReadWriteMany).\n"
    )
    if job.gpus is None:
        head += "# No GPUs are requested: cluster.devices_per_node is not set.\n"
    return head + yaml.safe_dump(job_set(job, kubernetes), sort_keys=False, width=2**20)


def job_name(run: str) -> str:
    """A name that Slurm and Kubernetes accept, from that of a run directory."""
    return ("jaxtrain-" + re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-"))[:40].rstrip("-")


def launch_words(python: str, config: str, options: Sequence[str], overrides: Sequence[str]) -> tuple[str, ...]:
    """The words of a launch command."""
    return (python, "-m", "jaxtrain", "launch", config, *options, *(f"--{override}" for override in overrides))
