"""A small model, hostile batches and a plain way to train under any layout: shared by the tests of train/."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxtrain.config import RunConfig, validate
from jaxtrain.data import IGNORE
from jaxtrain.train.batch import shard_batch
from jaxtrain.train.resolve import Bound, bind
from jaxtrain.train.step import compile_step

LENGTH, ROWS, VOCAB = 32, 16, 128

BASE: dict[str, Any] = {
    "model": {
        "vocab_size": VOCAB, "d_model": 64, "n_layers": 4, "n_heads": 8, "n_kv_heads": 4, "head_dim": 8, "d_ff": 96,
        "max_seq_len": LENGTH,
    },
    "data": {"seq_len": LENGTH, "tokenizer": {"vocab_size": VOCAB}},
    "train": {"steps": 10, "global_batch": ROWS},
    # A larger eps: where a gradient is rounding noise alone, Adam would make a whole step of it on any layout.
    "optimizer": {"learning_rate": 3e-3, "schedule": "cosine", "warmup": 2, "eps": 1e-5},
    "rules": {"replicated_limit": 10**9},
}  # fmt: skip


def config_of(**sections: dict[str, Any]) -> RunConfig:
    """BASE with sections merged over it."""
    return validate({key: {**BASE.get(key, {}), **sections.get(key, {})} for key in {**BASE, **sections}})


def packed_rows(seed: int, rows: int = ROWS, length: int = LENGTH, vocab: int = VOCAB) -> dict[str, np.ndarray]:
    """Rows of several documents, padding at the end, uneven masks; rows 0-3 are padding only, row 4 is unscored."""
    rng = np.random.default_rng(seed)
    out = {name: np.zeros((rows, length), np.int32) for name in ("tokens", "segments", "positions")}
    out["labels"] = np.full((rows, length), IGNORE, np.int32)
    for row in range(4, rows):
        at, segment = 0, 0
        while at < length - 1 and segment < 4:
            size = int(rng.integers(1, length - at + 1))
            segment += 1
            here = slice(at, at + size)
            out["tokens"][row, here] = rng.integers(0, vocab, size)
            out["segments"][row, here] = segment
            out["positions"][row, here] = np.arange(size)
            scored = rng.random(size) < rng.random()
            scored[-1] = False
            out["labels"][row, here] = np.where(scored & (row != 4), rng.integers(0, vocab, size), IGNORE)
            at += size
    return out


def setup_of(config: RunConfig, devices: int | None = None) -> Bound:
    """Resolve on the first `devices` simulated devices (default all)."""
    return bind(config, jax.devices()[: devices or jax.device_count()])


def train_on(setup: Bound, batches: list[dict[str, np.ndarray]]) -> tuple[list[dict[str, float]], dict[str, Any], Any]:
    """Metrics of each update, the final state on the host, and the compiled step."""
    step = compile_step(setup.step, setup.abstract, setup.abstract_batch)
    state = setup.init_state()
    metrics = []
    for rows in batches:
        state, values = step(state, shard_batch(rows, 0, setup.batch_shape, setup.batch_sharding))
        metrics.append({name: value.tolist() for name, value in jax.device_get(values).items()})
    return metrics, jax.device_get(state), step


def worst_relative_error(got: Any, want: Any) -> tuple[float, str]:
    """Largest |got - want| over the largest |want| of a leaf, and that leaf's path."""
    flat = jax.tree_util.tree_leaves_with_path(want)
    errors = [
        (float(np.max(np.abs(a - b)) / max(float(np.max(np.abs(b))), 1e-30)), jax.tree_util.keystr(path))
        for a, (path, b) in zip(jax.tree.leaves(got), flat, strict=True)
    ]
    return max(errors)
