"""Parameters into a hub's folder: safetensors written tensor by tensor, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.config import ConfigError
from jaxtrain.hub.family import Family, Leaf, copies_of, leaves_of, tensors_of
from jaxtrain.hub.fields import Json
from jaxtrain.hub.folder import INDEX, SINGLE
from jaxtrain.hub.rows import hub_shape, write
from jaxtrain.launch.distributed import barrier
from jaxtrain.mesh.layout import flatten_paths
from jaxtrain.nn.model import Model

Dtype = Literal["float32", "bfloat16", "float16"]
DTYPES: dict[str, tuple[str, Any]] = {
    "float32": ("F32", np.float32), "bfloat16": ("BF16", jnp.bfloat16), "float16": ("F16", np.float16),
}  # fmt: skip

Claims = list[tuple[Leaf, tuple[int, ...]]]


def save(
    directory: Path, family: Family, model: Model, params: Any, vocabulary: int, dtype: Dtype, shard_bytes: int
) -> dict[str, int]:
    """Write every tensor into an existing folder; returns counts of tensors, files and bytes.

    Files hold at most `shard_bytes`, or one tensor. `vocabulary` rows of the model's vocabulary are written. Raises
    ConfigError for a parameter that the family has no tensor for, and for a value beyond float16.
    """
    leaves = leaves_of(family, model, vocabulary)
    tensors = tensors_of(leaves)
    # A block that predicts further tokens is published with its own embedding and head; a tied head is not.
    tensors |= {
        name: tensors[original] for name, original in copies_of(family, leaves).items() if name not in family.copies
    }
    fetch = partial(_fetch, flatten_paths(params), dtype)
    word = np.dtype(DTYPES[dtype][1]).itemsize
    sizes = {name: word * int(np.prod(hub_shape(c[0][0].row, c[0][0].sizes))) for name, c in tensors.items()}
    files = _split(sizes, shard_bytes)
    for name, names in files.items():
        _write_file(directory / name, {key: tensors[key] for key in names}, fetch, DTYPES[dtype][0])
    total = sum(sizes.values())
    if len(files) > 1 and jax.process_index() == 0:
        where = {key: name for name, names in files.items() for key in names}
        write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    return {"tensors": len(tensors), "files": len(files), "bytes": total}


@contextmanager
def new_folder(directory: Path) -> Iterator[Path]:
    """A folder beside `directory` that takes its name when all went well, and vanishes when not; process 0 makes it.

    Raises ConfigError where `directory` is there already and not empty, or cannot be written.
    """
    primary = jax.process_index() == 0
    if directory.is_file() or (directory.is_dir() and any(directory.iterdir())):
        raise ConfigError(f"{directory} is there already: name a folder that is empty or new")
    half = directory.with_name(f".{directory.name}.{os.getpid()}")
    try:
        if primary:
            half.mkdir(parents=True)
        yield half
        barrier("exported")
        if primary:
            # Only an empty folder gives way.
            half.replace(directory)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written ({error}): name another folder, or free space") from None
    finally:
        shutil.rmtree(half, ignore_errors=True)


def write_json(path: Path, value: Json) -> None:
    """JSON as the hub's files have it."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _split(sizes: Mapping[str, int], limit: int) -> dict[str, list[str]]:
    """File -> tensors, filled in order."""
    groups: list[list[str]] = [[]]
    used = 0
    for name, size in sizes.items():
        if groups[-1] and used + size > limit:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)}


def _write_file(
    path: Path, tensors: Mapping[str, Claims], fetch: Callable[[str, Claims], np.ndarray], code: str
) -> None:
    """One safetensors file, a tensor in memory at a time: length of the header, header, bytes."""
    header: Json = {"__metadata__": {"format": "pt"}}
    word = {"F32": 4}.get(code, 2)
    end = 0
    for name, claims in tensors.items():
        shape = hub_shape(claims[0][0].row, claims[0][0].sizes)
        start, end = end, end + word * int(np.prod(shape))
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    primary = jax.process_index() == 0
    with path.open("wb") if primary else open(os.devnull, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, claims in tensors.items():
            file.write(np.ascontiguousarray(fetch(name, claims)).view(np.uint8).data)


def _fetch(params: Mapping[str, jax.Array], dtype: Dtype, name: str, claims: Claims) -> np.ndarray:
    """A tensor of the hub on the host; every process takes part."""
    parts = []
    for leaf, place in claims:
        array = params[leaf.path]
        assert isinstance(array.sharding, NamedSharding)
        # The shards meet on the host; those of other processes come over the network first.
        spec = PartitionSpec(*array.sharding.spec[len(place) :]) if jax.process_count() == 1 else PartitionSpec()
        whole = np.asarray(_pick(NamedSharding(array.sharding.mesh, spec))(array, np.asarray(place, np.int32)))
        kept = tuple(slice(leaf.sizes[letter]) for letter in leaf.row.ours)
        parts.append((leaf.row, whole[kept]))
    out = write(parts, claims[0][0].sizes)
    with np.errstate(over="ignore"):
        cast = out.astype(DTYPES[dtype][1])
    if not np.isfinite(cast[np.isfinite(out)]).all():
        raise ConfigError(f"{name} has values up to {np.abs(out).max():g}, beyond {dtype}: use --dtype bfloat16")
    return cast


@lru_cache
def _pick(sharding: NamedSharding) -> Any:
    """The entry of an array at leading indices, in this sharding."""
    return jax.jit(lambda array, place: array[tuple(place[i] for i in range(place.shape[0]))], out_shardings=sharding)
