"""Update rules, learning-rate schedules and the global gradient norm.

An update rule yields a *direction*: decoupled weight decay is in it, the learning rate is not; the step applies
`p - learning_rate * direction`. Its state keeps the parameters' paths, so that a layout recognises a moment by
path suffix and shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import takewhile
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from jaxtrain.config import ConfigError, OptimizerConfig
from jaxtrain.mesh.param import STACKS, Param


def build_optimizer(config: OptimizerConfig, params: Any) -> optax.GradientTransformation:
    """The update rule for a tree of Param: `update(gradients, state, parameters)` gives the direction, float32.

    adamw: Loshchilov & Hutter 2019 as in PyTorch (bias-corrected moments, eps outside the root).
    lion: Chen et al. 2023. adafactor: Shazeer & Stern 2018 with factored second moments per layer, its own decay
    exponent 0.8 and RMS clip 1, without momentum and relative steps (reads neither beta1, beta2 nor eps).
    muon: Jordan 2024 on hidden matrices, AdamW on all else; orthogonalised directions are scaled by
    0.2 sqrt(max(inputs, outputs)) (Liu et al. 2025), the RMS of an AdamW direction, so that one learning rate and one
    weight decay serve both.
    """
    rule = {"adamw": _adam, "lion": _lion, "adafactor": _adafactor, "muon": _muon}[config.name]
    return optax.chain(rule(config, params), optax.add_decayed_weights(config.weight_decay, mask=decay_mask(params)))


def decay_mask(params: Any) -> Any:
    """Tree of bool, True where weights decay: matrices, the embedding, the head and learned positions.

    A matrix has an input and an output side besides its stack of layers or experts. So biases and normalisation
    scales do not decay whatever their rank: the two dimensions of [heads, head_dim] are one side.
    """
    return _map(_is_matrix, params)


def learning_rate(
    config: OptimizerConfig, total_steps: int, updates: jax.typing.ArrayLike, tokens: jax.typing.ArrayLike
) -> jax.Array:
    """Learning rate of the next update, a float32 scalar; may be traced.

    `updates`: updates applied so far (a skipped one does not count), so update u of a warm-up of w has (u + 1) / w of
    the peak and update w is the first of the fall. `tokens`: scored tokens through this update, its own included.
    `updates_total` is the end where optimizer.total is null. Raises ConfigError where the phases exceed the end.
    """
    total = schedule_end(config, total_steps)
    by_tokens = config.unit == "tokens"
    done = jnp.asarray(tokens if by_tokens else updates, jnp.float32)
    # floats: token counts exceed the int32 that JAX makes of Python's integers
    warmup, start = float(config.warmup), float(total - config.decay if config.schedule == "wsd" else config.warmup)
    rising = (done if by_tokens else done + 1.0) / max(warmup, 1.0)
    way = jnp.clip((done - start) / max(total - start, 1.0), 0.0, 1.0)
    fallen = {"constant": jnp.zeros_like(way), "cosine": 0.5 - 0.5 * jnp.cos(jnp.pi * way)}.get(config.schedule, way)
    falling = 1.0 - (1.0 - config.final_ratio) * fallen
    return config.learning_rate * jnp.where(done < warmup, rising, falling)


def schedule_end(config: OptimizerConfig, total_steps: int) -> int:
    """Units at which the schedule ends; ConfigError where warm-up and fall do not fit before it."""
    total = config.total or total_steps
    phases = config.warmup + (config.decay if config.schedule == "wsd" else 0)
    if config.schedule != "constant" and phases > total:
        raise ConfigError(
            f"optimizer.warmup {config.warmup}"
            + (f" + optimizer.decay {config.decay}" if config.schedule == "wsd" else "")
            + f" exceeds the schedule's end, {total} {config.unit} "
            + ("(optimizer.total)" if config.total else "(train.steps)")
            + ": shorten the phases or lengthen the run"
        )
    return total


def global_norm(tree: Any) -> jax.Array:
    """Root of the sum of squares of every element of a tree of global arrays, float32, each counted once."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(jnp.sum(jnp.stack(squares)))


def clip_scale(norm: jax.Array, limit: float | None) -> jax.Array:
    """Factor that brings a gradient of this norm to at most `limit`: exactly 1 within it, or where it is null."""
    return jnp.ones_like(norm) if limit is None else jnp.where(norm > limit, limit / norm, 1.0)


def _adam(config: OptimizerConfig, params: Any) -> optax.GradientTransformation:
    return optax.scale_by_adam(config.beta1, config.beta2, config.eps)


def _lion(config: OptimizerConfig, params: Any) -> optax.GradientTransformation:
    return optax.scale_by_lion(config.beta1, config.beta2)


def _adafactor(config: OptimizerConfig, params: Any) -> optax.GradientTransformation:
    """Factoring and clipping must not mix layers: each size of stack is a group, mapped over its first dimension."""
    one = optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
    stacked = optax.GradientTransformation(jax.vmap(one.init), jax.vmap(one.update))
    groups = _map(lambda p: str(p.shape[0]) if p.names and p.names[0] in STACKS else "single", params)
    names = set(jax.tree.leaves(groups))
    return optax.partition({name: one if name == "single" else stacked for name in names}, groups)


def _muon(config: OptimizerConfig, params: Any) -> optax.GradientTransformation:
    dims = _map(lambda p: _muon_dims(p) if _is_hidden(p) else optax.MaskedNode(), params)
    groups = _map(lambda p: "muon" if _is_hidden(p) else "adam", params)

    def scale(updates: Any, _: Any = None) -> Any:
        return jax.tree.map(lambda u, d: u * _like_adam(u.shape, d), updates, dims)

    muon = optax.chain(scale_by_muon(beta=config.beta1, weight_dimension_numbers=dims), optax.stateless(scale))
    return optax.partition({"muon": muon, "adam": _adam(config, params)}, groups)


def _muon_dims(param: Param) -> MuonDimensionNumbers:
    inputs, *outputs = _sides(param)
    return MuonDimensionNumbers(inputs, tuple(dim for side in outputs for dim in side))


def _like_adam(shape: tuple[int, ...], dims: MuonDimensionNumbers) -> float:
    """Factor from an orthogonal matrix, RMS 1/sqrt(max(inputs, outputs)), to an AdamW direction's usual RMS of 0.2."""
    extents = [math.prod(shape[dim] for dim in side) for side in dims]  # type: ignore[union-attr]
    return 0.2 * math.sqrt(max(extents))


def _is_hidden(param: Param) -> bool:
    return _is_matrix(param) and not {"vocab", "positions"} & set(param.names)


def _is_matrix(param: Param) -> bool:
    return len(_sides(param)) >= 2


def _sides(param: Param) -> list[tuple[int, ...]]:
    """Dimensions of each side of a matrix: a head's two dimensions are one side, leading stacks are none."""
    sides: list[tuple[int, ...]] = []
    names = param.names
    stacked = len(list(takewhile({*STACKS, "experts"}.__contains__, names)))
    for dim in range(stacked, len(names)):
        if names[dim] == "head_dim" and dim > stacked and names[dim - 1] in ("heads", "kv_heads"):
            sides[-1] += (dim,)
        else:
            sides.append((dim,))
    return sides


def _map(function: Callable[[Param], Any], params: Any) -> Any:
    return jax.tree.map(function, params, is_leaf=lambda p: isinstance(p, Param))
