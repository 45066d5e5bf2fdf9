"""Linear maps whose three matmuls run in 8 bits, by a recipe."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.config import ConfigError, PrecisionConfig
from jaxtrain.mesh.constraints import constrain_to
from jaxtrain.ops.recipes import RECIPES, Contraction, Quantized, Recipe
from jaxtrain.ops.reference import uses_reference

PASSES = ("forward", "dgrad", "wgrad")
"""The product itself, and those that give the gradients of the input and of the weight."""
Residuals = tuple[jax.Array, jax.Array | Quantized, jax.Array]
_PRECISION: ContextVar[PrecisionConfig | None] = ContextVar("jaxtrain_low_precision", default=None)


def recipe_of(config: PrecisionConfig) -> Recipe | None:
    """The recipe that the settings name, with their dtype of cotangents; None where all matmuls are as compute says."""
    if config.recipe is None:
        return None
    recipe = RECIPES[config.recipe]
    if config.recipe_gradients is None:
        return recipe
    return dataclasses.replace(recipe, backward=jnp.dtype(f"float8_{config.recipe_gradients}"))


@contextmanager
def use_recipe(config: PrecisionConfig) -> Iterator[None]:
    """While tracing here, the matmuls of config.recipe_kinds follow config.recipe."""
    token = _PRECISION.set(config)
    try:
        yield
    finally:
        _PRECISION.reset(token)


def skipped_layers() -> tuple[int, int]:
    """How many first and last layers of the model follow no recipe here."""
    config = _PRECISION.get()
    return (0, 0) if config is None or config.recipe is None else (config.recipe_skip_first, config.recipe_skip_last)


@contextmanager
def recipe_only(follows: bool) -> Iterator[None]:
    """While tracing here, matmuls follow the recipe in use only if `follows`."""
    config = _PRECISION.get()
    if follows or config is None:
        yield
        return
    with use_recipe(config.model_copy(update={"recipe": None})):
        yield


def recipe_for(kind: str) -> Recipe | None:
    """The recipe of matmuls of a kind here, None for the compute dtype."""
    config = _PRECISION.get()
    return recipe_of(config) if config is not None and kind in config.recipe_kinds else None


def scope(recipe: str, path: str, step: str) -> str:
    """Name of a matmul in a compiled program: recipe, parameter and which of PASSES."""
    return f"{recipe}:{path}:{step}"


def contract(
    recipe: Recipe, path: str, equation: str, x: jax.Array, w: jax.Array, gathered: NamedSharding | None
) -> jax.Array:
    """jnp.einsum(equation, x, w) of operands quantized by a recipe, in x's dtype; so are both gradients.

    `path` names the weight in compiled programs. `gathered`: sharding of a weight that must be gathered before it is
    multiplied, which it is in 8 bits. w may be wider than x, as its gradient is then (numerics/wide.py).
    Raises ConfigError where a contracted dim is no multiple of the recipe's blocks.
    """
    contraction = Contraction(equation)
    shapes = dict(zip("".join(contraction.operands), (*x.shape, *w.shape), strict=True))
    for step, each in zip(PASSES, (contraction, contraction.by_left, contraction.by_right), strict=True):
        name = each.operands[0][each.dims[0][-1]]
        if shapes[name] % recipe.multiple:
            raise ConfigError(
                f"precision.recipe {recipe.name}: {path} ({step}) sums over {shapes[name]} elements, which is no "
                f"multiple of the blocks of {recipe.multiple}: change that size, use float8, or leave "
                f"{path.split('.')[0]} out of precision.recipe_kinds"
            )
    if uses_reference():
        # Operands as 16 bits round them, then by the recipe; products and sums in float32.
        x32, w32 = (each.astype(x.dtype).astype(jnp.float32) for each in (x, w))
        return _contract(recipe, path, equation, None, x32, w32).astype(x.dtype)
    return _contract(recipe, path, equation, gathered, x, w)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _contract(
    recipe: Recipe, path: str, equation: str, gathered: NamedSharding | None, x: jax.Array, w: jax.Array
) -> jax.Array:
    return _forward(recipe, path, equation, gathered, x, w)[0]


def _forward(
    recipe: Recipe, path: str, equation: str, gathered: NamedSharding | None, x: jax.Array, w: jax.Array
) -> tuple[jax.Array, Residuals]:
    contraction = Contraction(equation)
    inputs, weights = contraction.dims
    with jax.named_scope(scope(recipe.name, path, PASSES[0])):
        weight = recipe.quantize(w.astype(x.dtype), weights, recipe.forward)
        left = recipe.quantize(x, inputs, recipe.forward)
        out = recipe.matmul(contraction, left, _gather(weight, gathered), x.dtype)
    # The weight in 8 bits in its shards: where the product is recomputed, its gradient's product shares the gather.
    saved = weight if recipe.one_scale and gathered is not None else w
    return out, (x, saved, jnp.zeros((), w.dtype))


def _backward(
    recipe: Recipe, path: str, equation: str, gathered: NamedSharding | None, residuals: Residuals,
    cotangent: jax.Array,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    x, weight, like = residuals
    by_x, by_w = Contraction(equation).by_left, Contraction(equation).by_right
    with jax.named_scope(scope(recipe.name, path, PASSES[1])):
        outputs, weights = by_x.dims
        if not isinstance(weight, Quantized):
            weight = recipe.quantize(weight.astype(x.dtype), weights, recipe.forward)
        left = recipe.quantize(cotangent, outputs, recipe.backward)
        dx = recipe.matmul(by_x, left, _gather(weight, gathered), x.dtype)
    with jax.named_scope(scope(recipe.name, path, PASSES[2])):
        inputs, outputs = by_w.dims
        left, right = recipe.quantize(x, inputs, recipe.forward), recipe.quantize(cotangent, outputs, recipe.backward)
        dw = recipe.matmul(by_w, left, right, like.dtype)
    return dx, dw


_contract.defvjp(_forward, _backward)


def _gather(weight: Quantized, gathered: NamedSharding | None) -> Quantized:
    """The weight where it is multiplied; its scales follow where they have as many parts."""
    if gathered is None:
        return weight
    mesh, spec = gathered.mesh, tuple(gathered.spec)
    spec += (None,) * (weight.scale.ndim - len(spec))
    parts = (1 if axes is None else math.prod(mesh.shape[axis] for axis in _tuple(axes)) for axes in spec)
    divided = (axes if size % n == 0 else None for axes, size, n in zip(spec, weight.scale.shape, parts, strict=True))
    scale = constrain_to(weight.scale, NamedSharding(mesh, PartitionSpec(*divided)))
    return Quantized(constrain_to(weight.values, gathered), scale)


def _tuple(axes: Any) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)
