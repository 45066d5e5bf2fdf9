"""NumPy float64 implementation of clipping, the learning rate schedule and AdamW."""

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
from jaxtrain.nn.layer_table import mixture_layers
from jaxtrain.prove.measure import Outcome, StepRunner
from jaxtrain.train.resolve import Bound

Tree = Any


def missing_in_numpy(config: OptimizerConfig) -> str:
    """Why `reference_steps` cannot check an optimizer; empty if it can. It knows adamw with a cosine schedule."""
    for setting, value, known in (("name", config.name, "adamw"), ("schedule", config.schedule, "cosine")):
        if value != known:
            return f"optimizer.{setting} is {value}: the NumPy reference implements {known} only"
    return ""


def reference_steps(setup: Bound, runner: StepRunner, initial: Tree, batches: Sequence[HostBatch]) -> Outcome:
    """Metrics and states that AdamW must give after each batch, with the gradients that `runner` computes.

    Sources: Loshchilov & Hutter 2019 (AdamW); linear warm-up, then cosine decay.
    """
    config, shapes = setup.config.optimizer, flatten_paths(setup.model.params)
    params = {name: leaf.astype(np.float64) for name, leaf in flatten_paths(initial["params"]).items()}
    first, second = ({name: np.zeros(leaf.shape) for name, leaf in params.items()} for _ in range(2))
    tokens, metrics, states = 0, [], []
    for step, batch in enumerate(batches):
        weights = jax.tree.map(np.float32, _unflatten_like(initial["params"], params))
        gradient, sums = runner.gradients({**initial, "params": weights}, batch)
        gradients = {name: leaf.astype(np.float64) for name, leaf in flatten_paths(gradient).items()}
        norm = math.sqrt(sum(float(np.sum(leaf**2)) for leaf in gradients.values()))
        clip = min(1.0, (config.clip_norm or math.inf) / norm)
        rate = _cosine_rate(config, setup.config.train.steps, step)
        for name, g in gradients.items():
            first[name] = config.beta1 * first[name] + (1 - config.beta1) * clip * g
            second[name] = config.beta2 * second[name] + (1 - config.beta2) * (clip * g) ** 2
            direction, _ = adam_direction(config, {"mu": first, "nu": second}, name, step + 1)
            decay = config.weight_decay * _is_decayed(shapes[name]) * params[name]
            params[name] = params[name] - rate * (direction + decay)
        _update_router_bias(params, setup.config.model, sums)
        scored = int(np.sum(batch["labels"] != IGNORE))
        tokens += scored
        metrics.append({
            "loss": np.float64(sums["loss"]) / scored, "grad_norm": norm, "learning_rate": rate,
            "scored_tokens": np.int32(scored), "applied": np.True_,
        })  # fmt: skip
        moments = {"mu": first, "nu": second}
        states.append({
            "params": _unflatten_like(initial["params"], params),
            "opt": _optimizer_state(initial["opt"], moments, step + 1),
            "steps": np.int32(step + 1), "tokens": np.array([0, tokens], np.int32),
        })  # fmt: skip
    return Outcome([], [], metrics, states)


def adam_direction(
    config: OptimizerConfig, moments: dict[str, dict[str, np.ndarray]], path: str, step: int
) -> tuple[np.ndarray, np.ndarray]:
    """Adam's direction without weight decay, and the root of the bias-corrected second moment."""
    mean = moments["mu"][path] / (1 - config.beta1**step)
    root = np.sqrt(moments["nu"][path] / (1 - config.beta2**step))
    return mean / (root + config.eps), root


def _update_router_bias(params: dict[str, np.ndarray], model: ModelConfig, sums: Tree) -> None:
    """Move the routers' correction biases by bias_rate towards an even load (Wang et al. 2024, algorithm 1)."""
    if not model.moe.experts or model.moe.bias_rate is None:
        return
    load_NX, start = np.asarray(sums["load"], np.float64), 0
    step_NX = model.moe.bias_rate * np.sign(load_NX.mean(axis=1, keepdims=True) - load_NX)
    for path, layers in mixture_layers(model).items():
        params["/".join((*path, "router", "correction"))] += step_NX[start : start + layers]
        start += layers


def _cosine_rate(config: OptimizerConfig, total: int, step: int) -> float:
    """Learning rate: linear warm-up, then half a cosine period down to final_ratio."""
    if step < config.warmup:
        return config.learning_rate * (step + 1) / config.warmup
    progress = (step - config.warmup) / (total - config.warmup)
    low = config.final_ratio
    return config.learning_rate * (low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2)


def _is_decayed(param: Param) -> bool:
    """Whether weight decay applies: to matrices, with stacked dims left out and heads x head width counted once."""
    names = [name for name in param.names if name not in (*STACKS, "experts")]
    return len(names) - ("heads" in names or "kv_heads" in names) >= 2


def _unflatten_like(tree: Tree, flat: dict[str, np.ndarray]) -> Tree:
    paths = iter(flatten_paths(tree))
    return jax.tree.map(lambda _: flat[next(paths)].copy(), tree)


def _optimizer_state(opt: Tree, moments: dict[str, dict[str, np.ndarray]], count: int) -> Tree:
    """A tree like `opt` with these moments; every other leaf is the step count."""

    def leaf(path: Any, like: np.ndarray) -> np.ndarray:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        for moment, values in moments.items():
            _, found, parameter = name.partition(f"/{moment}/")
            if found:
                return values[parameter].copy()
        return np.asarray(count, like.dtype)

    return jax.tree_util.tree_map_with_path(leaf, opt)
