"""The supervisor of one of several nodes: it follows the rendezvous, whose server runs in the supervisor of node 0."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from jaxtrain.config import ConfigError, StoppedError
from jaxtrain.launch.generation import STUCK, Generation, Job, Outcome, Place, Stop
from jaxtrain.launch.messages import PINGS, Link, Message
from jaxtrain.launch.rendezvous import Rendezvous, job_of
from jaxtrain.launch.restarts import RestartPolicy
from jaxtrain.launch.signals import Signals
from jaxtrain.launch.supervisor import Recorder, supervise, tell
from jaxtrain.launch.watchdog import RankStatus

TOKEN = "JAXTRAIN_JOB_TOKEN"
"""Environment variable: a secret that all nodes of a job share."""
LOOK_S = 2.0
"""Seconds between the statuses that node 0 gets."""
NODE_TIMEOUT_S = 30.0
NODE_WAIT_S = 600.0


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job and which one this is; the supervisor of node 0 listens at `address`."""

    count: int
    rank: int
    address: tuple[str, int]
    timeout: float = NODE_TIMEOUT_S
    """Seconds without a word after which a node is cut off."""
    wait: float = NODE_WAIT_S
    """Seconds for which missing nodes are awaited."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.count:
            raise ConfigError(f"--node-rank {self.rank} of --nodes {self.count}: nodes are numbered 0 to N-1")
        if self.timeout <= 0 or self.wait <= 0:
            raise ConfigError(f"--node-timeout {self.timeout:g} --node-wait {self.wait:g}: use positive seconds")


def launch_node(nodes: Nodes, job: Job, policy: RestartPolicy, signals: Signals, record: Recorder) -> int:
    """Run this node's part of a job to its end; its exit status, the same on all nodes.

    Node 0 decides and records events. A node that loses the others ends its processes and returns to the rendezvous
    for `nodes.wait` seconds. Raises ConfigError if node 0 cannot listen, or the rendezvous refuses this node.
    """
    with signals.handled():
        if nodes.rank == 0:
            server = Rendezvous(
                nodes.address, nodes.count, job_of(list(job.command), nodes.count), os.environ.get(TOKEN, ""),
                nodes.timeout, nodes.wait, record,
            )  # fmt: skip
            director = threading.Thread(target=_direct, args=(server, policy, record), daemon=True)
            director.start()
        status = _follow(nodes, job, signals)
        if nodes.rank == 0:
            director.join(timeout=nodes.timeout)  # the other nodes are told too
        return status


def _direct(server: Rendezvous, policy: RestartPolicy, record: Recorder) -> None:
    try:
        status, message = supervise(server.run_generation, policy, server.wait, record), ""
    except BaseException as error:
        status, message = 1, f"the supervisor of node 0 failed: {type(error).__name__}: {error}"
    server.finish(status, message)


def _follow(nodes: Nodes, job: Job, signals: Signals) -> int:
    """Follow the rendezvous over as many connections as it takes."""
    deadline = time.monotonic() + nodes.wait
    while True:
        session = _connect(nodes, job, signals, deadline)
        if session is None:
            return StoppedError.status
        status = session.follow()
        session.close()
        if status is not None:
            return status
        tell(f"node {nodes.rank} has lost the rendezvous: {session.why}; its processes were ended, it tries again")
        deadline = time.monotonic() + nodes.wait


def _connect(nodes: Nodes, job: Job, signals: Signals, deadline: float) -> _Session | None:
    """A session with the rendezvous; None after a signal. Raises ConfigError where it refuses or does not answer."""
    hello = {
        "node": nodes.rank, "processes": len(job.environments), "host": job.host, "pid": os.getpid(),
        "token": os.environ.get(TOKEN, ""), "job": job_of(list(job.command), nodes.count),
    }  # fmt: skip
    where, problem = f"{nodes.address[0]}:{nodes.address[1]}", ""
    while time.monotonic() < deadline:
        try:
            link = Link(socket.create_connection(nodes.address, timeout=min(nodes.timeout, 10.0)), nodes.timeout)
            link.send({"hello": hello})
            answer = link.read()
        except OSError as error:
            answer, problem = {}, f"nothing answers ({error.strerror or error})"
        if "welcome" in answer:
            return _Session(link, job, signals, nodes.timeout)
        if "refused" in answer:
            raise ConfigError(f"the rendezvous at {where} refuses node {nodes.rank}: {answer['refused']}")
        problem = answer.get("busy", problem)
        if signals.wait(0.5):
            return None
    raise ConfigError(
        f"node {nodes.rank} could not join the rendezvous at {where} for {nodes.wait:.0f} s: {problem}; check that "
        "node 0 runs there, and that no firewall closes the port"
    )


class _Session:
    """One connection to the rendezvous, from its welcome to its loss or the end of the job."""

    def __init__(self, link: Link, job: Job, signals: Signals, timeout: float) -> None:
        self.why = ""
        self._link, self._job, self._signals = link, job, signals
        self._inbox: queue.Queue[Message] = queue.Queue()
        self._stop: Stop | None = None
        self._times: Mapping[int, tuple[float, float]] = {}
        self._seen: tuple[int, Sequence[RankStatus]] = (0, ())
        self._closed = threading.Event()
        link.start(self._receive, self._lose)
        threading.Thread(target=self._ping, args=(min(timeout / PINGS, LOOK_S),), daemon=True).start()

    def follow(self) -> int | None:
        """Run what the rendezvous starts; the job's exit status, or None where the connection was lost."""
        left = False
        while True:
            if self._signals.number is not None and not left:
                left = self._link.send({"leave": True})
            try:
                message = self._inbox.get(timeout=0.2)
            except queue.Empty:
                continue
            if "lost" in message:
                return StoppedError.status if self._signals.number is not None else None
            if "finish" in message:
                if message.get("message"):
                    tell(str(message["message"]))
                return int(message["finish"])
            if "start" in message:
                outcome = self._run(Place(**message["start"]))
                if not self._link.send({"ended": outcome.to_json()}) and outcome.signalled:
                    return outcome.status

    def close(self) -> None:
        """End the connection."""
        self._closed.set()
        self._link.close()

    def _run(self, place: Place) -> Outcome:

        def keep(statuses: Sequence[RankStatus]) -> bool:
            # Node 0 judges: whom these ranks wait for may be on another node.
            self._seen = (place.generation, statuses)
            return False

        generation = Generation(
            self._job, place, self._signals, lambda: self._stop,
            on_failure=self._tell_failure, on_watch=self._watch, judge=keep,
        )  # fmt: skip
        try:
            return generation.run()
        except OSError as error:
            return Outcome(STUCK, "cannot start", message=f"{self._job.host} cannot start its processes: {error}")

    def _tell_failure(self, outcome: Outcome) -> None:
        if outcome.cause != "stopped":
            self._link.send({"failing": outcome.to_json()})

    def _watch(self, times: Mapping[int, tuple[float, float]]) -> None:
        self._times = times

    def _receive(self, message: Message) -> None:
        if "stop" in message:
            self._stop = Stop(**message["stop"])
        elif "ping" not in message:
            if "start" in message:
                self._stop = None
            self._inbox.put(message)

    def _lose(self, why: str, silent: bool) -> None:
        self.why = why
        self._stop = Stop(f"the rendezvous is gone: {why}")
        self._inbox.put({"lost": why})

    def _ping(self, every: float) -> None:
        while not self._closed.wait(every):
            number, statuses = self._seen
            seen = [asdict(status) for status in statuses]
            self._link.send({"ping": self._times, "generation": number, "statuses": seen})
