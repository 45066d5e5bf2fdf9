"""What /proc says: descendants, the campaign's own processes, and the ports on which they listen (Linux)."""

from __future__ import annotations

import os
from pathlib import Path

MARK = "JAXTRAIN_CAMPAIGN"
"""Environment variable of every process that the campaign starts."""


def command_of(pid: int) -> list[str]:
    """The words of a process's command, [] where it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def below(pid: int) -> list[int]:
    """The living descendants of a process and itself."""
    parents = {child: stat[1] for child in _pids() if (stat := _stat(child))}
    found = [pid]
    for parent in found:
        found += [child for child, above in parents.items() if above == parent]
    return found


def marked(value: str) -> list[int]:
    """Processes of the campaign that still live, however they were started."""
    needle = f"{MARK}={value}".encode()
    found = []
    for pid in _pids():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if needle in environment and _stat(pid)[:1] != ("Z",):
            found.append(pid)
    return found


def ports_of(pids: list[int]) -> list[int]:
    """TCP ports on which these processes listen."""
    inodes = set()
    for pid in pids:
        try:
            names = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        except OSError:
            continue
        inodes |= {name[8:-1] for name in names if name.startswith("socket:[")}
    rows = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]]
    return sorted({int(row[1].rsplit(":", 1)[1], 16) for row in rows if row[3] == "0A" and row[9] in inodes})


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _stat(pid: int) -> tuple[str, int] | tuple[()]:
    """State letter and parent, () where the process is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return ()
    return fields[0], int(fields[1])
