"""8-bit recipes of matmuls, one file each."""

from jaxtrain.ops.recipes.float8 import FLOAT8, FLOAT8_ROWWISE
from jaxtrain.ops.recipes.mxfp8 import MXFP8
from jaxtrain.ops.recipes.recipe import Contraction, Quantized, Recipe

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (FLOAT8, FLOAT8_ROWWISE, MXFP8)}

__all__ = ["RECIPES", "Contraction", "Quantized", "Recipe"]
