"""What the backward pass recomputes: checkpoint policies over values that blocks name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.config import ConfigError, ModelConfig, RematConfig, nearest

NAMES: dict[str, str] = {
    "attention_input": "normalised input of attention",
    "qkv": "queries, keys and values, after positions",
    "attention_out": "heads' outputs, before the output projection",
    "attention_residual": "residual stream between attention and feed-forward",
    "mlp_input": "normalised input of the feed-forward layer",
    "mlp_gate": "gate projection (swiglu only)",
    "mlp_up": "up projection, before the nonlinearity",
    "mlp_hidden": "input of the down projection",
}
"""Every value a block names -> what it is."""


def tag(x: jax.Array, name: str) -> jax.Array:
    """Name a value, so that a policy can keep it."""
    assert name in NAMES, name
    return checkpoint_name(x, name)


def names_of(model: ModelConfig) -> tuple[str, ...]:
    """The names that this model's blocks produce."""
    return tuple(name for name in NAMES if name != "mlp_gate" or model.activation == "swiglu")


def check_remat(remat: RematConfig, model: ModelConfig) -> None:
    """Raise ConfigError where `remat.names` is empty, unknown, not produced by this model, or set without use."""
    if remat.policy != "names":
        if remat.names:
            raise ConfigError(f"remat.names {remat.names} has no effect under remat.policy {remat.policy}: use names")
        return
    if not remat.names:
        raise ConfigError(f"remat.policy is names but remat.names is empty: choose from {', '.join(names_of(model))}")
    for name in remat.names:
        if name not in NAMES:
            raise ConfigError(f"remat.names has {name!r}, which no block names{nearest(name, NAMES)}")
        if name not in names_of(model):
            raise ConfigError(
                f"remat.names has {name!r} ({NAMES[name]}), which a model with model.activation {model.activation} "
                f"does not produce: choose from {', '.join(names_of(model))}"
            )


def checkpointed(fn: Callable[..., Any], remat: RematConfig) -> Callable[..., Any]:
    """`fn` (the body of a scan) under the policy: the same values and gradients, other memory and recompute."""
    policies = jax.checkpoint_policies
    match remat.policy:
        case "none":
            return fn
        case "full":
            policy = policies.nothing_saveable
        case "dots":
            policy = policies.dots_with_no_batch_dims_saveable
        case "names":
            policy = policies.save_only_these_names(*remat.names)
    # prevent_cse is for code outside a loop; inside a scan it only blocks fusion.
    return jax.checkpoint(fn, policy=policy, prevent_cse=False)
