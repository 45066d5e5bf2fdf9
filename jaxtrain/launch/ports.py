"""A port for the coordinator of a generation."""

from __future__ import annotations

import random
import socket

from jaxtrain.config import ConfigError

PORTS = range(20000, 32000)
"""Below the ports that Linux gives to connections, so that none is taken before process 0 listens."""


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port of this machine's address `host` on which nothing listens now.

    Raises ConfigError where there is none.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        for port in random.SystemRandom().sample(PORTS, 100):
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                try:
                    probe.bind((address[0], port))
                except OSError as error:
                    problem = error
                    continue
                return port
    except OSError as error:
        problem = error
    raise ConfigError(
        f"no port of {host} can be bound ({problem.strerror or problem}): name an address of this machine"
    )
