"""The rank of a process from arguments and from the variables of launchers; nothing is started."""

import pytest

from jaxtrain.config import ConfigError
from jaxtrain.launch.detect import (
    describe_process,
    detected_process,
    find_process,
    first_host,
    note_alone,
    slurm_gpus,
    slurm_tasks_here,
)
from jaxtrain.launch.process import ProcessInfo, explicit_process, local_devices, split_address, visible_gpus

PARENT = 5000

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
    assert detected_process(SRUN, PARENT) == ProcessInfo(f"gnode10:{61440 + 200505 % 4096}", 4, 2, None, "Slurm")


def test_slurm_one_task_per_gpu():
    env = SRUN | {"SLURM_STEP_NUM_TASKS": "32", "SLURM_STEP_TASKS_PER_NODE": "8(x4)", "SLURM_PROCID": "21",
                  "SLURM_LOCALID": "5"}  # fmt: skip
    process = detected_process(env, PARENT)
    assert (process.processes, process.process_id, process.local_devices) == (32, 21, (5,))


def test_each_step_of_a_job_has_another_port():
    assert (
        detected_process(SRUN, PARENT).coordinator
        != detected_process(SRUN | {"SLURM_STEP_ID": "1"}, PARENT).coordinator
    )


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
    assert detected_process(env, PARENT) is None


def test_open_mpi_comes_before_slurm():
    env = SRUN | {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                  "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "SLURM_JOB_NODELIST": "gnode[10,20]"}  # fmt: skip
    found = detected_process(env, PARENT)
    assert (found.process_id, found.processes, found.local_devices, found.found_by) == (1, 2, None, "Open MPI")


OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "1316159489",
    "OMPI_MCA_orte_hnp_uri": "1316159488.0;tcp://192.0.2.2,10.0.0.2:48875;tcp6://[fd00::2]:45451",
}  # fmt: skip
OPEN_MPI_5 = {**OPEN_MPI_4, "PMIX_NAMESPACE": "prterun-gpu-node-7-1234@1", "OMPI_MCA_orte_hnp_uri": ""}
HYDRA = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
TORCHRUN = {
    "WORLD_SIZE": "16", "RANK": "9", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none", "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
}  # fmt: skip
JOBSET = {
    "JAX_NUM_PROCESSES": "8", "JOB_COMPLETION_INDEX": "5", "JAX_COORDINATOR_ADDRESS": "run-train-0-0.run:61440",
}  # fmt: skip


@pytest.mark.parametrize(
    ("env", "coordinator", "rank", "processes", "devices"),
    [
        (OPEN_MPI_4, "192.0.2.2:62342", 3, 4, None),
        (OPEN_MPI_5, "gpu-node-7:62107", 3, 4, None),
        (OPEN_MPI_4 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "127.0.0.1:62342", 3, 4, None),
        (OPEN_MPI_5 | {"SLURM_JOB_NODELIST": "n[3-4]", "JAX_COORDINATOR_PORT": "99"}, "n3:99", 3, 4, None),
        (OPEN_MPI_5 | {"JAX_COORDINATOR_ADDRESS": "h:1"}, "h:1", 3, 4, None),
        (HYDRA, f"127.0.0.1:{61440 + 5000 % 4096}", 1, 2, None),
        (HYDRA | {"CUDA_VISIBLE_DEVICES": "0,1"}, f"127.0.0.1:{61440 + 5000 % 4096}", 1, 2, (1,)),
        (HYDRA | {"PMI_SIZE": "4", "SLURM_JOB_NODELIST": "n[3-4]", "SLURM_JOB_ID": "7"}, "n3:61447", 1, 4, None),
        # srun of a PMI-2 job also sets PMI_RANK: its own variables count.
        (SRUN | {"PMI_RANK": "2", "PMI_SIZE": "4"}, f"gnode10:{61440 + 200505 % 4096}", 2, 4, None),
        (TORCHRUN, "node0:29501", 9, 16, (1,)),
        # torchrun in a task of srun: the task counts nodes.
        (SRUN | TORCHRUN, "node0:29501", 9, 16, (1,)),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "::1", "MASTER_PORT": "5"}, "[::1]:6", 0, 2, None),
        (JOBSET, "run-train-0-0.run:61440", 5, 8, None),
        (JOBSET | {"JAX_PROCESS_ID": "6"}, "run-train-0-0.run:61440", 6, 8, None),
        (
            {"NUM_PROCESSES": "4", "PROCESS_ID": "3", "COORDINATOR_ADDRESS": "job-0", "COORDINATOR_PORT": "6666"},
            "job-0:6666", 3, 4, None,
        ),
    ],
)  # fmt: skip
def test_launchers(env, coordinator, rank, processes, devices):
    found = detected_process({"CUDA_VISIBLE_DEVICES": "", **env}, PARENT)
    assert (found.coordinator, found.process_id, found.processes) == (coordinator, rank, processes)
    assert found.local_devices == devices and found.found_by


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "8(x4)", "SLURM_LOCALID": ""}, "SLURM_LOCALID is not set"),
        (SRUN | {"SLURM_PROCID": "two"}, "SLURM_PROCID='two' is not a number"),
        (SRUN | {"SLURM_PROCID": "4"}, "the rank 4 of 4"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "1(4)"}, "SLURM_STEP_TASKS_PER_NODE='1\\(4\\)' is not a list"),
        (SRUN | {"SLURM_GPUS_ON_NODE": "many"}, "SLURM_GPUS_ON_NODE='many' is not a number of GPUs"),
        (SRUN | {"SLURM_JOB_ID": "x7"}, "SLURM_JOB_ID='x7' is not a number"),
        (SRUN | {"JAX_COORDINATOR_PORT": "http"}, "JAX_COORDINATOR_PORT='http' is not a number"),
        (OPEN_MPI_4 | {"OMPI_COMM_WORLD_RANK": ""}, "OMPI_COMM_WORLD_RANK is not set"),
        (OPEN_MPI_4 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1.5"}, "OMPI_COMM_WORLD_LOCAL_SIZE='1.5' is not a number"),
        (OPEN_MPI_5 | {"PMIX_NAMESPACE": "7"}, "Open MPI started this process as 3 of 4, but no variable says where"),
        (HYDRA | {"PMI_SIZE": "4"}, "PMI_SIZE.* started this process as 1 of 4, but no variable says where"),
        (TORCHRUN | {"MASTER_ADDR": ""}, "torchrun started this process as 9 of 16, but no variable says where"),
        ({"WORLD_SIZE": "2", "RANK": ""}, "RANK is not set"),
        ({"JOB_COMPLETION_INDEX": "3"}, "JOB_COMPLETION_INDEX=3: this pod is one of several"),
        (JOBSET | {"JAX_COORDINATOR_ADDRESS": "here"}, "'here' is not HOST:PORT"),
    ],
)
def test_variables_that_do_not_suffice_are_named(env, words):
    with pytest.raises(ConfigError, match=words):
        detected_process(env, PARENT)


@pytest.mark.parametrize(
    ("text", "gpus"),
    [("8", 8), ("h100:8", 8), ("gpu:h100:8", 8), ("a100:4,h100:2", 6), ("gpu:a100:4(IDX:0-3)", 4), (None, None)],
)
def test_gpus_of_a_node(text, gpus):
    assert slurm_gpus({"SLURM_GPUS_ON_NODE": text} if text else {}) == gpus
    assert slurm_gpus(SRUN) == 8


def test_an_address_alone_is_where_the_launcher_says_nothing():
    assert find_process("h:1", None, None, HYDRA | {"PMI_SIZE": "4"}, PARENT).coordinator == "h:1"
    assert find_process("h:1", 2, 0, HYDRA, PARENT) == ProcessInfo("h:1", 2, 0)
    with pytest.raises(ConfigError, match="without --processes and --process-id"):
        find_process("h:1", None, None, {}, PARENT)


def test_what_is_printed():
    line = describe_process(detected_process(TORCHRUN, PARENT), TORCHRUN)
    assert line == "torchrun started 16 processes; coordinator node0:29501; this one uses GPU 1 of 8"
    assert "all 8 GPUs" in describe_process(detected_process(SRUN, PARENT), SRUN)
    assert "was not started by srun" in note_alone({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"})
    assert "indexed Job" in note_alone({"JOB_COMPLETION_INDEX": "0"})
    assert note_alone({}) is None and note_alone({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1"}) is None


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
