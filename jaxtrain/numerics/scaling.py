"""Dynamic loss scaling (Micikevicius et al. 2018) and the count of skipped steps, as pure functions.

The loss is multiplied by `scale` before the backward pass, gradients are divided by it before clipping, and a step with
a non-finite result is skipped. Only float16 changes the scale; other dtypes use scale 1 and still skip and count.
`next_state` is called once per optimizer step, so the scale is constant during gradient accumulation.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxtrain.config import PrecisionConfig

ScalerState = dict[str, jax.Array]


def init(config: PrecisionConfig) -> ScalerState:
    """Scalars: `scale` float32; int32 `good` (finite steps at this scale), `skipped` in succession, `total_skipped`."""
    scale = config.scale_init if config.compute == "float16" else 1.0
    counts = {name: jnp.zeros((), jnp.int32) for name in ("good", "skipped", "total_skipped")}
    return {"scale": jnp.asarray(scale, jnp.float32), **counts}


def next_state(
    config: PrecisionConfig, state: ScalerState, finite: jax.Array, good: jax.Array | None = None
) -> ScalerState:
    """State after a step; bool scalars `finite`: loss, gradients and results were; `good`: not skipped, else `finite`.

    float16: the scale doubles after scale_growth_every finite steps, up to scale_max, and halves on overflow, down
    to 1.
    """
    counted = finite if good is None else good
    scale, since = state["scale"], jnp.where(finite, state["good"] + 1, 0)
    if config.compute == "float16":
        grow = since >= config.scale_growth_every
        up = jnp.where(grow, jnp.minimum(scale * 2, config.scale_max), scale)
        scale = jnp.where(finite, up, jnp.maximum(scale / 2, 1.0))
        since = jnp.where(grow, 0, since)
    return {
        "scale": scale,
        "good": since,
        "skipped": jnp.where(counted, 0, state["skipped"] + 1),
        "total_skipped": state["total_skipped"] + jnp.where(counted, 0, 1),
    }
