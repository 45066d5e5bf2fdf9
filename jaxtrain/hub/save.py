"""Export parameters as a hub folder: safetensors files written tensor by tensor, and renamed when complete."""

from __future__ import annotations

import json
import math
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
from jaxtrain.hub.family import Family, MappedParam, copies_of, map_params, tensors_of
from jaxtrain.hub.fields import Json
from jaxtrain.hub.folder import INDEX, SINGLE
from jaxtrain.hub.mapping import hub_shape, join_parts
from jaxtrain.launch.coordination import wait_for_all
from jaxtrain.mesh.layout import flatten_paths
from jaxtrain.nn.model import Model

Dtype = Literal["float32", "bfloat16", "float16"]
EXPORT_DTYPES: dict[str, tuple[str, Any]] = {
    "float32": ("F32", np.float32), "bfloat16": ("BF16", jnp.bfloat16), "float16": ("F16", np.float16),
}  # fmt: skip

TensorParts = list[tuple[MappedParam, tuple[int, ...]]]
"""The parameters that make up a hub tensor, with their leading indices."""


def save(
    directory: Path, family: Family, model: Model, params: Any, vocabulary: int, dtype: Dtype, shard_bytes: int
) -> dict[str, int]:
    """Write every tensor into an existing folder; returns counts of tensors, files and bytes.

    A file holds at most `shard_bytes`, or one tensor. The first `vocabulary` rows of the vocabulary are written. Raises
    ConfigError for a parameter that the family has no tensor for, and for values that overflow float16.
    """
    mapped = map_params(family, model, vocabulary)
    tensors = tensors_of(mapped)
    # Multi-token prediction is published with copies of embedding and head; a tied head is not.
    tensors |= {
        name: tensors[original] for name, original in copies_of(family, mapped).items() if name not in family.copies
    }
    fetch = partial(_fetch, flatten_paths(params), dtype)
    itemsize = np.dtype(EXPORT_DTYPES[dtype][1]).itemsize
    sizes = {name: itemsize * math.prod(_shape(parts)) for name, parts in tensors.items()}
    files = _assign_files(sizes, shard_bytes)
    for name, names in files.items():
        _write_file(directory / name, {key: tensors[key] for key in names}, fetch, EXPORT_DTYPES[dtype][0])
    total = sum(sizes.values())
    if len(files) > 1 and jax.process_index() == 0:
        weight_map = {key: name for name, names in files.items() for key in names}
        write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return {"tensors": len(tensors), "files": len(files), "bytes": total}


@contextmanager
def new_folder(directory: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to `directory` on success and deleted on failure, made by process 0.

    Raises ConfigError if `directory` exists and is not empty, or cannot be written.
    """
    primary = jax.process_index() == 0
    if directory.is_file() or (directory.is_dir() and any(directory.iterdir())):
        raise ConfigError(f"{directory} exists already: name a new or empty folder")
    temporary = directory.with_name(f".{directory.name}.{os.getpid()}")
    try:
        if primary:
            temporary.mkdir(parents=True)
        yield temporary
        wait_for_all("weights exported", 3600.0)
        if primary:
            # Replaces an empty folder only.
            temporary.replace(directory)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written ({error}): name another folder, or free space") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_json(path: Path, value: Json) -> None:
    """Write JSON in the format of the hub's files."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _assign_files(sizes: Mapping[str, int], limit: int) -> dict[str, list[str]]:
    """{file: tensors}, filled in order."""
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
    path: Path, tensors: Mapping[str, TensorParts], fetch: Callable[[str, TensorParts], np.ndarray], dtype: str
) -> None:
    """Write one safetensors file (header length, header, data) with one tensor in memory at a time."""
    header: Json = {"__metadata__": {"format": "pt"}}
    itemsize = {"F32": 4}.get(dtype, 2)
    end = 0
    for name, parts in tensors.items():
        shape = _shape(parts)
        start, end = end, end + itemsize * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    primary = jax.process_index() == 0
    with path.open("wb") if primary else open(os.devnull, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, parts in tensors.items():
            file.write(np.ascontiguousarray(fetch(name, parts)).view(np.uint8).data)


def _shape(parts: TensorParts) -> tuple[int, ...]:
    return hub_shape(parts[0][0].mapping, parts[0][0].sizes)


def _fetch(params: Mapping[str, jax.Array], dtype: Dtype, name: str, parts: TensorParts) -> np.ndarray:
    """A hub tensor on the host; a collective."""
    arrays = []
    for param, index in parts:
        array = params[param.path]
        assert isinstance(array.sharding, NamedSharding)
        # One process gathers shards on the host; several processes all-gather them first.
        spec = PartitionSpec(*array.sharding.spec[len(index) :]) if jax.process_count() == 1 else PartitionSpec()
        whole = np.asarray(_pick(NamedSharding(array.sharding.mesh, spec))(array, np.asarray(index, np.int32)))
        exported = tuple(slice(param.sizes[letter]) for letter in param.mapping.param_dims)
        arrays.append((param.mapping, whole[exported]))
    out = join_parts(arrays, parts[0][0].sizes)
    with np.errstate(over="ignore"):
        cast = out.astype(EXPORT_DTYPES[dtype][1])
    if not np.isfinite(cast[np.isfinite(out)]).all():
        raise ConfigError(
            f"{name} has values up to {np.abs(out).max():g}, which overflow {dtype}: use --dtype bfloat16"
        )
    return cast


@lru_cache
def _pick(sharding: NamedSharding) -> Any:
    """A jitted function that takes the entry of an array at leading indices, with this sharding."""
    return jax.jit(lambda array, index: array[tuple(index[i] for i in range(index.shape[0]))], out_shardings=sharding)
