"""Recipes of 8 bits against an independent quantizer (ml_dtypes, numpy), and the same values on every mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.config import ConfigError, validate
from jaxtrain.mesh.topology import DescribedDevice
from jaxtrain.ops.low_precision import contract, recipe_of
from jaxtrain.ops.recipes import RECIPES
from jaxtrain.ops.recipes.recipe import power_of_two
from jaxtrain.train.recipe import check_recipe

B, L, D, H, E = 2, 64, 96, 3, 32
EQUATION = "BLD,DHE->BLHE"


def quantized(x: np.ndarray, recipe: str, dims: tuple[int, ...], dtype: Any) -> np.ndarray:
    """What an operand becomes, in float64: divided by powers of two, rounded, multiplied again."""
    x = np.asarray(x, np.float64)
    if recipe == "mxfp8":
        along = dims[-1]
        moved = np.moveaxis(x, along, -1).reshape(-1, 32)
        largest = np.abs(moved).max(axis=1, keepdims=True)
    else:
        moved = x
        axes = dims if recipe == "float8_rowwise" else tuple(range(x.ndim))
        largest = np.abs(x).max(axis=axes, keepdims=True)
    top = float(ml_dtypes.finfo(dtype).max)
    _, exponent = np.frexp(np.maximum(largest, 2.0**-60) / top)
    scale = np.ldexp(1.0, exponent)
    values = (moved / scale).astype(np.float32).astype(dtype).astype(np.float64) * scale
    if recipe != "mxfp8":
        return values
    shape = np.moveaxis(x, dims[-1], -1).shape
    return np.moveaxis(values.reshape(shape), -1, dims[-1])


def operands(seed: int = 0, outliers: bool = True) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, w and a cotangent, with rows of very different size and zeros."""
    rng = np.random.default_rng(seed)
    x, w, g = (rng.standard_normal(shape).astype(np.float32) for shape in ((B, L, D), (D, H, E), (B, L, H, E)))
    if outliers:
        x *= 2.0 ** rng.integers(-20, 12, (B, L, 1))
        g *= 2.0 ** rng.integers(-40, 0, (B, L, 1, 1))
        x[0, 3], g[1, 5] = 0.0, 0.0
    return x, w, g


def product(recipe: str) -> Any:
    return lambda x, w: contract(RECIPES[recipe], "attention.query", EQUATION, x, w, None)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_three_products_are_those_of_the_quantized_operands(recipe: str) -> None:
    x, w, g = operands()
    out, pullback = jax.vjp(product(recipe), x, w)
    dx, dw = pullback(g)
    forward, backward = (np.dtype(each) for each in (RECIPES[recipe].forward, RECIPES[recipe].backward))
    wanted = {
        "forward": (out, "bld,dhe->blhe", quantized(x, recipe, (2,), forward), quantized(w, recipe, (0,), forward)),
        "dgrad": (dx, "blhe,dhe->bld", quantized(g, recipe, (2, 3), backward), quantized(w, recipe, (1, 2), forward)),
        "wgrad": (dw, "bld,blhe->dhe", quantized(x, recipe, (0, 1), forward), quantized(g, recipe, (0, 1), backward)),
    }
    for name, (got, equation, left, right) in wanted.items():
        want = np.einsum(equation, left, right)
        # float32 sums: relative to the sum of absolute products.
        size = np.einsum(equation, np.abs(left), np.abs(right))
        assert np.all(np.abs(np.asarray(got, np.float64) - want) <= 1e-6 * size + 1e-30), name
    assert not np.asarray(out)[0, 3].any() and not np.asarray(dx)[1, 5].any()


@given(largest=st.floats(2.0**-50, 2.0**100, width=32), dtype=st.sampled_from([jnp.float8_e4m3fn, jnp.float8_e5m2]))
@settings(max_examples=200, deadline=None)
def test_a_scale_is_the_least_power_of_two_that_fits_or_twice_it(largest: float, dtype: Any) -> None:
    scale = float(power_of_two(jnp.float32(largest), dtype))
    top = float(jnp.finfo(dtype).max)
    assert np.frexp(scale)[0] == 0.5
    assert largest / scale <= top < 2 * 2 * largest / scale


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(recipe: str, value: float) -> None:
    x, w, _ = operands()
    x[1, 7, 40] = value
    assert not np.isfinite(np.asarray(product(recipe)(x, w))[1, 7]).any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_16_bits_change_dtypes_and_little_else(recipe: str) -> None:
    x, w, g = operands(outliers=False)
    wide, wide_pullback = jax.vjp(product(recipe), x, w)
    out, pullback = jax.vjp(product(recipe), jnp.bfloat16(x), w)
    dx, dw = pullback(jnp.bfloat16(g))
    assert (out.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    for got, want in zip((out, dx, dw), (wide, *wide_pullback(g)), strict=True):
        assert np.linalg.norm(np.float32(got) - want) < 0.04 * np.linalg.norm(want)
    # float16 has less range than products of quantized values.
    assert np.isfinite(np.asarray(product(recipe)(jnp.float16(100 * x), jnp.float16(w)))).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_quantized_values_are_bit_for_bit_the_same_on_every_mesh(recipe: str) -> None:
    x, _, g = operands()
    chosen = RECIPES[recipe]
    cases = [(x, (2,), chosen.forward), (x, (0, 1), chosen.forward), (g, (2, 3), chosen.backward)]
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "seq"))
    for each, dims, dtype in cases:
        want = chosen.quantize(each, dims, dtype)
        for spec in (PartitionSpec("data"), PartitionSpec(None, ("data", "seq")), PartitionSpec("data", "seq")):
            sharded = jax.device_put(each, NamedSharding(mesh, spec))
            got = jax.jit(chosen.quantize, static_argnums=(1, 2))(sharded, dims, dtype)
            for a, b in zip(got, want, strict=True):
                np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_a_contracted_dim_that_the_blocks_do_not_divide_is_named() -> None:
    x, w = np.ones((B, 40, D), np.float32), np.ones((D, H, E), np.float32)
    with pytest.raises(ConfigError, match=r"mxfp8: attention\.query \(wgrad\) sums over 40 elements"):
        product("mxfp8")(x, w)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recipe": "nvfp4"}, "nvfp4 is not available.*use mxfp8"),
        ({"recipe": "float9"}, "input should be 'float8', 'float8_rowwise' or 'mxfp8'"),
        ({"recipe": "float8", "recipe_kinds": ["mlp", "experts"]}, "recipe_kinds has experts"),
    ],
)
def test_what_does_not_exist_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate({"precision": settings})


@pytest.mark.parametrize(
    ("recipe", "card", "fits"), [("float8", "8.0", "null"), ("mxfp8", "9.0", "float8 or float8_rowwise")]
)
def test_a_card_without_the_arithmetic_is_refused_with_what_fits(recipe: str, card: str, fits: str) -> None:
    device = DescribedDevice(0, 0, device_kind="card", compute_capability=card)
    precision = validate({"precision": {"recipe": recipe}}).precision
    with pytest.raises(ConfigError, match=f"{recipe} needs compute capability .*, and card has {card}: use .*{fits}"):
        check_recipe(precision, device)
    newer = DescribedDevice(0, 0, device_kind="card", compute_capability="10.0")
    assert "jaxtrain compile lists them" in check_recipe(precision, newer)[0]


def test_the_dtype_of_cotangents_is_a_setting() -> None:
    chosen = recipe_of(validate({"precision": {"recipe": "float8", "recipe_gradients": "e4m3fn"}}).precision)
    assert chosen is not None and chosen.backward == jnp.float8_e4m3fn and RECIPES["float8"].backward == jnp.float8_e5m2
