"""Real processes on this machine: joining, collectives, failures, signals."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest

from jaxtrain.config import ConfigError
from jaxtrain.launch.local import launch, worker_environments

JOIN = """
import os, sys, time
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
rank, count = int(words["--process-id"]), int(words["--processes"])
from jaxtrain.launch.coordination import wait_for_all
from jaxtrain.launch.distributed import guard, join
"""

COLLECTIVE = """
join(words["--coordinator"], count, rank)
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((jax.device_count(),), ("data",))
x = jax.jit(lambda: jnp.arange(1, jax.device_count() + 1), out_shardings=NamedSharding(mesh, P("data")))()
total = jax.shard_map(lambda v: jax.lax.psum(v, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
total = jax.jit(total).lower(x).compile()
wait_for_all("compiled")
wait_for_all("compiled")
print(f"rank {rank}: sum {int(total(x)[0])} over {jax.device_count()}, {jax.local_device_count()} here", flush=True)
"""


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Writes a script, returns the command that runs it."""
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")

    def write(body, head=JOIN):
        path = tmp_path / "worker.py"
        path.write_text(head + textwrap.dedent(body))
        return [sys.executable, str(path)]

    return write


def gone(pid):
    """Whether a process has ended (a zombie has)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def eventually(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def test_two_processes_of_two_devices_sum_over_four(worker, capfd):
    assert launch(worker(COLLECTIVE), 2, devices_per_process=2) == 0
    lines = capfd.readouterr().out.splitlines()
    assert "rank 0: sum 10 over 4, 2 here" in lines
    assert "[1] rank 1: sum 10 over 4, 2 here" in lines


def test_a_crash_ends_the_other_processes(worker, capfd):
    command = worker(
        COLLECTIVE
        + """
def main():
    if rank == 1:
        raise RuntimeError("the disk is full")
    time.sleep(600)
sys.exit(guard(main))
"""
    )
    begin = time.monotonic()
    assert launch(command, 2, devices_per_process=1, settle=1.0) == 13
    assert time.monotonic() - begin < 60
    captured = capfd.readouterr()
    assert "[1] RuntimeError: the disk is full" in captured.out
    assert "process 1 of 2 ended with status 13" in captured.err and "the disk is full" in captured.err


def test_a_config_error_of_all_is_status_2(worker, capfd):
    command = worker(
        COLLECTIVE
        + """
from jaxtrain.config import ConfigError
def main():
    raise ConfigError("data.sources is empty: name a folder")
sys.exit(guard(main))
"""
    )
    assert launch(command, 2, devices_per_process=1, settle=1.0) == 2
    captured = capfd.readouterr()
    assert "jaxtrain: data.sources is empty: name a folder" in captured.out
    assert "Traceback" not in captured.out


def test_status_and_tail_of_the_first_failure(worker, capfd):
    command = worker(
        """
print(f"starting {rank}", flush=True)
open(f"{sys.argv[0]}.{rank}", "w").close()
if rank == 2:
    while not all(os.path.exists(f"{sys.argv[0]}.{other}") for other in (0, 1)):
        time.sleep(0.05)
    time.sleep(0.5)
    os.kill(os.getpid(), 9)
time.sleep(600)
"""
    )
    assert launch(command, 3, settle=1.0) == 128 + 9
    captured = capfd.readouterr()
    assert "process 2 of 3 ended with status 137" in captured.err and "  starting 2" in captured.err
    assert {"starting 0", "[1] starting 1", "[2] starting 2"} <= set(captured.out.splitlines())


STUBBORN = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
if child == 0:
    time.sleep(600)
print("pid", os.getpid(), flush=True)
print("pid", child, flush=True)
"""


def test_a_process_that_ignores_sigterm_is_killed_with_its_children(worker, capfd):
    command = worker(
        STUBBORN
        + """
time.sleep(1 if rank == 0 else 600)
sys.exit(5 if rank == 0 else 0)
"""
    )
    begin = time.monotonic()
    assert launch(command, 2, settle=0.5) == 5
    assert time.monotonic() - begin < 20
    pids = [int(line.split()[-1]) for line in capfd.readouterr().out.splitlines() if " pid " in f" {line}"]
    assert len(pids) == 4 and all(eventually(lambda pid=pid: gone(pid)) for pid in pids)


LAUNCHER = """
import sys
from jaxtrain.launch.local import launch
sys.exit(launch(sys.argv[1:], 2))
"""


def start_launcher(command):
    """A launcher in its own process and the pids that its two workers print."""
    process = subprocess.Popen([sys.executable, "-c", LAUNCHER, *command], stdout=subprocess.PIPE, text=True)
    pids = []
    while len(pids) < 2:
        words = process.stdout.readline().split()
        if "pid" in words:
            pids.append(int(words[-1]))
    return process, pids


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal")
def test_no_process_survives_a_killed_launcher(worker):
    process, pids = start_launcher(worker('print("pid", os.getpid(), flush=True); time.sleep(600)'))
    process.kill()
    process.wait()
    assert all(eventually(lambda pid=pid: gone(pid)) for pid in pids)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_forwarded_and_processes_finish(worker, signum):
    command = worker(
        """
import signal
def save(signum, frame):
    sys.stdout.write(f"saved {signum}\\n")
    sys.stdout.flush()
    sys.exit(0)
signal.signal(signal.SIGINT, save)
signal.signal(signal.SIGTERM, save)
print("pid", os.getpid(), flush=True)
while True:
    time.sleep(0.1)
"""
    )
    process, pids = start_launcher(command)
    process.send_signal(signum)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert sorted(output.splitlines()) == sorted([f"saved {int(signum)}", f"[1] saved {int(signum)}"])
    assert all(gone(pid) for pid in pids)


def join_alone(rank, port, timeout=2, count=2):
    code = f"from jaxtrain.launch.distributed import join; join('127.0.0.1:{port}', {count}, {rank}, timeout={timeout})"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd()}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env)


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_an_absent_coordinator_is_named(port):
    done = join_alone(1, port)
    assert f"ConfigError: nothing answers at the coordinator 127.0.0.1:{port}" in done.stderr


def test_absent_processes_end_the_coordinator_with_status_2(port):
    done = join_alone(0, port)
    assert done.returncode == 2
    assert f"process 0 waited 2 s at 127.0.0.1:{port} for all 2 processes" in done.stderr


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = join_alone(0, taken.getsockname()[1])
        assert f"process 0 cannot listen at 127.0.0.1:{taken.getsockname()[1]}" in done.stderr


LISTEN = """
import sys
from jaxtrain.launch.distributed import join
from jaxtrain.launch.coordination import exchange
join()
print("ranks", exchange("ranks", int(sys.argv[1])), flush=True)
port = int(sys.argv[2]) + 1
for name in ("tcp", "tcp6"):
    for line in open(f"/proc/net/{name}").readlines()[1:]:
        address, state = line.split()[1], line.split()[3]
        if state == "0A" and int(address.split(":")[1], 16) == port and sys.argv[1] == "0":
            print("listens at", address, flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/net")
def test_processes_of_torchrun_join_and_the_coordinator_listens_where_the_variables_say(port):
    def start(rank):
        env = os.environ | {
            "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.getcwd(), "WORLD_SIZE": "2", "RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        command = [sys.executable, "-c", LISTEN, str(rank), str(port)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)

    outputs = [process.communicate(timeout=60)[0] for process in [start(0), start(1)]]
    assert all("ranks [0, 1]" in output for output in outputs), outputs
    first = f"jaxtrain: a launcher that sets RANK and WORLD_SIZE started 2 processes; coordinator 127.0.0.1:{port + 1}"
    assert first in outputs[0] and "started 2 processes" not in outputs[1]
    # 127.0.0.1 in the kernel's byte order, also as a mapped address of IPv6, and no other one.
    listens = [line.split()[-1].split(":")[0] for line in outputs[0].splitlines() if "listens" in line]
    assert [address[-8:] for address in listens] == ["0100007F"], outputs[0]


def test_cpu_devices_and_gpu_slices():
    cpu = list(worker_environments(2, 4, {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "0,1"}))
    assert [env["JAX_NUM_CPU_DEVICES"] for env in cpu] == ["4", "4"]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in cpu] == ["0,1", "0,1"]
    gpu = list(worker_environments(2, 2, {"CUDA_VISIBLE_DEVICES": "1,3,5,7"}))
    assert [env["CUDA_VISIBLE_DEVICES"] for env in gpu] == ["1,3", "5,7"]
    even = list(worker_environments(2, None, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}))
    assert [env["CUDA_VISIBLE_DEVICES"] for env in even] == ["0,1", "2,3"]
    alone = list(worker_environments(1, None, {"CUDA_VISIBLE_DEVICES": "", "JAX_NUM_CPU_DEVICES": "8"}))
    assert alone[0]["JAX_NUM_CPU_DEVICES"] == "8"


@pytest.mark.parametrize(
    ("processes", "devices", "words"),
    [
        (0, 1, "use positive numbers"),
        (2, 0, "use positive numbers"),
        (2, 2, "needs 4, this machine shows 3"),
        (4, None, "shows 3"),
    ],
)
def test_impossible_numbers(processes, devices, words):
    with pytest.raises(ConfigError, match=words):
        list(worker_environments(processes, devices, {"CUDA_VISIBLE_DEVICES": "0,1,2"}))
