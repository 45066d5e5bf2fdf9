"""Dynamic loss scaling (Micikevicius et al. 2018) and the count of skipped updates, as pure functions.

The loss is multiplied by `scale` before the backward pass, gradients are divided by it before clipping, and an update
with a non-finite gradient is skipped. float16 moves the scale; other dtypes keep it at 1 and still skip and count.
`update` is called once an optimizer update, so the scale never changes within an accumulation.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxtrain.config import PrecisionConfig

ScalerState = dict[str, jax.Array]


def init(config: PrecisionConfig) -> ScalerState:
    """Scalars `scale` float32; `good` finite updates since it moved, `skipped` in a row, `total_skipped` int32."""
    scale = config.scale_init if config.compute == "float16" else 1.0
    counts = {name: jnp.zeros((), jnp.int32) for name in ("good", "skipped", "total_skipped")}
    return {"scale": jnp.asarray(scale, jnp.float32), **counts}


def next_state(config: PrecisionConfig, state: ScalerState, finite: jax.Array) -> ScalerState:
    """State after an update whose gradients were all finite (bool scalar) or not.

    float16: the scale doubles after scale_growth_every finite updates, up to scale_max, and halves on overflow,
    down to 1.
    """
    scale, good = state["scale"], jnp.where(finite, state["good"] + 1, 0)
    if config.compute == "float16":
        grow = good >= config.scale_growth_every
        up = jnp.where(grow, jnp.minimum(scale * 2, config.scale_max), scale)
        scale = jnp.where(finite, up, jnp.maximum(scale / 2, 1.0))
        good = jnp.where(grow, 0, good)
    return {
        "scale": scale,
        "good": good,
        "skipped": jnp.where(finite, 0, state["skipped"] + 1),
        "total_skipped": state["total_skipped"] + jnp.where(finite, 0, 1),
    }
