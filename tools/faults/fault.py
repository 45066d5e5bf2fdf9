"""A fault as data, and the one procedure that injects it and measures what it cost."""

from __future__ import annotations

import json
import re
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from faults.job import Job
from faults.processes import command_of, marked, ports_of
from faults.runs import LIMIT, Bench, Watch, kill_marked, last_step, read_events, rows, wait_until


@dataclass
class Scene:
    """A fault while it happens: its run directory, its command, the time of the injection."""

    bench: Bench
    run: Path
    job: Job | None = None
    injected: float | None = None
    notes: list[str] = field(default_factory=list)
    memory_kib: int = 0
    kept: dict[str, bytes] = field(default_factory=dict)
    undo: list[Callable[[], None]] = field(default_factory=list)
    others: list[Job] = field(default_factory=list)


Action = Callable[[Scene], None]


class NotRunError(Exception):
    """This machine cannot inject the fault; the text is the reason."""


@dataclass(frozen=True)
class Fault:
    """What is done to a run, and what must follow."""

    name: str
    how: str
    processes: int = 1
    supervise: bool = False
    """Use `launch` for one process too."""
    begin: str = "fresh"
    """What the directory holds before the command: 'fresh' nothing, 'interrupted' a run killed after step 10."""
    config: Mapping[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    plant: Mapping[str, Any] = field(default_factory=dict)
    """The fault of plant/sitecustomize.py."""
    shim: Mapping[str, str] = field(default_factory=dict)
    """The fault of shim.c; 'FAULT_PATH' is below the run directory."""
    before: Action | None = None
    when: Callable[[Scene], object] | None = None
    do: Action | None = None
    after: Action | None = None
    status: tuple[int, ...] = (0,)
    says: str = ""
    """What the first command prints."""
    detect: str = ""
    """The line by which the fault was noticed; default: `says`, else the supervisor's event, else the end."""
    rerun: bool = True
    """Type the same command again if it did not end with status 0."""
    rerun_prefix: Callable[[Scene], list[str]] | None = None
    """Words before the second command."""
    rerun_processes: int | None = None
    """Another number of processes for the second command."""
    equal: bool = True
    """Whether the rows are those of the unbroken run in the end."""
    tolerance: float = 0.0
    """Relative difference of losses on another mesh; 0: equal bit for bit."""
    older: bool = False
    """Whether the fault destroys the newest checkpoint, so that more than the last interval is lost."""
    limit: float = LIMIT
    prefix: tuple[str, ...] = ()
    """Words before the command."""
    by_hand: tuple[tuple[str, ...], ...] = ()
    """The processes are started one by one with --coordinator; the further arguments of each."""
    paths: tuple[str, ...] = ()
    """Folders before PYTHONPATH: of all commands, or by_hand of the last process."""
    check: Callable[[Scene], str | None] | None = None
    """What is wrong in the end, beyond all this."""


@dataclass
class Outcome:
    """What one fault cost; None where the measure does not apply."""

    name: str
    group: str
    how: str
    result: str = "passed"
    problems: list[str] = field(default_factory=list)
    status: int | None = None
    message: str = ""
    detected_s: float | None = None
    steps_lost: int | None = None
    first_step_s: float | None = None
    equal: bool | None = None
    seconds: float = 0.0
    restart: str = ""
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The outcome as JSON."""
        return asdict(self)


def inject(bench: Bench, group: str, fault: Fault) -> Outcome:
    """Inject one fault and measure; never raises, never leaves a process."""
    begin, outcome = time.time(), Outcome(fault.name, group, fault.how)
    scene = Scene(bench, bench.folder / "runs" / re.sub(r"\W+", "-", fault.name))
    scene.run.parent.mkdir(exist_ok=True)
    for old in scene.run.parent.glob(f"{scene.run.name}*"):
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    try:
        _inject(scene, fault, outcome)
    except NotRunError as reason:
        outcome.result, outcome.message = "not run", str(reason)
    except Exception as error:
        outcome.problems.append(f"{type(error).__name__}: {error}")
    finally:
        for job in [*scene.others, *([scene.job] if scene.job else [])]:
            if job.process.poll() is None:
                job.kill()
    outcome.problems += _left_behind(scene)
    for action in reversed(scene.undo):
        action()
    outcome.notes += scene.notes
    if outcome.problems:
        outcome.result = "failed"
    outcome.seconds = round(time.time() - begin, 1)
    return outcome


def _inject(scene: Scene, fault: Fault, outcome: Outcome) -> None:
    bench, run = scene.bench, scene.run
    config = bench.write_config(f"{run.name}.yaml", **fault.config) if fault.config else bench.config
    overrides = [fill(scene, word) for word in fault.overrides]
    want = bench.reference(fault.processes, config if fault.config else None) if fault.equal else None
    env = _planted(scene, fault)
    if fault.begin == "interrupted":
        bench.copy_interrupted(f"runs/{run.name}", fault.processes)
    if fault.before:
        fault.before(scene)
    watch = Watch(run)
    try:
        command = bench.command(run, fault.processes, overrides, config, fault.supervise)
        command, job = _start(scene, fault, command, config, env)
        if fault.when and not wait_until(lambda: fault.when(scene), fault.limit, job):  # type: ignore[misc]
            outcome.problems.append("the moment of the injection never came")
        if fault.do:
            scene.injected = time.time()
            fault.do(scene)
        status = job.wait(fault.limit)
        for other in scene.others if fault.by_hand else ():
            if (code := other.wait(fault.limit)) not in fault.status:
                outcome.problems.append(f"another process of the job ended with {code}: {_message(other)}")
        _judge_first(scene, fault, outcome, job, status)
        last = job
        if status and fault.rerun:
            if fault.rerun_processes:
                command = bench.command(run, fault.rerun_processes, overrides, config)
            words = fault.rerun_prefix(scene) if fault.rerun_prefix else []
            last = _rerun(scene, fault, outcome, [*words, *command])
        _measure(scene, fault, outcome, watch, job, last)
    finally:
        watch.close()
    if want is not None:
        outcome.equal = same_rows(rows(run), want, fault.tolerance)
        if not outcome.equal:
            outcome.problems.append("the rows of metrics.jsonl are not those of the unbroken run")
    if fault.check and (problem := fault.check(scene)):
        outcome.problems.append(problem)


def _start(scene: Scene, fault: Fault, command: list[str], config: Path, env: dict[str, str]) -> tuple[list[str], Job]:
    """Start the command, or one process after another by hand; the command to type again, and the last process."""
    bench, changed = scene.bench, {}
    if fault.paths:
        changed = {
            "PYTHONPATH": ":".join([*(fill(scene, path) for path in fault.paths), bench.environment()["PYTHONPATH"]])
        }
    if not fault.by_hand:
        scene.job = bench.start([*fault.prefix, *command], **env, **changed)
        return command, scene.job
    address, count = f"127.0.0.1:{free_port()}", len(fault.by_hand)
    for rank, extra in enumerate(fault.by_hand):
        words = bench.command(scene.run, 1, (), config)
        words += ["--coordinator", address, "--processes", str(count), "--process-id", str(rank)]
        last = rank == count - 1
        job = bench.start([*words, *(fill(scene, word) for word in extra)], **env, **(changed if last else {}))
        if last:
            scene.job = job
        else:
            scene.others.append(job)
    assert scene.job is not None
    return bench.command(scene.run, count, (), config), scene.job


def same_rows(got: list[dict[str, Any]], want: list[dict[str, Any]], tolerance: float) -> bool:
    """Whether the rows of two runs are equal, or their losses within a relative difference."""
    if tolerance == 0.0:
        return got == want
    whole = ("step", "scored_tokens", "tokens_total")
    return [[row[key] for key in whole] for row in got] == [[row[key] for key in whole] for row in want] and all(
        abs(a["loss"] - b["loss"]) <= tolerance * abs(b["loss"]) for a, b in zip(got, want, strict=True)
    )


def fill(scene: Scene, text: str) -> str:
    """Text with the folders of this campaign and run."""
    return text.replace("{run}", str(scene.run)).replace("{folder}", str(scene.bench.folder))


def free_port() -> int:
    """A TCP port on which nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _planted(scene: Scene, fault: Fault) -> dict[str, str]:
    """The environment that plants the fault; its injection leaves the time in a file."""
    env, once = {}, f"{scene.run}.injected"
    if fault.plant:
        env["JAXTRAIN_FAULT"] = json.dumps({"once": once, **fault.plant})
    if fault.shim:
        if scene.bench.shim is None:
            raise NotRunError("there is no C compiler (cc)")
        env |= {
            "LD_PRELOAD": str(scene.bench.shim),
            "FAULT_ONCE": once,
            **{key: fill(scene, text) for key, text in fault.shim.items()},
        }
        if "FAULT_PATH" in env:
            env["FAULT_PATH"] = str(scene.run / env["FAULT_PATH"])
    return env


def _judge_first(scene: Scene, fault: Fault, outcome: Outcome, job: Job, status: int | None) -> None:
    marker = Path(f"{scene.run}.injected")
    if marker.exists():
        scene.injected = json.loads(marker.read_text())["time"]
    elif _planted_once(fault):
        outcome.problems.append("the planted fault was never reached")
    scene.injected = scene.injected or job.began
    outcome.status, outcome.message = status, _message(job)
    if status is None:
        outcome.problems.append(f"hung: still running {fault.limit:.0f} s after its start")
        job.kill()
        kill_marked(scene.bench.mark)
    elif status not in fault.status:
        outcome.problems.append(f"status {status} where {' or '.join(map(str, fault.status))} was expected")
    if fault.says and not re.search(fault.says, job.text):
        outcome.problems.append(f"nothing printed matches {fault.says!r}")
    # In a job the traceback of a rank whose peer died says which collective failed.
    if fault.processes == 1 and "Traceback (most recent" in job.text and fault.plant.get("what") != "raise":
        outcome.problems.append("a traceback was printed")
    pattern = fault.detect or fault.says
    noticed = job.said(pattern) if pattern else None
    if noticed is None and not (status == 0 and fault.begin == "interrupted"):
        noticed = _supervisor_noticed(scene) or job.ended
    # A fault that nothing notices and that changes no loss touched what is not read.
    if noticed is not None:
        outcome.detected_s = max(round(noticed - scene.injected, 2), 0.0)
    (scene.run.with_suffix(".log")).write_text(job.text)


def _planted_once(fault: Fault) -> bool:
    what = fault.plant.get("what", "straggle")
    return "FAULT_WITH" in fault.shim or (what != "straggle" and not fault.plant.get("always"))


def _rerun(scene: Scene, fault: Fault, outcome: Outcome, command: list[str]) -> Job:
    """The same command again, as a user would type it."""
    if fault.after:
        fault.after(scene)
    job = scene.job = scene.bench.start(command)
    status = job.wait(fault.limit)
    scene.run.with_suffix(".again.log").write_text(job.text)
    if status != 0:
        outcome.problems.append(f"the same command again ended with {status}: {_message(job)}")
        job.kill()
    return job


def _measure(scene: Scene, fault: Fault, outcome: Outcome, watch: Watch, first: Job, last: Job) -> None:
    """Steps lost and the time to the first new step, from the samples of the run directory."""
    time.sleep(0.05)
    assert scene.injected is not None
    resumed = [int(n) for n in re.findall(r"resumed at step (\d+)", last.text)]
    if last is first and not (_supervisor_noticed(scene) or fault.begin == "interrupted"):
        return
    outcome.restart = "by the same command" if last is not first else "by the supervisor"
    if fault.begin == "interrupted" and last is first:
        outcome.restart = "at the start"
    came_from = resumed[-1] if resumed else 0
    before = scene.injected if last is first and fault.begin != "interrupted" else last.began
    reached = max([step for when, step in watch.steps if when <= before] or [last_step(scene.run)])
    outcome.steps_lost = max(reached - came_from, 0)
    if not fault.older and came_from < (commit := watch.committed_at(scene.injected)):
        outcome.problems.append(f"resumed at step {came_from}, although checkpoint {commit} was committed")
    began = scene.injected if outcome.restart == "by the supervisor" else last.began
    again = [when for when, step in watch.steps if when > before and step > came_from]
    if outcome.restart == "by the supervisor":
        # The broken generation may still have recorded a step after the injection.
        noticed = _supervisor_noticed(scene) or began
        again = [when for when in again if when > noticed]
    if again:
        outcome.first_step_s = round(again[0] - began, 2)


def _supervisor_noticed(scene: Scene) -> float | None:
    """When the supervisor recorded a failure after the injection."""
    if scene.injected is None:
        return None
    events = read_events(scene.run)
    moments = [event["time"] for event in events if event.get("kind") == "failure"]
    return next((moment for moment in moments if moment >= scene.injected - 0.5), None)


def _message(job: Job) -> str:
    """The line by which a command says why it ended."""
    lines = [line for _, line in job.lines if line.strip()]
    ours = [line for line in lines if line.startswith("jaxtrain: ")]
    return (ours or lines or [""])[-1][:300]


def _left_behind(scene: Scene) -> list[str]:
    """Processes, ports and temporary folders that are still there a moment after the end."""
    bench = scene.bench
    wait_until(lambda: not marked(bench.mark), 3.0)
    problems = []
    if left := marked(bench.mark):
        names = [" ".join(command_of(pid)[-6:])[:120] for pid in left]
        ports = ports_of(left)
        problems.append(f"{len(left)} processes left behind (ports {ports}): {'; '.join(names[:3])}")
        kill_marked(bench.mark)
    if strays := sorted(path.name for path in (bench.folder / "tmp").iterdir()):
        problems.append(f"temporary files left behind: {', '.join(strays[:4])}")
        _empty(bench.folder / "tmp")
    if scene.run.is_dir():
        drafts = [path for path in scene.run.rglob("*") if re.search(r"tmp|\.draft|\.removed", path.name)]
        if drafts and (scene.run / "summary.json").exists():
            problems.append(
                f"temporary files in the run: {', '.join(str(p.relative_to(scene.run)) for p in drafts[:4])}"
            )
    return problems


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
