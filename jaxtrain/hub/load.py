"""Weights of the hub into sharded parameters: each device's shard is read slice by slice, nothing is read whole."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain.config import ConfigError
from jaxtrain.hub.families import family_of
from jaxtrain.hub.family import Family, Leaf, check_tensors, leaves_of, read_model
from jaxtrain.hub.fields import Json, Settings
from jaxtrain.hub.folder import Folder, read_json
from jaxtrain.hub.rows import read
from jaxtrain.mesh.layout import flatten_paths
from jaxtrain.nn.model import Model

Index = tuple[slice, ...]


def describe(directory: Path, ignore: tuple[str, ...] = ()) -> tuple[Family, Json, Settings]:
    """Family, config.json and dotted model settings of a folder.

    Raises ConfigError for a family without a table and for what the table cannot read. Blocks that predict further
    tokens count only where the folder holds their weights: transformers drops them.
    """
    hub = read_json(directory / "config.json")
    family = family_of(hub.get("model_type"))
    settings = read_model(family, hub, ignore)
    if settings.get("mtp"):
        with Folder(directory, family.base) as folder:
            names = {row.name.format(layer=settings["n_layers"]) for row in family.ahead.values()}
            if not names & folder.shapes.keys():
                settings["mtp"] = 0
    return family, hub, settings


def load(directory: Path, family: Family, model: Model, vocabulary: int, shardings: Any) -> Any:
    """The tree of float32 parameters, each shard read on the process that holds it.

    `vocabulary` is the hub's: further rows of the model's are zero. shardings: a tree of jax shardings. Raises
    ConfigError naming every tensor that is unknown, missing, of another shape, or no repetition where it should be one.
    """
    if model.config.vocab_size < vocabulary:
        raise ConfigError(
            f"model.vocab_size {model.config.vocab_size} is less than the {vocabulary} rows of {directory}: leave it, "
            "or pad it to more"
        )
    leaves = leaves_of(family, model, vocabulary)
    with Folder(directory, family.base) as folder:
        for name, original in check_tensors(family, leaves, folder.shapes).items():
            if not folder.repeats(name, original):
                raise ConfigError(f"{directory}: {name} should repeat {original}, as config.json says, and does not")
        flat = flatten_paths(shardings)
        arrays = [
            jax.make_array_from_callback(leaf.param.shape, flat[path], partial(_shard, folder, leaf, {}), np.float32)
            for path, leaf in leaves.items()
        ]
        # The files close only when every shard is on its device.
        jax.block_until_ready(arrays)
    return jax.tree.unflatten(jax.tree.structure(model.params), arrays)


def _shard(folder: Folder, leaf: Leaf, done: dict[Any, np.ndarray], index: Index) -> np.ndarray:
    """One shard of a parameter; replicas of it read nothing again."""
    spans = tuple(s.indices(size)[:2] for s, size in zip(index, leaf.param.shape, strict=True))
    if spans not in done:
        done[spans] = _block(folder, leaf, spans)
    return done[spans]


def _block(folder: Folder, leaf: Leaf, spans: tuple[tuple[int, int], ...]) -> np.ndarray:
    out = np.zeros([hi - lo for lo, hi in spans], np.float32)
    lead, inner = spans[: leaf.leading], spans[leaf.leading :]
    # Rows of the vocabulary that the hub does not have stay zero.
    held = [
        (min(lo, leaf.sizes[letter]), min(hi, leaf.sizes[letter]))
        for letter, (lo, hi) in zip(leaf.row.ours, inner, strict=True)
    ]
    if any(lo == hi for lo, hi in held):
        return out
    filled = tuple(slice(hi - lo) for lo, hi in held)
    for place in leaf.places(lead):
        at = tuple(i - lo for i, (lo, _) in zip(place, lead, strict=True))
        out[at][filled] = read(leaf.row, leaf.sizes, held, partial(folder.read, leaf.name(place)))
    return out
