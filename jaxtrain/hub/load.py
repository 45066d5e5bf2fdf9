"""Load hub weights into sharded parameters: each shard is read by slices, and no tensor is read whole."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain.config import ConfigError
from jaxtrain.hub.families import family_of
from jaxtrain.hub.family import Family, MappedParam, check_tensors, map_params, read_model
from jaxtrain.hub.fields import Json, Settings
from jaxtrain.hub.folder import Folder, read_json
from jaxtrain.hub.mapping import DimRange, read_block
from jaxtrain.mesh.layout import flatten_paths
from jaxtrain.nn.model import Model

Index = tuple[slice, ...]


def describe_folder(directory: Path, ignore: tuple[str, ...] = ()) -> tuple[Family, Json, Settings]:
    """Family, config.json and dotted model settings of a folder.

    Raises ConfigError for a family without a table and for unsupported settings. Multi-token prediction is used only if
    the folder holds its weights, since transformers drops them.
    """
    hub = read_json(directory / "config.json")
    family = family_of(hub.get("model_type"))
    settings = read_model(family, hub, ignore)
    if settings.get("mtp"):
        with Folder(directory, family.base) as folder:
            names = {mapping.name.format(layer=settings["n_layers"]) for mapping in family.mtp.values()}
            if not names & folder.shapes.keys():
                settings["mtp"] = 0
    return family, hub, settings


def load(directory: Path, family: Family, model: Model, vocabulary: int, shardings: Any) -> Any:
    """The tree of float32 parameters; each process reads the shards that it holds.

    vocabulary: size of the hub's vocabulary; rows of the model's vocabulary beyond it are zero.
    shardings: a tree of JAX shardings.

    Raises ConfigError naming every tensor that is unknown, missing, of another shape, or not the copy it should be.
    """
    if model.config.vocab_size < vocabulary:
        raise ConfigError(
            f"model.vocab_size {model.config.vocab_size} is less than the {vocabulary} rows of {directory}: remove the "
            "setting, or make it larger"
        )
    mapped = map_params(family, model, vocabulary)
    with Folder(directory, family.base) as folder:
        for name, original in check_tensors(family, mapped, folder.shapes).items():
            if not folder.are_equal(name, original):
                raise ConfigError(f"{directory}: {name} must equal {original} according to config.json, but differs")
        flat = flatten_paths(shardings)
        arrays = [
            jax.make_array_from_callback(param.param.shape, flat[path], partial(_shard, folder, param, {}), np.float32)
            for path, param in mapped.items()
        ]
        # Keep the files open until every shard is on its device.
        jax.block_until_ready(arrays)
    return jax.tree.unflatten(jax.tree.structure(model.params), arrays)


def _shard(folder: Folder, param: MappedParam, cache: dict[Any, np.ndarray], index: Index) -> np.ndarray:
    """One shard of a parameter, cached for its replicas."""
    ranges = tuple(s.indices(size)[:2] for s, size in zip(index, param.param.shape, strict=True))
    if ranges not in cache:
        cache[ranges] = _read_shard(folder, param, ranges)
    return cache[ranges]


def _read_shard(folder: Folder, param: MappedParam, ranges: tuple[DimRange, ...]) -> np.ndarray:
    out = np.zeros([hi - lo for lo, hi in ranges], np.float32)
    leading, inner = ranges[: param.leading_dims], ranges[param.leading_dims :]
    # Vocabulary rows beyond the hub's stay zero.
    available = [
        (min(lo, param.sizes[letter]), min(hi, param.sizes[letter]))
        for letter, (lo, hi) in zip(param.mapping.param_dims, inner, strict=True)
    ]
    if any(lo == hi for lo, hi in available):
        return out
    filled = tuple(slice(hi - lo) for lo, hi in available)
    for index in param.indices(leading):
        local = tuple(i - lo for i, (lo, _) in zip(index, leading, strict=True))
        fetch = partial(folder.read, param.name(index))
        out[local][filled] = read_block(param.mapping, param.sizes, available, fetch)
    return out
