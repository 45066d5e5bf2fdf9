"""The rank of a process from arguments and from the variables of Open MPI and Slurm; nothing is started."""

import pytest

from jaxtrain.config import ConfigError
from jaxtrain.launch.process import (
    ProcessInfo,
    explicit_process,
    first_host,
    local_devices,
    scheduled_process,
    slurm_tasks_here,
    split_address,
    visible_gpus,
)

SRUN = {
    "SLURM_JOB_ID": "200505", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gnode[10,20,25,37]", "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_PROCID": "2", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7", "SLURM_GPUS_ON_NODE": "8",
}  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (("h:1", None, None), ["--processes", "--process-id"]),
        ((None, 2, None), ["--coordinator", "--process-id"]),
        (("h:1", 2, None), ["--process-id"]),
        ((None, 2, 0), ["--coordinator"]),
    ],
)
def test_partial_arguments_name_what_is_missing(arguments, missing):
    with pytest.raises(ConfigError) as error:
        explicit_process(*arguments)
    assert f"without {' and '.join(missing)}:" in str(error.value)


def test_whole_arguments():
    assert explicit_process(None, None, None) is None
    assert explicit_process("node0:123", 4, 0) == ProcessInfo("node0:123", 4, 0)


@pytest.mark.parametrize(("processes", "process_id"), [(2, 2), (2, -1), (0, 0)])
def test_numbers_outside_the_job(processes, process_id):
    with pytest.raises(ConfigError, match="numbered 0 to N-1"):
        explicit_process("h:1", processes, process_id)


@pytest.mark.parametrize("address", ["node0", "node0:", ":12", "node0:99999", "node0:x", "a:b:1:x"])
def test_an_address_without_a_port(address):
    with pytest.raises(ConfigError, match="HOST:PORT"):
        split_address(address)


def test_addresses():
    assert split_address("node0:12345") == ("node0", 12345)
    assert split_address("[fe80::1]:80") == ("fe80::1", 80)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node001", "node001"),
        ("node001,host2", "node001"),
        ("node[001-0015],host2", "node001"),
        ("node[001,007-015],host2", "node001"),
        ("n[1-2]-ib", "n1-ib"),
        ("rack[3-4]n[07,9]", "rack3n07"),
        ("gpu-a-[12-14]", "gpu-a-12"),
    ],
)
def test_first_host(nodes, first):
    assert first_host(nodes) == first


def test_slurm_one_task_per_node():
    assert scheduled_process(SRUN) == ProcessInfo(f"gnode10:{61440 + 200505 % 4096}", 4, 2, None, "slurm")


def test_slurm_one_task_per_gpu():
    env = SRUN | {"SLURM_STEP_NUM_TASKS": "32", "SLURM_STEP_TASKS_PER_NODE": "8(x4)", "SLURM_PROCID": "21",
                  "SLURM_LOCALID": "5"}  # fmt: skip
    process = scheduled_process(env)
    assert (process.processes, process.process_id, process.local_devices) == (32, 21, (5,))


def test_each_step_of_a_job_has_another_port():
    assert scheduled_process(SRUN).coordinator != scheduled_process(SRUN | {"SLURM_STEP_ID": "1"}).coordinator


@pytest.mark.parametrize(
    "env",
    [
        {},
        # A batch script without srun: variables as such a job prints them.
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "1",
         "SLURM_JOB_NODELIST": "gnode[10,20,25,37]"},
        SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
    ],
)  # fmt: skip
def test_alone(env):
    assert scheduled_process(env) is None


def test_open_mpi_comes_before_slurm():
    env = SRUN | {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                  "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}  # fmt: skip
    assert scheduled_process(env) == ProcessInfo(None, 2, 1, tuple(range(8)), "ompi")


@pytest.mark.parametrize(
    ("local_id", "tasks", "visible", "on_node", "own"),
    [
        (0, 1, 8, 8, None),  # one task a node
        (3, 8, 8, 8, (3,)),  # one a GPU
        (1, 2, 8, 8, (4, 5, 6, 7)),
        (1, 4, 4, 8, (1,)),  # half of the node's GPUs, shared
        (2, 8, 1, 8, None),  # bound by --gpus-per-task=1
        (1, 2, 4, 8, None),  # bound by --gpus-per-task=4
        (3, 8, 1, None, None),
        (3, 4, 8, None, (6, 7)),
        (1, 2, 0, None, None),  # CPUs
    ],
)
def test_local_devices(local_id, tasks, visible, on_node, own):
    assert local_devices(local_id, tasks, visible, on_node) == own


@pytest.mark.parametrize(("tasks", "visible"), [(3, 8), (8, 4)])
def test_gpus_that_do_not_split(tasks, visible):
    with pytest.raises(ConfigError, match=f"{tasks} tasks on a node see the same {visible} GPUs"):
        local_devices(0, tasks, visible, visible)


@pytest.mark.parametrize(
    ("text", "node", "tasks"), [("8(x4)", 3, 8), ("4(x2),3", 2, 3), ("4(x2),3", 1, 4), ("5", 0, 5)]
)
def test_tasks_on_this_node(text, node, tasks):
    assert slurm_tasks_here({"SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": str(node)}) == tasks


@pytest.mark.parametrize(
    ("listed", "count"), [("0,1,2", 3), ("", 0), ("-1", 0), ("NoDevFiles", 0), ("GPU-1a2b,GPU-3c", 2), ("0,-1,1", 1)]
)
def test_listed_gpus(listed, count):
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": listed}) == count


def test_device_files_are_counted(tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == 2
