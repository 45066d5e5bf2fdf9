"""Paths that must be local: run directories, caches and every file that jaxtrain writes."""

from __future__ import annotations

import re
from pathlib import Path

from jaxtrain.config.errors import ConfigError

# pathlib turns s3://bucket into s3:/bucket; one letter before the colon is a drive of Windows.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def url_fault(path: str | Path, name: str) -> str | None:
    """Why `path` cannot be used, where it is a URL and not a path; None for a path. `name`: the setting or option."""
    found = _SCHEME.match(str(path))
    if found is None:
        return None
    scheme, rest = found[1], str(path)[found.end() :].lstrip("/")
    if scheme == "file":
        return f"{name} is the URL {scheme}:///{rest}: name the path, /{rest}"
    return (
        f"{name} is the URL {scheme}://{rest}: object storage and other URLs are not supported here: name a local or "
        f"NFS folder, or mount the storage (such as with gcsfuse or mountpoint-s3) and name the mounted path"
    )


def require_local(path: str | Path, name: str) -> None:
    """Raise ConfigError where `path` is a URL."""
    if fault := url_fault(path, name):
        raise ConfigError(fault)
