"""Optimizers, learning-rate schedules and the global gradient norm.

An optimizer returns a *direction*: it includes decoupled weight decay, not the learning rate. The train step applies
`p - learning_rate * direction`. Paths of its state end in the paths of parameters, so that a layout finds the parameter
of a moment by path suffix and shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from jaxtrain.config import ConfigError, OptimizerConfig, Registry
from jaxtrain.mesh.param import STACKS, Param

OptimizerFactory = Callable[[OptimizerConfig, Any], optax.GradientTransformation]
"""(settings, tree of Param) -> direction without learning rate and weight decay, which `build_optimizer` adds.

Sharding finds the parameter of a leaf of the state by its path, which must end in the parameter's path, and by its
shape: moments of the parameters' tree structure (optax.trace, optax.scale_by_adam) satisfy it.
"""

OPTIMIZERS: Registry[OptimizerFactory] = Registry("optimizer.name")
"""optimizer.name -> factory; user code can extend it."""


@dataclass(frozen=True)
class DecayShape:
    """Decay of the learning rate from its peak to optimizer.final_ratio of the peak."""

    decayed: Callable[[jax.Array], jax.Array]
    """Progress through the decay in [0, 1] -> the part of the decay that is done, in [0, 1]."""
    final: bool = False
    """Whether only the last optimizer.decay units decay; else everything after warm-up."""
    endless: bool = False
    """Whether the schedule has no end, so that warm-up may be longer than the run."""


LEARNING_RATES: Registry[DecayShape] = Registry("optimizer.schedule")
"""optimizer.schedule -> DecayShape; user code can extend it."""

LEARNING_RATES.register("cosine")(DecayShape(lambda progress: 0.5 - 0.5 * jnp.cos(jnp.pi * progress)))
LEARNING_RATES.register("linear")(DecayShape(lambda progress: progress))
LEARNING_RATES.register("wsd")(DecayShape(lambda progress: progress, final=True))
LEARNING_RATES.register("constant")(DecayShape(jnp.zeros_like, endless=True))


def build_optimizer(config: OptimizerConfig, params: Any) -> optax.GradientTransformation:
    """The optimizer for a tree of Param: its `update(gradients, state, parameters)` returns the float32 direction.

    adamw: Loshchilov & Hutter 2019 as in PyTorch (bias-corrected moments, eps outside the root).
    lion: Chen et al. 2023. adafactor: Shazeer & Stern 2018 with second moments factored per layer, decay exponent 0.8
    and RMS clip 1, without momentum and relative steps (it does not use beta1, beta2 and eps).
    muon: Jordan 2024 on hidden matrices, AdamW on all other parameters. Orthogonalised directions are scaled by
    0.2 sqrt(max(inputs, outputs)) (Liu et al. 2025), which gives them the RMS of an AdamW direction: both parts share
    one learning rate and one weight decay. Raises ConfigError for an unknown optimizer.
    """
    direction = OPTIMIZERS[config.name](config, params)
    return optax.chain(direction, optax.add_decayed_weights(config.weight_decay, mask=decay_mask(params)))


def decay_mask(params: Any) -> Any:
    """Tree of bool, True where weights decay: matrices, the embedding, the head and learned positions.

    A matrix has an input and an output side besides the dims that stack layers or experts. Biases and normalisation
    scales of any rank do not decay: [heads, head_dim] is one side.
    """
    return _map(_is_matrix, params)


def learning_rate(
    config: OptimizerConfig, total_steps: int, steps: jax.typing.ArrayLike, tokens: jax.typing.ArrayLike
) -> jax.Array:
    """Learning rate of the next optimizer step, a float32 scalar; the counts may be traced.

    `steps`: steps applied so far, without skipped ones. Step s of a warm-up of w steps has (s + 1) / w of the peak, and
    the decay begins at step w. `tokens`: scored tokens up to and including this step. `total_steps` is the end of the
    schedule if optimizer.total is null. Raises ConfigError where warm-up and decay do not fit before the end.
    """
    shape, total = LEARNING_RATES[config.schedule], schedule_end(config, total_steps)
    by_tokens = config.unit == "tokens"
    done = jnp.asarray(tokens if by_tokens else steps, jnp.float32)
    # As floats: JAX reads Python integers as int32, which token counts exceed.
    warmup, start = float(config.warmup), float(total - config.decay if shape.final else config.warmup)
    rising = (done if by_tokens else done + 1.0) / max(warmup, 1.0)
    progress = jnp.clip((done - start) / max(total - start, 1.0), 0.0, 1.0)
    falling = 1.0 - (1.0 - config.final_ratio) * shape.decayed(progress)
    return config.learning_rate * jnp.where(done < warmup, rising, falling)


def schedule_end(config: OptimizerConfig, total_steps: int) -> int:
    """Units until the end of the schedule; raises ConfigError for phases that do not fit before it."""
    shape, total = LEARNING_RATES[config.schedule], config.total or total_steps
    if shape.final and config.decay == 0:
        raise ConfigError(
            f"optimizer.schedule is {config.schedule} and optimizer.decay is 0: set optimizer.decay, units of the "
            "final decay, or use optimizer.schedule constant"
        )
    phases = config.warmup + (config.decay if shape.final else 0)
    if not shape.endless and phases > total:
        raise ConfigError(
            f"optimizer.warmup {config.warmup}"
            + (f" + optimizer.decay {config.decay}" if shape.final else "")
            + f" exceeds the schedule's end, {total} {config.unit} "
            + ("(optimizer.total)" if config.total else "(train.steps)")
            + ": shorten warm-up or decay, lengthen the run, or set optimizer.total, where the schedule ends"
        )
    return total


def global_norm(tree: Any) -> jax.Array:
    """Euclidean norm of all elements of a tree of global arrays, a float32 scalar."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(jnp.sum(jnp.stack(squares)))


def all_finite(tree: Any) -> jax.Array:
    """Whether every element of a tree of global arrays is finite, a bool scalar."""
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    # Counts, not a conjunction: sums of all leaves travel in one all-reduce.
    counts = [jnp.sum(~jnp.isfinite(leaf), dtype=jnp.int32) for leaf in floats]
    return jnp.sum(jnp.stack(counts)) == 0


def clip_scale(norm: jax.Array, limit: float | None) -> jax.Array:
    """Factor that scales a gradient of this norm to at most `limit`: exactly 1 within the limit or without one."""
    return jnp.ones_like(norm) if limit is None else jnp.where(norm > limit, limit / norm, 1.0)


@OPTIMIZERS.register("adamw")
def _adam(config: OptimizerConfig, params: Any) -> optax.GradientTransformation:
    return optax.scale_by_adam(config.beta1, config.beta2, config.eps)


@OPTIMIZERS.register("lion")
def _lion(config: OptimizerConfig, params: Any) -> optax.GradientTransformation:
    return optax.scale_by_lion(config.beta1, config.beta2)


@OPTIMIZERS.register("adafactor")
def _adafactor(config: OptimizerConfig, params: Any) -> optax.GradientTransformation:
    """Factored and clipped per layer: stacked parameters of one stack size form a group, vmapped over the stack."""
    single = optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
    stacked = optax.GradientTransformation(jax.vmap(single.init), jax.vmap(single.update))
    groups = _map(lambda p: str(p.shape[0]) if p.names and p.names[0] in STACKS else "single", params)
    names = set(jax.tree.leaves(groups))
    return optax.partition({name: single if name == "single" else stacked for name in names}, groups)


@OPTIMIZERS.register("muon")
def _muon(config: OptimizerConfig, params: Any) -> optax.GradientTransformation:
    dims = _map(lambda p: _muon_dims(p) if _is_hidden(p) else optax.MaskedNode(), params)
    groups = _map(lambda p: "muon" if _is_hidden(p) else "adam", params)

    def scale(directions: Any, _: Any = None) -> Any:
        return jax.tree.map(lambda u, d: u * _adam_rms_factor(u.shape, d), directions, dims)

    muon = optax.chain(scale_by_muon(beta=config.beta1, weight_dimension_numbers=dims), optax.stateless(scale))
    return optax.partition({"muon": muon, "adam": _adam(config, params)}, groups)


def _muon_dims(param: Param) -> MuonDimensionNumbers:
    inputs, *outputs = _sides(param)
    return MuonDimensionNumbers(inputs, tuple(dim for side in outputs for dim in side))


def _adam_rms_factor(shape: tuple[int, ...], dims: MuonDimensionNumbers) -> float:
    """Factor from the RMS 1/sqrt(max(inputs, outputs)) of an orthogonal matrix to 0.2, the usual RMS of AdamW."""
    extents = [math.prod(shape[dim] for dim in side) for side in dims]  # type: ignore[union-attr]
    return 0.2 * math.sqrt(max(extents))


def _is_hidden(param: Param) -> bool:
    return _is_matrix(param) and not {"vocab", "positions"} & set(param.names)


def _is_matrix(param: Param) -> bool:
    return len(_sides(param)) >= 2


def _sides(param: Param) -> list[tuple[int, ...]]:
    """Dims of each side of a parameter: [heads, head_dim] is one side; leading dims that stack modules are left out."""
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
