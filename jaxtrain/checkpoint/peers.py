"""Files of units between hosts: each process serves those of its node's disk over TCP, to processes of the same job.

A process listens on the one address by which the other nodes reach it: that of its route to the coordinator. Address
and port are exchanged through the coordination service, and so is the job's secret, a random token: the server sends a
nonce, the client answers with the name of a file and an HMAC of nonce and name. Contents are not encrypted, and the
coordination service is not authenticated: both need a network that you trust.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import re
import secrets
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from jaxtrain.config import StorageError
from jaxtrain.launch.coordination import exchange, rank_and_count

NAME = re.compile(r"\d+-[0-9a-f]+/\d+\.shards")
"""Names of files that are served: SAVE/UNIT.shards below the folder of the run."""
NONCE = 32
LINE = 4096
"""Most bytes of a request or an answer before the content."""
TIMEOUT_S = 60.0
"""Seconds without a byte after which a transfer is given up."""
CHUNK = 1 << 20


class PeerError(Exception):
    """A file that another process did not deliver."""


class Peers:
    """The servers of all processes of a job, this process's own included; a collective of all processes."""

    def __init__(self, root: Path, nodes: Sequence[int], host: str | None = None) -> None:
        """Serve the files below `root` at `host`; None is the address by which other nodes reach this process.

        `nodes` has the node of each process. Raises StorageError where it cannot listen.
        """
        self._root = root
        rank = rank_and_count()[0]
        host = host or _own_address(nodes, rank)
        problem, server = "", None
        try:
            server = socket.create_server((host, 0), family=_family(host), backlog=64)
        except OSError as error:
            problem = f"cannot listen at {host} for copies of local checkpoints ({error.strerror or error})"
        said = exchange(
            "local checkpoint peers",
            {
                "address": server.getsockname()[:2] if server else None,
                "secret": secrets.token_hex(32) if rank == 0 else "",
                "problem": problem,
            },
        )
        problems = [f"process {i} {one['problem']}" for i, one in enumerate(said) if one["problem"]]
        if problems or server is None:
            if server is not None:
                server.close()
            raise StorageError(f"{problems[0]}: free ports, or leave checkpoint.local out")
        self._addresses = [tuple(one["address"]) for one in said]
        self._secret = said[0]["secret"].encode()
        self._server, self._closed = server, False
        self._thread = threading.Thread(target=self._accept, name="peers", daemon=True)
        self._thread.start()

    def fetch(self, rank: int, name: str, file: BinaryIO) -> None:
        """Write the file `name` of another process's node to `file`; raises PeerError where it is not delivered."""
        try:
            with socket.create_connection(self._addresses[rank], timeout=TIMEOUT_S) as connection:
                stream = connection.makefile("rwb")
                nonce = stream.read(NONCE)
                request = {"name": name, "mac": _sign(self._secret, nonce, name)}
                stream.write(json.dumps(request).encode() + b"\n")
                stream.flush()
                answer = _read_line(stream)
                if "error" in answer:
                    raise PeerError(f"process {rank}: {answer['error']}")
                left = int(answer["bytes"])
                while left and (part := stream.read(min(left, CHUNK))):
                    file.write(part)
                    left -= len(part)
                if left:
                    raise PeerError(f"process {rank} ended the transfer of {name} with {left} bytes left")
        except (OSError, ValueError, KeyError) as error:
            raise PeerError(f"process {rank} did not deliver {name} ({error})") from None

    def close(self) -> None:
        """Stop listening; transfers that run are cut."""
        self._closed = True
        with contextlib.suppress(OSError):
            # Closing alone does not wake a thread that accepts.
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection = self._server.accept()[0]
            except OSError:
                if self._closed:
                    return
                continue
            threading.Thread(target=self._serve, args=(connection,), name="peer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        # What fails here fails at the other end, which says so.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError), connection:
            connection.settimeout(TIMEOUT_S)
            nonce = secrets.token_bytes(NONCE)
            connection.sendall(nonce)
            request = _read_line(connection.makefile("rb"))
            name = str(request["name"])
            if not hmac.compare_digest(_sign(self._secret, nonce, name), str(request["mac"])):
                connection.sendall(b'{"error": "refused: not a process of this job"}\n')
                return
            if not NAME.fullmatch(name):
                connection.sendall(b'{"error": "refused: no file of a local checkpoint"}\n')
                return
            try:
                file = (self._root / name).open("rb")
            except OSError as error:
                text = json.dumps({"error": f"{name} cannot be read ({error.strerror})"})
                connection.sendall(text.encode() + b"\n")
                return
            with file:
                size = os.fstat(file.fileno()).st_size
                connection.sendall(json.dumps({"bytes": size}).encode() + b"\n")
                connection.sendfile(file, count=size)


def _own_address(nodes: Sequence[int], rank: int) -> str:
    """The address at which other nodes reach this process. A collective."""
    from jax._src import distributed

    # On its own node the coordinator's name may be a loopback address.
    away = nodes[rank] != nodes[0]
    host = str(distributed.global_state.coordinator_address).rpartition(":")[0].strip("[]")
    said = exchange("local checkpoint routes", _route(host) if away else None)
    return said[rank] or _route(next(address for address in said if address))


def _route(host: str) -> str:
    """The address of this machine from which packets to `host` leave; nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _sign(secret: bytes, nonce: bytes, name: str) -> str:
    return hmac.new(secret, nonce + name.encode(), hashlib.sha256).hexdigest()


def _read_line(stream: Any) -> dict[str, Any]:
    line = stream.readline(LINE)
    if not line.endswith(b"\n"):
        raise ValueError("the connection ended")
    return dict(json.loads(line))
