"""Real schedulers on this machine: Slurm runs the printed batch script and queues it again; Open MPI starts processes.

Slurm's own daemons run as two nodes of one machine, which needs root, slurm-wlm and munge.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from faults.runs import Bench, committed, last_step, rows, wait_until

from jaxtrain.cli import main
from jaxtrain.launch.ports import free_port

pytestmark = pytest.mark.prove

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")
# The first node's name must be one that a process can connect to.
CONF = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SwitchType=switch/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ReturnToService=2
KillWait=10
MinJobAge=600
SchedulerParameters=sched_interval=2,bf_interval=2
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 State=UNKNOWN
NodeName={host}-second NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 State=UNKNOWN
PartitionName=main Nodes={host},{host}-second Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Slurm:
    """A running cluster of two nodes."""

    environment: dict[str, str]

    def run(self, *words: str) -> str:
        """Output of one of Slurm's commands."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout.strip()

    def is_ready(self) -> bool:
        """Whether both nodes are idle; the controller may not answer yet."""
        words = ["sinfo", "-h", "-o", "%D %t"]
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout.strip() == "2 idle"

    def state(self, job: str) -> str:
        """State of a job, such as RUNNING."""
        return dict(word.partition("=")[::2] for word in self.run("scontrol", "show", "job", job).split())["JobState"]

    def wait_for(self, job: str, states: tuple[str, ...], limit: float) -> str:
        """The state of a job once it is one of `states`."""
        assert wait_until(lambda: self.state(job) in states, limit), self.run("scontrol", "show", "job", job)
        return self.state(job)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("schedulers"))


@pytest.fixture(scope="module")
def slurm(bench: Bench) -> Iterator[Slurm]:
    missing = [name for name in DAEMONS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and Slurm with munge; missing: {', '.join(missing) or 'root'}")
    folder = bench.folder / "slurm"
    (folder / "state").mkdir(parents=True)
    # munged refuses a socket that others could replace.
    for parent in (folder, *folder.parents):
        if parent.is_relative_to(bench.folder.parent):
            parent.chmod(0o755)
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    host, ports = socket.gethostname(), [free_port("127.0.0.1") for _ in range(3)]
    (folder / "slurm.conf").write_text(CONF.format(folder=folder, ports=ports, host=host))
    environment = {
        **bench.environment(), "SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin",
        "JAX_NUM_CPU_DEVICES": "2", "NPROC": "32",
    }  # fmt: skip
    files = {name: f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")}
    daemons = [
        ["munged", "--foreground", "--force", f"--key-file={folder}/munge.key", f"--socket={folder}/munge.socket",
         *files.values()],
        ["slurmctld", "-D"], ["slurmd", "-D", "-N", host], ["slurmd", "-D", "-N", f"{host}-second"],
    ]  # fmt: skip
    started: list[subprocess.Popen[bytes]] = []
    try:
        for words in daemons:
            log = (folder / f"{len(started)}.out").open("wb")
            started.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log))
            time.sleep(1.0)
        cluster = Slurm(environment)
        assert wait_until(cluster.is_ready, 90), [path.read_text()[-500:] for path in folder.glob("*.out")]
        yield cluster
    finally:
        for process in reversed(started):
            process.terminate()
        for process in reversed(started):
            process.wait(30)


def submit(bench: Bench, slurm: Slurm, run: Path, config: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Print the script of a run on two nodes, submit it, return the job's number."""
    words = ["launch", str(config), "--slurm", "--nodes", "2", "--run", str(run), "--devices-per-process", "1"]
    assert main([*words, "--grace", "30"]) == 0
    script = bench.folder / f"{run.name}.sbatch"
    script.write_text(capsys.readouterr().out)
    return slurm.run("sbatch", "--parsable", "--export=ALL", f"--output={bench.folder}/{run.name}.log", str(script))


@pytest.mark.parametrize("how", ["requeued by hand", "a worker is killed", "the early signal"])
def test_slurm_runs_the_script_on_two_nodes(
    how: str, bench: Bench, slurm: Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    want = bench.reference(2)
    run = bench.folder / how.replace(" ", "-")
    slurm.environment["JAXTRAIN_FAULT"] = json.dumps({"pause": 0.3})
    job = submit(bench, slurm, run, bench.config, capsys)
    log = bench.folder / f"{run.name}.log"
    assert wait_until(lambda: last_step(run) >= 4 and bool(committed(run)), 200), log.read_text()
    if how == "requeued by hand":
        slurm.run("scontrol", "requeue", job)
    elif how == "a worker is killed":
        victims = subprocess.run(["pgrep", "-f", f"jaxtrain train .*{run}"], capture_output=True, text=True, check=True)
        os.kill(int(victims.stdout.split()[0]), 9)
    else:
        # What --signal sends before the time limit: to the steps, not to the script.
        slurm.run("scancel", "--signal=TERM", job)
    assert slurm.wait_for(job, ("COMPLETED", "FAILED", "CANCELLED"), 400) == "COMPLETED", log.read_text()
    assert [row["step"] for row in rows(run)] == [row["step"] for row in want]
    assert [row["loss"] for row in rows(run)] == [row["loss"] for row in want], log.read_text()
    restarts = slurm.run("scontrol", "show", "job", job)
    assert ("Restarts=0" in restarts) == (how == "a worker is killed"), restarts
    assert not subprocess.run(["pgrep", "-f", str(run)], capture_output=True, check=False).stdout


def test_open_mpi_starts_the_processes(bench: Bench) -> None:
    if shutil.which("mpirun") is None:
        pytest.skip("needs Open MPI")
    run = bench.folder / "open-mpi"
    words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", *bench.command(run)]
    job = bench.start(words, JAX_NUM_CPU_DEVICES="1")
    assert job.wait(300) == 0, job.text
    assert "Open MPI started 2 processes" in job.text
    assert [row["loss"] for row in rows(run)] == [row["loss"] for row in bench.reference(2)]
