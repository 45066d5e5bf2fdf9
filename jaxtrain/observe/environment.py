"""The environment of a run: versions, devices, host, source commit, command line."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "tokenizers")


def environment(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Facts for environment.json, plain values; starts the jax backend, so call it after processes have joined."""
    return {
        "command": list(sys.argv if argv is None else argv),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "hostname": socket.gethostname(),
        "packages": package_versions(),
        "backend": jax.default_backend(),
        "devices": dict(Counter(device.device_kind for device in jax.devices())),
        "processes": jax.process_count(),
        "xla_flags": os.environ.get("XLA_FLAGS"),
        "git": _own_git_state(),
    }


def package_versions() -> dict[str, str | None]:
    """Installed version of each of PACKAGES, None for an absent one."""
    return {name: _version(name) for name in PACKAGES}


@cache
def _own_git_state() -> dict[str, Any] | None:
    """That of this package, asked once: every checkpoint records it."""
    return git_state(Path(__file__).resolve())


def git_state(file: Path) -> dict[str, Any] | None:
    """Commit of the checkout that tracks `file` and whether it has changes; None without git or when untracked."""
    # An installed package may be inside another repository: only the one that tracks the file counts.
    if _git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return None
    commit = _git(file.parent, "rev-parse", "HEAD")
    changes = _git(file.parent, "status", "--porcelain", "--untracked-files=no")
    return None if commit is None else {"commit": commit, "dirty": bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
