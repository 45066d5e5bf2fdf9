"""The supervisor and its watchdog: real processes that fail, hang, stop and are signalled."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any, get_args

import pytest

from jaxtrain.cli.launch import newest_checkpoint
from jaxtrain.config.settings import WatchdogConfig
from jaxtrain.launch import generation
from jaxtrain.launch.generation import Generation, Job, Outcome, Place, name_corrupt
from jaxtrain.launch.heartbeat import KEPT, PHASES, Record, Status
from jaxtrain.launch.local import launch
from jaxtrain.launch.restarts import RestartPolicy
from jaxtrain.launch.signals import Signals
from jaxtrain.launch.stragglers import Stragglers
from jaxtrain.launch.watchdog import FIRST_S, FLOOR_S, Limits, RankStatus, explain_stuck, find_culprits, is_stuck
from jaxtrain.launch.worker import Worker

# A trainer of a few lines: steps of 10 ms, phases reported as the loop does.
TRAINER = """
import ctypes, os, signal, sys, time
from jaxtrain.launch.heartbeat import report_phase
rank, generation = int(os.environ["JAXTRAIN_RANK"]), int(os.environ["JAXTRAIN_GENERATION"])
print("port", sys.argv[sys.argv.index("--coordinator") + 1], flush=True)
def steps(first, last, input_s=0.001):
    for step in range(first, last + 1):
        report_phase("input", step)
        time.sleep(input_s)
        report_phase("step", step)
        time.sleep(0.01)
"""


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a script, returns the command that runs it."""
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")

    def write(body: str) -> list[str]:
        path = tmp_path / "trainer.py"
        path.write_text(TRAINER + textwrap.dedent(body))
        return [sys.executable, str(path)]

    return write


class Events(list):
    def __call__(self, kind: str, **values: Any) -> None:
        self.append({"kind": kind, **values})

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self if event["kind"] == kind]


def test_a_killed_rank_is_named_and_the_job_starts_again_at_another_port(trainer: Any, capfd: Any) -> None:
    command = trainer("""
        steps(1, 3)
        if rank == 1 and generation == 1:
            os.kill(os.getpid(), 9)
        steps(4, 6)
        time.sleep(600 if generation == 1 else 0)
    """)
    events = Events()
    begin = time.monotonic()
    assert launch(command, 2, settle=0.5, restarts=2, record=events) == 0
    assert time.monotonic() - begin < 15
    captured = capfd.readouterr()
    assert "process 1 of 2 ended with status 137 (killed by SIGKILL)" in captured.err
    assert "in step 3" in captured.err and "starting again in 1 s" in captured.err
    assert [event["kind"] for event in events] == ["generation", "failure", "restart", "generation"]
    failure = events.of("failure")[0]
    assert (failure["status"], failure["rank"], failure["step"], failure["phase"]) == (137, 1, 3, "step")
    assert failure["host"] and failure["cause"] == "killed by SIGKILL"
    ports = re.findall(r"^port (\S+)", captured.out, re.M)
    assert len(ports) == 2 and ports[0] != ports[1]


def test_the_traceback_of_the_first_failure_comes_first(trainer: Any, capfd: Any) -> None:
    command = trainer("""
        steps(1, 2)
        if rank == 2:
            raise RuntimeError("the disk of rank 2 is full")
        time.sleep(0.3)
        raise ConnectionError("peer 2 went away")
    """)
    assert launch(command, 3) == 1
    message = capfd.readouterr().err
    assert message.index("process 2 of 3 ended with status 1") < message.index("the disk of rank 2 is full")
    assert message.index("the disk of rank 2 is full") < message.index("their last lines:")
    assert message.count("Traceback") == 1


def test_three_identical_failures_without_progress_end_the_job(trainer: Any, capfd: Any) -> None:
    events = Events()
    command = trainer("steps(1, 2); raise ValueError(f'cannot reach 10.0.0.{os.getpid()}')")
    assert launch(command, 1, restarts=9, record=events) == 1
    assert len(events.of("generation")) == len(events.of("failure")) == 3
    assert "the same failure 3 times without progress" in events.of("gave_up")[0]["cause"]
    assert "not started again: the same failure 3 times" in capfd.readouterr().err


@pytest.mark.parametrize("status", [2, 3, 75, 130])
def test_statuses_after_which_a_restart_is_useless(trainer: Any, status: int) -> None:
    events = Events()
    assert launch(trainer(f"sys.exit({status})"), 2, restarts=9, record=events) == status
    assert len(events.of("generation")) == 1 and len(events.of("gave_up")) == 1


def failed(status: int = 13, step: int = -1, line: str = "boom", host: str = "node1") -> Outcome:
    return Outcome(status, f"exit status {status}", 0, host, signature=line, top_step=step)


def test_back_off_doubles_and_progress_resets_it() -> None:
    policy = RestartPolicy(20)
    lines = [chr(ord("a") + i) for i in range(9)]
    assert [policy.after(failed(line=line)).wait for line in lines] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert policy.after(failed(step=5, line="a")).wait == 1
    assert policy.after(failed(step=5, line="b")).wait == 2
    checkpoints = [-1]
    policy = RestartPolicy(20, lambda: checkpoints[-1])
    for newest in (-1, 10, 20, 30):
        checkpoints.append(newest)
        decision = policy.after(failed())
        assert decision.restart and decision.wait == 1.0


def test_the_budget_counts_restarts_without_progress() -> None:
    policy = RestartPolicy(2)
    assert [policy.after(failed(line=line)).restart for line in "abc"] == [True, True, False]
    policy = RestartPolicy(2)
    assert all(policy.after(failed(step=step)).restart for step in range(20))
    assert not RestartPolicy(0).after(failed()).restart


def test_a_run_directory_that_is_gone_is_not_begun_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "8").mkdir(parents=True)
    policy = RestartPolicy(20, lambda: newest_checkpoint(run))
    assert policy.after(failed(74, step=9)).restart
    shutil.rmtree(run)
    decision = policy.after(failed(74, step=11))
    assert not decision.restart and "the run directory is gone" in decision.why
    # Before the first step there is nothing to lose.
    assert RestartPolicy(20, lambda: newest_checkpoint(run)).after(failed(74)).restart


def test_a_device_that_computes_wrong_bits_twice_ends_the_job() -> None:
    def corrupt(step: int, *where: str) -> Outcome:
        lines = [f"  params/embed/tokens, computed twice, differs on {text}" for text in where]
        return name_corrupt(failed(4, step=step), ["step 5 is not saved", *lines, "the same command resumes"])

    policy = RestartPolicy(20)
    first = corrupt(10, "device 5 of process 1 (node1 pid 77)", "device 5 of process 1 (node1 pid 77)")
    assert (first.rank, first.host, first.cause) == (1, "node1", "wrong bits on device 5 of process 1 (node1)")
    assert policy.after(first).restart
    assert policy.after(corrupt(20, "device 9 of process 2 (node2 pid 5)")).restart
    # Without a majority, all holders are named, and none is blamed.
    several = "device 1 of process 0 (node0 pid 3), device 5 of process 1 (node1 pid 78)"
    assert corrupt(30, several).cause == "exit status 4"
    assert policy.after(corrupt(30, several)).restart and policy.after(corrupt(40, several)).restart
    decision = policy.after(corrupt(50, "device 5 of process 1 (node1 pid 99)"))
    assert not decision.restart and "device 5 of process 1 (node1) for the second time" in decision.why


def test_a_process_that_cannot_be_killed_is_reported(trainer: Any, monkeypatch: Any, capfd: Any) -> None:
    def ignored(worker: Worker, number: int) -> None:
        pass

    # As a process that waits in the kernel does.
    monkeypatch.setattr(Worker, "signal_group", ignored)
    monkeypatch.setattr(generation, "UNKILLABLE_S", 0.5)
    events = Events()
    command = trainer("print('pid', os.getpid(), flush=True); sys.exit(13) if rank == 0 else time.sleep(30)")
    assert launch(command, 2, settle=0.2, restarts=5, record=events) == 13
    assert "process 1 on" in events.of("gave_up")[0]["cause"]
    os.kill(int(re.findall(r"^\[1\] pid (\d+)", capfd.readouterr().out, re.M)[0]), signal.SIGKILL)


HANGS = {
    # The interpreter's lock is held: no Python runs in any thread of the process.
    "native": ("def hang_here(): ctypes.PyDLL(None).pause()", "step", "rank 1"),
    "input": ("def hang_here(): report_phase('input', 8); time.sleep(600)", "input", "rank 1"),
    "stopped": ("def hang_here(): os.kill(os.getpid(), signal.SIGSTOP)", "step", "held by a signal"),
}


@pytest.mark.parametrize(
    "kind", ["native", pytest.param("input", marks=pytest.mark.prove), pytest.param("stopped", marks=pytest.mark.prove)]
)
def test_a_stuck_rank_is_named_with_its_stack_and_the_job_starts_again(trainer: Any, kind: str, capfd: Any) -> None:
    body, phase, words = HANGS[kind]
    command = trainer(
        body
        + """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
steps(1, 7)
if generation == 1:
    if rank == 1:
        hang_here()
    report_phase("input", 8)
    report_phase("step", 8)
    time.sleep(600)
"""
    )
    events = Events()
    begin = time.monotonic()
    limits = Limits(floors={"step": 1.0, "input": 1.0})
    assert launch(command, 2, settle=0.5, restarts=1, limits=limits, record=events) == 0
    assert time.monotonic() - begin < 12
    failure = events.of("failure")[0]
    assert (failure["status"], failure["cause"], failure["rank"], failure["phase"]) == (14, "stuck", 1, phase)
    assert failure["step"] == (8 if kind == "input" else 7) and 1.0 <= failure["since_s"] < 3.0
    captured = capfd.readouterr()
    assert words in captured.err and "the others wait in step 8" in captured.err
    assert ("hang_here" in captured.out) == (kind != "stopped")


def test_the_limit_follows_the_own_times_of_a_rank() -> None:
    limits = Limits()
    few = Status("step", 3, 0.0, 1, {"step": (100.0,) * 4})
    assert limits.seconds(few) == FIRST_S["step"]
    assert limits.seconds(Status("step", 9, 0.0, 1, {"step": (0.1,) * 9})) == FLOOR_S["step"]
    assert limits.seconds(Status("step", 9, 0.0, 1, {"step": (100.0,) * 8 + (150.0,)})) == 300.0
    assert Limits(None).seconds(few) == float("inf")
    assert Limits(3.0, {"step": 10.0}).seconds(Status("step", 9, 0.0, 1, {"step": (5.0,) * 9})) == 15.0
    assert set(FIRST_S) == set(FLOOR_S) == set(PHASES)
    assert set(get_args(get_args(WatchdogConfig.model_fields["floors"].annotation)[0])) == set(PHASES)


def rank(number: int, phase: str, step: int | None, seconds: float = 70.0, held: float | None = None) -> RankStatus:
    return RankStatus(number, f"node{number // 2}", phase, step, seconds, 60.0, held)


def test_the_rank_behind_the_others_is_the_culprit() -> None:
    waiting = [rank(i, "step", 12) for i in (0, 1, 2)]
    text = explain_stuck([*waiting, rank(3, "input", 12)])
    assert text == "rank 3 (node1) is in input of step 12 since 70 s (limit 60 s); the others wait in step 12"
    assert [status.rank for status in find_culprits([*waiting, rank(3, "evaluation", 11)])] == [3]
    assert [status.rank for status in find_culprits([*waiting, rank(3, "data", None)])] == [3]
    assert [status.rank for status in find_culprits([*waiting, rank(3, "step", 12, held=1.0)])] == [3]
    assert "all ranks are stuck, none is behind" in explain_stuck(waiting)


def test_the_limit_of_the_rank_that_the_others_wait_for_counts() -> None:
    waiting = [rank(i, "barrier", None) for i in (0, 1, 2)]
    assert not is_stuck([*waiting, rank(3, "data", None, 59.0)])
    assert is_stuck([*waiting, rank(3, "data", None, 61.0)]) and is_stuck(waiting)
    assert not is_stuck([rank(0, "step", 12), rank(3, "checkpoint", 11, 59.0)])
    assert not is_stuck([rank(0, "step", 12, 5.0), rank(3, "step", 12, 5.0)])
    # A signal holds it within the limit of its phase.
    assert not is_stuck([rank(0, "step", 12), rank(3, "checkpoint", 12, 59.0, held=59.0)])
    assert is_stuck([rank(0, "step", 12, 5.0), rank(3, "checkpoint", 12, 59.0, held=61.0)])


def test_a_record_keeps_the_newest_durations_and_is_read_by_others() -> None:
    record = Record.create()
    assert record.read() is None
    for step in range(KEPT + 10):
        record.report("input", step)
        record.report("step", step)
    other = Record(os.dup(record.fd))
    status = other.read()
    assert status is not None and (status.phase, status.step, status.pid) == ("step", KEPT + 9, os.getpid())
    assert len(status.durations["input"]) == len(status.durations["step"]) == KEPT
    assert all(0 <= seconds < 1 for seconds in status.durations["step"]) and not status.durations["data"]
    assert time.monotonic() - status.since < 5
    record.close()
    other.close()


def test_a_rank_with_slow_input_is_named_once(trainer: Any, capfd: Any) -> None:
    events = Events()
    stragglers = Stragglers(events, every=0.2)
    command = trainer("steps(1, 60, 0.03 if rank == 2 else 0.002)")
    job = Job(command, [dict(os.environ)] * 3)
    assert Generation(job, Place("127.0.0.1:1", 3), Signals(), on_watch=stragglers.look).run().status == 0
    assert [event["rank"] for event in events.of("straggler")] == [2]
    assert 0.02 < events[0]["cost_s"] < 0.05 and "rank 2 makes the others wait" in capfd.readouterr().out


LAUNCHER = """
import sys
from jaxtrain.launch.local import launch
sys.exit(launch(sys.argv[2:], 2, restarts=5, grace=float(sys.argv[1])))
"""
SAVES = """
def stop(number, frame):
    print("saving after", signal.Signals(number).name, flush=True)
    signal.signal(number, lambda *_: os._exit(130))
    time.sleep({save_s} * (1 + rank))
    os._exit(75)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, stop)
print("ready", flush=True)
while True:
    steps(1, 100)
"""


def started(command: list[str], grace: float = 60.0) -> subprocess.Popen[str]:
    """A launcher whose two processes are ready."""
    words = [sys.executable, "-c", LAUNCHER, str(grace), *command]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    ready = 0
    while ready < 2:
        ready += "ready" in process.stdout.readline()
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_passed_on_once_and_nothing_starts_again(trainer: Any, number: signal.Signals) -> None:
    process = started(trainer(SAVES.format(save_s=0.4)))
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 75, output
    assert output.count(f"saving after {number.name}") == 2 and "starting again" not in output


def test_the_grace_ends_and_a_second_signal_ends_at_once(trainer: Any) -> None:
    command = trainer(SAVES.format(save_s=100))
    process = started(command, grace=0.5)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 137 and "starting again" not in output, output
    process = started(command)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode in (130, 137)


def test_a_signal_during_the_back_off_ends_the_job(trainer: Any) -> None:
    process = started(trainer("print('ready', flush=True); sys.exit(13) if rank == 0 else time.sleep(600)"))
    assert process.stdout is not None
    while "starting again" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 75 and "stopped by a signal" in output


def test_the_page_has_the_limits() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "clusters.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| `(\w+)`.*\| ([\d,]+) \| ([\d,]+) \|$", page, re.M)
    assert {phase: (floor, first) for phase, floor, first in found} == {
        phase: (f"{FLOOR_S[phase]:,.0f}", f"{FIRST_S[phase]:,.0f}") for phase in PHASES
    }
