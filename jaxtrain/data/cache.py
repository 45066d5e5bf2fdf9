"""A cache whose files are complete or absent, however many processes build them at once."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jaxtrain.config import ConfigError


def build_once(path: Path, build: Callable[[Path], None]) -> Path:
    """Return `path`; when it is absent, `build(temporary)` writes a file or folder that is renamed to it.

    One process of a machine builds while the others wait. Raises ConfigError when the cache cannot be written.
    """
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path.with_name(f"{path.name}.lock")):
            if not path.exists():
                _build(path, build)
    except OSError as error:
        raise ConfigError(
            f"data.cache: {path} cannot be written ({error.strerror or error}): choose a writable folder with space"
        ) from None
    return path


def _build(path: Path, build: Callable[[Path], None]) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        build(scratch / path.name)
        try:
            os.rename(scratch / path.name, path)
        except OSError:
            # Where file locks do not hold (some network file systems) another process may have been first.
            if not path.exists():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        # On a file system without locks the rename alone keeps the cache complete; work may be done twice.
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
