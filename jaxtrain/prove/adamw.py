"""Clipping, the schedule and AdamW once more, in NumPy and float64, by the formulas alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxtrain.config import ModelConfig, OptimizerConfig
from jaxtrain.data import IGNORE
from jaxtrain.data.packing import HostBatch
from jaxtrain.mesh.layout import flatten_paths
from jaxtrain.mesh.param import STACKS, Param
from jaxtrain.nn.decoder import mixture_layers
from jaxtrain.prove.measure import Bench, Outcome
from jaxtrain.train.setup import Setup

Tree = Any


def reference_steps(setup: Setup, bench: Bench, initial: Tree, batches: Sequence[HostBatch]) -> Outcome:
    """What the updates must give with the gradients of `bench` (Loshchilov & Hutter 2019; cosine after warm-up)."""
    config, shapes = setup.config.optimizer, flatten_paths(setup.model.params)
    params = {name: leaf.astype(np.float64) for name, leaf in flatten_paths(initial["params"]).items()}
    first, second = ({name: np.zeros(leaf.shape) for name, leaf in params.items()} for _ in range(2))
    tokens, metrics, states = 0, [], []
    for update, batch in enumerate(batches):
        weights = jax.tree.map(np.float32, _like(initial["params"], params))
        gradient, sums = bench.gradients({**initial, "params": weights}, batch)
        cotangents = {name: leaf.astype(np.float64) for name, leaf in flatten_paths(gradient).items()}
        norm = math.sqrt(sum(float(np.sum(leaf**2)) for leaf in cotangents.values()))
        clip = min(1.0, (config.clip_norm or math.inf) / norm)
        rate = _rate(config, setup.config.train.steps, update)
        for name, cotangent in cotangents.items():
            first[name] = config.beta1 * first[name] + (1 - config.beta1) * clip * cotangent
            second[name] = config.beta2 * second[name] + (1 - config.beta2) * (clip * cotangent) ** 2
            mean = first[name] / (1 - config.beta1 ** (update + 1))
            root = np.sqrt(second[name] / (1 - config.beta2 ** (update + 1)))
            decay = config.weight_decay * _decays(shapes[name]) * params[name]
            params[name] = params[name] - rate * (mean / (root + config.eps) + decay)
        _balance(params, setup.config.model, sums)
        scored = int(np.sum(batch["labels"] != IGNORE))
        tokens += scored
        metrics.append({
            "loss": np.float64(sums["loss"]) / scored, "grad_norm": norm, "learning_rate": rate,
            "scored_tokens": np.int32(scored), "applied": np.True_,
        })  # fmt: skip
        moments = {"mu": first, "nu": second}
        states.append({
            "params": _like(initial["params"], params), "opt": _opt(initial["opt"], moments, update + 1),
            "steps": np.int32(update + 1), "tokens": np.array([0, tokens], np.int32),
        })  # fmt: skip
    return Outcome([], [], metrics, states)


def _balance(params: dict[str, np.ndarray], model: ModelConfig, sums: Tree) -> None:
    """Correction biases move by bias_rate towards an even load (Wang et al. 2024, algorithm 1)."""
    if not model.moe.experts or model.moe.bias_rate is None:
        return
    load_NX, at = np.asarray(sums["load"], np.float64), 0
    step_NX = model.moe.bias_rate * np.sign(load_NX.mean(axis=1, keepdims=True) - load_NX)
    for path, layers in mixture_layers(model).items():
        params["/".join((*path, "router", "correction"))] += step_NX[at : at + layers]
        at += layers


def _rate(config: OptimizerConfig, updates: int, update: int) -> float:
    """Linear warm-up, then half a cosine wave down to final_ratio."""
    if update < config.warmup:
        return config.learning_rate * (update + 1) / config.warmup
    way = (update - config.warmup) / (updates - config.warmup)
    low = config.final_ratio
    return config.learning_rate * (low + (1 - low) * (1 + math.cos(math.pi * way)) / 2)


def _decays(param: Param) -> bool:
    """Matrices: what has two dims beside stacks, the heads and their width being one."""
    names = [name for name in param.names if name not in (*STACKS, "experts")]
    return len(names) - ("heads" in names or "kv_heads" in names) >= 2


def _like(tree: Tree, flat: dict[str, np.ndarray]) -> Tree:
    paths = iter(flatten_paths(tree))
    return jax.tree.map(lambda _: flat[next(paths)].copy(), tree)


def _opt(opt: Tree, moments: dict[str, dict[str, np.ndarray]], count: int) -> Tree:
    def leaf(path: Any, like: np.ndarray) -> np.ndarray:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        for kind, values in moments.items():
            _, found, parameter = name.partition(f"/{kind}/")
            if found:
                return values[parameter].copy()
        return np.asarray(count, like.dtype)

    return jax.tree_util.tree_map_with_path(leaf, opt)
