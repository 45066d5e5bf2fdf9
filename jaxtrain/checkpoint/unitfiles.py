"""Files of local checkpoints: a line with the hash of the header, the header as one line of JSON, then the shards."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxtrain.checkpoint.files import DamagedError, sync_files
from jaxtrain.checkpoint.units import Unit

FORMAT = 1


def write_unit(path: Path, header: Mapping[str, Any], unit: Unit, shards: Mapping[Any, np.ndarray]) -> None:
    """Write a unit's shards, (path, index) -> array, with a header; on disk when this returns. Raises OSError."""
    entries, offset = [], 0
    contents = [_bytes(shards[shard.path, shard.where]) for shard in unit.shards]
    for shard, content in zip(unit.shards, contents, strict=True):
        entries.append({
            "path": shard.path, "index": shard.where, "dtype": shard.dtype, "offset": offset, "bytes": content.nbytes,
            "sha256": hashlib.sha256(content).hexdigest(),
        })  # fmt: skip
        offset += content.nbytes
    text = json.dumps({**header, "format": FORMAT, "unit": unit.number, "shards": entries}).encode()
    draft = path.with_suffix(".tmp")
    with draft.open("wb") as file:
        file.write(hashlib.sha256(text).hexdigest().encode() + b"\n" + text + b"\n")
        for content in contents:
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
    sync_files(path.parent, deep=False)


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header and where the shards begin; raises DamagedError where it is altered or of another format, OSError."""
    with path.open("rb") as file:
        expected, text = file.readline(100).strip(), file.readline()
    if not text.endswith(b"\n") or hashlib.sha256(text[:-1]).hexdigest().encode() != expected:
        raise DamagedError("header: altered bytes")
    header = json.loads(text)
    if header["format"] != FORMAT:
        raise DamagedError(f"header: format {header['format']} is not known")
    return header, len(expected) + 1 + len(text)


def verify_unit(path: Path) -> None:
    """Read a whole file; raises DamagedError where a byte is altered or missing, OSError where it cannot be read."""
    header, begin = read_header(path)
    for entry in header["shards"]:
        content = np.fromfile(path, np.uint8, entry["bytes"], offset=begin + entry["offset"])
        if hashlib.sha256(content).hexdigest() != entry["sha256"]:
            raise DamagedError(f"{entry['path']}: altered bytes")


def read_shard(path: Path, begin: int, entry: Mapping[str, Any], shape: tuple[int, ...]) -> np.ndarray:
    """One shard of a file whose header has the entry."""
    content = np.fromfile(path, np.uint8, entry["bytes"], offset=begin + entry["offset"])
    if content.nbytes != entry["bytes"]:
        raise DamagedError(f"{entry['path']}: bytes are missing")
    return content.view(jnp.dtype(entry["dtype"])).reshape(shape)


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
