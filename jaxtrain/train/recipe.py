"""Whether the cards of a run can compute as precision.recipe says."""

from __future__ import annotations

from typing import Any

from jaxtrain.config import ConfigError, PrecisionConfig
from jaxtrain.ops.low_precision import recipe_of
from jaxtrain.ops.recipes import RECIPES


def check_recipe(config: PrecisionConfig, device: Any, stages: int = 1, layers: int | None = None) -> tuple[str, ...]:
    """A note of how the recipe is computed here; raises ConfigError for a card that cannot. CPUs compute any recipe."""
    recipe = recipe_of(config)
    if recipe is None:
        return ()
    skipped = config.recipe_skip_first, config.recipe_skip_last
    if stages > 1 and any(skipped):
        raise ConfigError(
            f"precision.recipe_skip_first {skipped[0]} and recipe_skip_last {skipped[1]} with mesh.pipe {stages}: all "
            "stages run the same program, so that none can leave out the recipe: set both to 0, or mesh.pipe to 1"
        )
    if layers is not None and sum(skipped) >= layers:
        raise ConfigError(
            f"precision.recipe_skip_first {skipped[0]} and recipe_skip_last {skipped[1]} leave none of the {layers} "
            "layers to the recipe: lower them, or set precision.recipe: null"
        )
    kinds = ", ".join(config.recipe_kinds)
    capability = getattr(device, "compute_capability", None)
    if device.platform == "cpu":
        return (f"matmuls of {kinds} by {recipe.title}: on CPUs with the same values, and no gain in speed",)
    if capability is None:
        return ()
    have = tuple(map(int, str(capability).split(".")))
    if have < recipe.capability:
        fit = [name for name, each in RECIPES.items() if have >= each.capability]
        raise ConfigError(
            f"precision.recipe {recipe.name} needs compute capability {'.'.join(map(str, recipe.capability))}, and "
            f"{device.device_kind} has {capability}: use {' or '.join(fit) if fit else 'precision.recipe: null'}"
        )
    listed = "jaxtrain compile lists them in the compiled program"
    return (f"matmuls of {kinds} by {recipe.title}; {listed}; MFU is that of the {config.compute} peak",)
