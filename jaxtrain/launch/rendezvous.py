"""Where the supervisors of several nodes meet: a server in the supervisor of node 0.

It announces each generation with the address of that generation's coordinator, collects how it ended on each node, and
ends it on all nodes as soon as one fails or is cut off. Whoever can reach its port and knows the job's command can
take a place in the job; JAXTRAIN_JOB_TOKEN adds a secret, which is sent in clear.
"""

from __future__ import annotations

import hmac
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from jaxtrain.config import ConfigError
from jaxtrain.launch.generation import SETTLE_S, STUCK, Outcome, stuck_outcome
from jaxtrain.launch.messages import PINGS, Link, Message
from jaxtrain.launch.ports import free_port
from jaxtrain.launch.stragglers import Stragglers
from jaxtrain.launch.watchdog import RankStatus, is_stuck

HELLO_S = 10.0


@dataclass
class _Member:
    """A node's supervisor: its connection, and its part in the present generation."""

    node: int
    processes: int
    host: str
    name: str
    link: Link
    running: bool = False
    ended: Outcome | None = None
    lost: str | None = None
    times: dict[int, tuple[float, float]] = field(default_factory=dict)
    statuses: list[RankStatus] = field(default_factory=list)


class Rendezvous:
    """The server; `run_generation` is called by `supervisor.supervise` in one thread, connections have their own.

    `job` is what every node must name alike; a node that is silent for `node_timeout` seconds is cut off; missing nodes
    are awaited for `node_wait` seconds. Raises ConfigError if it cannot listen.
    """

    def __init__(
        self, address: tuple[str, int], nodes: int, job: Message, token: str, node_timeout: float, node_wait: float,
        record: Callable[..., None],
    ) -> None:  # fmt: skip
        self._host, self._nodes, self._job, self._token = address[0], nodes, job, token
        self._node_timeout, self._node_wait = node_timeout, node_wait
        self._members: dict[int, _Member] = {}
        self._failures: list[tuple[float, Outcome]] = []
        self._changed = threading.Condition()
        self._leaving, self._closed = threading.Event(), threading.Event()
        self._not_before, self._number = 0.0, 0
        self._stragglers = Stragglers(record)
        try:
            family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
            self._server = socket.create_server(address, family=family)
        except OSError as error:
            raise ConfigError(
                f"node 0 cannot listen at --coordinator {address[0]}:{address[1]} ({error.strerror or error}): name an "
                "address of node 0 and a port that is free"
            ) from None
        threading.Thread(target=self._accept, daemon=True).start()
        threading.Thread(target=self._ping, daemon=True).start()

    def run_generation(self, number: int) -> Outcome:
        """One generation on all nodes; returns when it has ended on each, or that node is gone."""
        members = self._gather()
        if isinstance(members, Outcome):
            return members
        with self._changed:
            self._failures, self._number = [], number
            total, first = sum(member.processes for member in members), 0
            coordinator = f"{self._host}:{free_port(self._host)}"
            for member in members:
                member.running, member.ended, member.times, member.statuses = True, None, {}, []
                place = {"coordinator": coordinator, "processes": total, "first_rank": first, "generation": number}
                member.link.send({"start": place})
                first += member.processes
        stopped = False
        while True:
            with self._changed:
                self._changed.wait(0.5)
                failure = min(self._failures, key=lambda pair: pair[0])[1] if self._failures else None
                waiting = [member for member in members if member.ended is None and member.lost is None]
                if failure is None and len(waiting) == len(members):
                    failure = self._judge(members)
                times = {rank: pair for member in members for rank, pair in member.times.items()}
            if not waiting:
                return self._merge(members, failure)
            if failure is not None and not stopped:
                stopped = True
                stuck = failure.cause == "stuck"
                stop = {"why": failure.message if stuck else f"{failure.cause} on {failure.host}", "dump": stuck}
                for member in waiting:
                    member.link.send({"stop": stop})
            self._stragglers.look(times, {rank: member.host for member in members for rank in member.times})

    def _judge(self, members: list[_Member]) -> Outcome | None:
        """The rank that all nodes wait for, if it is stuck; as soon as every node has reported its ranks."""
        if not all(member.statuses for member in members):
            return None
        statuses = [status for member in members for status in member.statuses]
        if not is_stuck(statuses):
            return None
        outcome = stuck_outcome(statuses)
        self._failures.append((time.monotonic(), outcome))
        return outcome

    def wait(self, seconds: float) -> bool:
        """Sleep; True, early, when a node was told to stop."""
        return self._leaving.wait(seconds)

    def finish(self, status: int, message: str = "") -> None:
        """Tell every node the end of the job, and close."""
        with self._changed:
            for member in self._members.values():
                member.link.send({"finish": status, "message": message})
        self._closed.set()
        self._server.close()

    def _gather(self) -> list[_Member] | Outcome:
        """All nodes, each connected and without processes; an outcome that names those that did not come in time."""
        deadline = time.monotonic() + self._node_wait
        with self._changed:
            while True:
                now = time.monotonic()
                here = [m for m in self._members.values() if m.lost is None and not m.running]
                if self._leaving.is_set():
                    return Outcome(75, "stopped", signalled=True)
                if len(here) == self._nodes and now >= self._not_before:
                    return sorted(here, key=lambda member: member.node)
                if now >= deadline:
                    break
                self._changed.wait(0.5)
            absent = [node for node in range(self._nodes) if node not in {member.node for member in here}]
        names = ", ".join(f"node {node}" for node in absent)
        message = (
            f"{names} of {self._nodes} did not come to {self._host} within {self._node_wait:.0f} s (--node-wait): "
            "start the same command there with its --node-rank, and check that no firewall closes the port"
        )
        return Outcome(STUCK, "node missing", message=message, final=f"{names} did not come")

    def _merge(self, members: list[_Member], failure: Outcome | None) -> Outcome:
        """How the generation ended for the whole job: a lost node is the cause where there is one."""
        ended = [member.ended for member in members if member.ended is not None]
        signalled = any(outcome.signalled for outcome in ended)
        statuses = tuple(status for outcome in ended for status in outcome.statuses)
        top = max([-1, *(outcome.top_step for outcome in ended)])
        lost = [member for member in members if member.lost is not None]
        if lost:
            text = "; ".join(f"node {member.node} ({member.name}) is gone: {member.lost}" for member in lost)
            failure = Outcome(STUCK, "node lost", host=lost[0].host, message=text, signature=f"node {lost[0].node}")
        elif failure is None:
            failure = max(ended, key=lambda outcome: outcome.status)
        elif failure.cause == "stuck" and statuses:
            failure = replace(stuck_outcome(statuses), ago=max(outcome.ago for outcome in ended))
        else:
            # With the last lines of the others, which came later.
            first = failure
            failure = next((o for o in ended if (o.rank, o.cause) == (first.rank, first.cause)), first)
        return replace(failure, signalled=signalled, statuses=statuses, top_step=top)

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._server.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._welcome, args=(connection, address[0]), daemon=True).start()

    def _welcome(self, connection: socket.socket, address: str) -> None:
        """Read who connects; refuse what is not of this job."""
        link = Link(connection, HELLO_S)
        try:
            hello = link.read()["hello"]
            node, processes = int(hello["node"]), int(hello["processes"])
            name = f"{hello['host']} pid {int(hello['pid'])} at {address}"
            refusal = self._refusal(hello, node)
        except (OSError, KeyError, TypeError, ValueError):
            link.close()
            return
        if refusal:
            link.send(refusal)
            link.close()
            return
        link.expect_within(self._node_timeout)
        member = _Member(node, processes, str(hello["host"]), name, link)
        with self._changed:
            before = self._members.get(node)
            if before is not None and before.lost is None:
                busy = f"node {node} is {before.name}, which is still connected"
                link.send({"busy": busy})
                link.close()
                return
            self._members[node] = member
            self._changed.notify_all()
        link.send({"welcome": self._node_timeout})
        link.start(lambda message: self._receive(member, message), lambda why, silent: self._lose(member, why, silent))

    def _refusal(self, hello: Message, node: int) -> Message | None:
        if not hmac.compare_digest(str(hello.get("token", "")).encode(), self._token.encode()):
            return {"refused": "the job there has another JAXTRAIN_JOB_TOKEN"}
        if hello.get("job") != self._job:
            return {"refused": f"the job there is {self._job}, this one is {hello.get('job')}"}
        if not 0 <= node < self._nodes:
            return {"refused": f"--node-rank {node}: the nodes are numbered 0 to {self._nodes - 1}"}
        return None

    def _receive(self, member: _Member, message: Message) -> None:
        with self._changed:
            if "failing" in message and member.running:
                outcome = Outcome.from_json(message["failing"])
                self._failures.append((time.monotonic() - outcome.ago, outcome))
            if "ended" in message:
                member.ended, member.running = Outcome.from_json(message["ended"]), False
            if "ping" in message:
                member.times = {int(rank): (float(a), float(b)) for rank, (a, b) in message["ping"].items()}
                current = message.get("generation") == self._number
                member.statuses = [RankStatus(**status) for status in message["statuses"]] if current else []
            if "leave" in message:
                self._leaving.set()
            self._changed.notify_all()

    def _lose(self, member: _Member, why: str, silent: bool) -> None:
        with self._changed:
            member.lost = why
            if member.running:
                outcome = Outcome(STUCK, "node lost", host=member.host, message=f"node {member.node}: {why}")
                self._failures.append((time.monotonic(), outcome))
            if silent:
                # Its processes may still run: its own supervisor ends them within the same time.
                self._not_before = time.monotonic() + self._node_timeout + SETTLE_S
            member.running = False
            self._changed.notify_all()

    def _ping(self) -> None:
        while not self._closed.wait(self._node_timeout / PINGS):
            with self._changed:
                links = [member.link for member in self._members.values() if member.lost is None]
            for link in links:
                link.send({"ping": {}})


def job_of(command: list[str], nodes: int) -> dict[str, Any]:
    """What the nodes of a job must have in common; the interpreter may be elsewhere on each."""
    return {"command": command[1:], "nodes": nodes}
