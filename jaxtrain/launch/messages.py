"""Lines of JSON between the supervisors of a job: one object a line, over TCP."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

LONGEST = 4 << 20
"""Bytes of a line; a longer one ends the connection."""
PINGS = 6
"""Pings within the time after which silence means that the other side is gone."""

Message = dict[str, Any]


class Link:
    """One connection: `send` from any thread; a thread calls `receive(message)`, and `lost(why, silent)` once.

    `silence` is in seconds; both sides must send something that often.
    """

    def __init__(self, connection: socket.socket, silence: float) -> None:
        self._socket, self._silence = connection, silence
        self._lock = threading.Lock()
        # Sends must not wait longer for a host that is gone than receives do.
        connection.settimeout(silence)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = connection.makefile("rb")

    def expect_within(self, silence: float) -> None:
        """Take the other side for gone after this silence, in seconds."""
        self._silence = silence
        self._socket.settimeout(silence)

    def start(self, receive: Callable[[Message], None], lost: Callable[[str, bool], None]) -> None:
        """Receive in a thread of its own."""
        threading.Thread(target=self._read, args=(receive, lost), daemon=True).start()

    def send(self, message: Message) -> bool:
        """Send one message; False where the connection is gone."""
        try:
            with self._lock:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def read(self) -> Message:
        """The next message; raises OSError where the connection ended, was silent, or sent what is no message."""
        line = self._file.readline(LONGEST)
        if not line.endswith(b"\n"):
            raise ConnectionResetError("the other side closed it")
        try:
            message = json.loads(line)
        except ValueError:
            raise ConnectionError("it sent no JSON") from None
        if not isinstance(message, dict):
            raise ConnectionError("it sent no JSON object")
        return message

    def close(self) -> None:
        """End the connection; the other side and the reading thread notice."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with suppress(OSError):
            self._socket.close()

    def _read(self, receive: Callable[[Message], None], lost: Callable[[str, bool], None]) -> None:
        why, silent = "", False
        try:
            while True:
                receive(self.read())
        except TimeoutError:
            why, silent = f"no word for {self._silence:.0f} s", True
        except (OSError, ValueError) as error:
            why = f"the connection ended ({error})"
        except Exception as error:  # what another program sent
            why = f"it sent what no supervisor sends ({type(error).__name__}: {error})"
        self.close()
        lost(why, silent)
