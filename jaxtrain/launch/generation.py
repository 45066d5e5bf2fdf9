"""One generation of a job on this machine: start its processes, watch them, end all of them together."""

from __future__ import annotations

import dataclasses
import re
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxtrain.config import CorruptionError, StoppedError
from jaxtrain.launch.signals import Signals
from jaxtrain.launch.watchdog import Limits, RankStatus, explain_stuck, find_culprits, is_stuck, typical_seconds
from jaxtrain.launch.worker import Worker

SETTLE_S = 5.0
"""Seconds that other processes get after one has failed; they cannot save a checkpoint without it."""
DUMP_S = 1.5
"""Seconds that processes get to print their stacks."""
STUCK = 14
"""Exit status of a job whose processes the supervisor ended: a rank was stuck, or a node was cut off."""
SAVED = StoppedError.status
WRONG_BITS = "wrong bits on"
UNKILLABLE_S = 30.0
"""Seconds after SIGKILL in which a process must be gone."""
POLL_S = 0.05
WATCH_S = 0.5


@dataclass(frozen=True)
class Job:
    """What runs on this machine: `command` once for each environment, with its rank added."""

    command: Sequence[str]
    environments: Sequence[Mapping[str, str]]
    limits: Limits = field(default_factory=Limits)
    settle: float = SETTLE_S
    host: str = field(default_factory=socket.gethostname)


@dataclass(frozen=True)
class Place:
    """The ranks of this machine in a generation of the whole job."""

    coordinator: str
    processes: int
    first_rank: int = 0
    generation: int = 1


@dataclass(frozen=True)
class Outcome:
    """How a generation ended; of a failure, who failed first, and where it was."""

    status: int
    cause: str = ""
    """Empty for status 0; 'exit status 13', 'killed by SIGKILL', 'stuck', 'node lost'."""
    rank: int | None = None
    host: str | None = None
    step: int | None = None
    phase: str | None = None
    seconds: float = 0.0
    """How long the named rank had been in its phase."""
    message: str = ""
    """What is printed: one or more lines."""
    signature: str = ""
    """The last line of its output, for the comparison of failures."""
    top_step: int = -1
    """The largest step that a rank has reached."""
    signalled: bool = False
    """The launcher passed a signal on."""
    statuses: tuple[RankStatus, ...] = ()
    ago: float = 0.0
    """Seconds since the failure."""
    final: str = ""
    """Why another generation is useless, where that is known here."""

    def to_json(self) -> dict[str, Any]:
        """For another supervisor."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Outcome:
        """From another supervisor."""
        return cls(**{**values, "statuses": tuple(RankStatus(**status) for status in values["statuses"])})


@dataclass(frozen=True)
class Stop:
    """Why the rest of the job wants this machine's processes to end."""

    why: str
    dump: bool = False
    """Whether stacks are wanted: some rank is stuck."""


class Generation:
    """The processes of one generation on this machine; `run` returns when all have ended."""

    def __init__(
        self,
        job: Job,
        place: Place,
        signals: Signals,
        stop: Callable[[], Stop | None] = lambda: None,
        on_failure: Callable[[Outcome], None] = lambda outcome: None,
        on_watch: Callable[[Mapping[int, tuple[float, float]]], None] = lambda times: None,
        judge: Callable[[Sequence[RankStatus]], bool] = is_stuck,
    ) -> None:
        self._job, self._place, self._signals = job, place, signals
        self._stop, self._on_failure, self._on_watch, self._judge = stop, on_failure, on_watch, judge
        self._workers: list[Worker] = []
        self._outcome: Outcome | None = None
        self._deadline: float | None = None
        self._killed: float | None = None
        self._held: dict[int, float] = {}
        self._awake = self._watched = time.monotonic()
        self._excused = self._failed = 0.0

    def run(self) -> Outcome:
        """Start the processes and wait for all; the first failure ends the others.

        `stop` is asked all the time; `on_failure` is called at once with a failure, before the others have ended;
        `on_watch` gets (own seconds, step seconds) of each rank now and then; `judge` says whether ranks are stuck.
        """
        try:
            with self._signals.to(self._workers):
                self._start()
                # A list, not a generator: every worker is polled.
                while None in [worker.poll() for worker in self._workers] and not self._hopeless():
                    self._check()
                    time.sleep(POLL_S)
                self._check()
        finally:
            ended = [worker.close(0.1 if self._hopeless() else UNKILLABLE_S) for worker in self._workers]
        return self._result(all(ended))

    def _start(self) -> None:
        place = self._place
        for i, env in enumerate(self._job.environments):
            rank = place.first_rank + i
            words = ["--coordinator", place.coordinator, "--processes", str(place.processes), "--process-id", str(rank)]
            self._workers.append(Worker(rank, [*self._job.command, *words], env, place.generation))
        if self._signals.number is not None:
            self._send(self._signals.number)  # it came while the processes were started

    def _check(self) -> None:
        """Look for the first reason to end the generation; end it when its time is over."""
        now = time.monotonic()
        if now - self._awake > 5.0:
            # This machine slept, or this process was held: the ranks may have been, too.
            self._excused = now
        self._awake = now
        if self._outcome is None:
            failed = [worker for worker in self._workers if worker.status not in (None, 0)]
            if failed:
                self._fail(self._describe_exit(min(failed, key=lambda worker: worker.ended)))
            elif (stop := self._stop()) is not None:
                self._fail(Outcome(STUCK, "stopped", message=stop.why), stop.dump)
            elif self._signals.deadline is None and now - self._watched >= WATCH_S:
                self._watched = now
                self._watch()
        limits = [moment for moment in (self._deadline, self._signals.deadline) if moment is not None]
        if limits and now >= min(limits):
            self._killed = self._killed or now
            self._send(signal.SIGKILL)

    def _hopeless(self) -> bool:
        """Whether processes were killed and do not end: they wait in the kernel."""
        return self._killed is not None and time.monotonic() > self._killed + UNKILLABLE_S

    def _watch(self) -> None:
        statuses = self._statuses()
        if statuses and self._judge(statuses):
            self._fail(stuck_outcome(statuses), dump=True)
            return
        times = {}
        for worker in self._workers:
            status = worker.read_status()
            own, step = typical_seconds(status, "input"), typical_seconds(status, "step")
            if own is not None and step is not None:
                times[worker.rank] = (own, own + step)
        self._on_watch(times)

    def _fail(self, outcome: Outcome, dump: bool = False) -> None:
        """End the generation for this reason: stacks first where wanted, then SIGTERM, later SIGKILL."""
        stopping = self._signals.deadline is not None
        statuses = self._statuses(with_ended=True)
        top = max((-1 if status.step is None else status.step for status in statuses), default=-1)
        self._failed = time.monotonic() - outcome.ago
        self._outcome = dataclasses.replace(outcome, top_step=top, statuses=tuple(statuses), signalled=stopping)
        if outcome.status == SAVED:
            # All processes stop at the same step; a signal to those that still save would be the second one.
            self._deadline = time.monotonic() + self._signals.grace
            return
        self._on_failure(self._outcome)
        if dump:
            print(f"jaxtrain: {outcome.message}; the stacks of all ranks follow", flush=True)
            self._dump_stacks()
        self._deadline = time.monotonic() + self._job.settle
        self._send(signal.SIGTERM)

    def _dump_stacks(self) -> None:
        for worker in self._workers:
            # Before its first report, SIGQUIT would end it.
            if worker.read_status().durations:
                worker.send(signal.SIGQUIT)
        time.sleep(DUMP_S)

    def _send(self, signum: int) -> None:
        for worker in self._workers:
            worker.send(signum)

    def _statuses(self, with_ended: bool = False) -> list[RankStatus]:
        return [self._status(worker) for worker in self._workers if worker.status is None or with_ended]

    def _status(self, worker: Worker) -> RankStatus:
        status = worker.read_status()
        seconds = time.monotonic() - max(status.since, self._excused)
        limit = self._job.limits.seconds(status)
        held = None
        if worker.is_stopped():
            held = time.monotonic() - self._held.setdefault(worker.rank, time.monotonic())
        else:
            self._held.pop(worker.rank, None)
        return RankStatus(worker.rank, self._job.host, status.phase, status.step, seconds, limit, held)

    def _describe_exit(self, worker: Worker) -> Outcome:
        worker.reader.join(timeout=1.0)  # its traceback has arrived
        code, status = worker.status or 0, worker.read_status()
        cause = f"killed by {_signal_name(code - 128)}" if code > 128 else f"exit status {code}"
        seconds = max(worker.ended - status.since, 0.0)
        killed = f" ({cause})" if code > 128 else ""
        where = RankStatus(worker.rank, self._job.host, status.phase, status.step, seconds, 0.0)
        lines = "\n".join(f"  {line}" for line in worker.tail) or "  (it printed nothing)"
        message = (
            f"process {worker.rank} of {self._place.processes} ended with status {code}{killed} on {self._job.host} "
            f"in {where.where()}; its last lines:\n{lines}"
        )
        outcome = Outcome(
            code, cause, worker.rank, self._job.host, status.step, status.phase, seconds, message,
            signature=worker.tail[-1] if worker.tail else "", ago=time.monotonic() - worker.ended,
        )  # fmt: skip
        return name_corrupt(outcome, worker.tail) if code == CorruptionError.status else outcome

    def _result(self, ended: bool) -> Outcome:
        if not ended:
            left = ", ".join(f"process {worker.rank}" for worker in self._workers if worker.status is None)
            final = f"{left} on {self._job.host} did not end after SIGKILL: it waits in the kernel, often for storage"
            self._outcome = dataclasses.replace(self._outcome or Outcome(STUCK, "stuck"), final=final)
        if self._outcome is None:
            return Outcome(0, signalled=self._signals.deadline is not None)
        others = [
            f"  process {worker.rank} (status {worker.status}): {worker.tail[-1]}"
            for worker in self._workers
            if worker.rank != self._outcome.rank and worker.tail
        ]
        after = "\nthe others were ended; their last lines:\n" + "\n".join(others[:16]) if others else ""
        signalled = self._outcome.signalled or self._signals.deadline is not None
        message, ago = self._outcome.message + after, time.monotonic() - self._failed
        return dataclasses.replace(self._outcome, message=message, signalled=signalled, ago=ago)


def stuck_outcome(statuses: Sequence[RankStatus]) -> Outcome:
    """The outcome that names the rank which the others wait for."""
    first = find_culprits(statuses)[0]
    return Outcome(
        STUCK, "stuck", first.rank, first.host, first.step, first.phase, first.seconds, explain_stuck(statuses),
        signature=first.phase,
    )  # fmt: skip


def name_corrupt(outcome: Outcome, lines: Iterable[str]) -> Outcome:
    """The outcome with the process whose devices computed wrong bits, where its lines name exactly one.

    All processes print the same (train/replay.py), and any of them may have ended first.
    """
    devices = {match[1] for line in lines if (match := re.search(r"differs (?:from its replicas )?on (.+)$", line))}
    named = {_PROCESS.sub(r"process \1 (\2)", where) for where in devices}
    if len(named) != 1 or ", device" in (where := named.pop()):
        return outcome
    found = _PROCESS.search(next(iter(devices)))
    rank, host = (int(found[1]), found[2]) if found else (outcome.rank, outcome.host)
    return dataclasses.replace(outcome, rank=rank, host=host, cause=f"{WRONG_BITS} {where}")


_PROCESS = re.compile(r"process (\d+) \((\S+) pid \d+\)")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"  # a status above 128 that no signal has
