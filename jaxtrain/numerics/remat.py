"""Rematerialisation: checkpoint policies over the named values of a block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxtrain.config import ConfigError, ModelConfig, RematConfig, nearest

NAMES: dict[str, str] = {
    "attention_input": "normalised input of attention",
    "latent": "compressed queries, keys and values (latent attention only)",
    "qkv": "queries, keys and values, after positions",
    "attention_out": "heads' outputs, before the output projection",
    "attention_residual": "residual stream between attention and feed-forward",
    "mlp_input": "normalised input of the feed-forward layer",
    "mlp_gate": "gate projection (gated activations only)",
    "mlp_up": "up projection, before the nonlinearity",
    "mlp_hidden": "input of the down projection",
    "router_logits": "float32 logits of a mixture's experts",
    "experts_out": "weighted sum of a token's routed experts",
}
"""Name of a value of a block -> its description."""

CHOICE = "experts_chosen"
"""Name of the experts of each token, which every policy saves: integers, and gradients must be those of the forward."""

DOTS = ("latent", "qkv", "attention_residual", "mlp_gate", "mlp_up", "router_logits")
"""Results of a block's matmuls: with them saved, only attention is recomputed among the matmuls."""


def tag(x: jax.Array, name: str) -> jax.Array:
    """Name a value, so that a remat policy can save it."""
    assert name in NAMES, name
    return checkpoint_name(x, name)


def save_named(fn: Callable[..., Any], remat: RematConfig) -> Callable[..., Any]:
    """`fn` whose backward pass reads its inputs and the named values that the policy saves; the rest is recomputed.

    For a backward pass in another loop than the forward pass, as in a pipeline.
    """
    names = {"dots": DOTS, "names": tuple(remat.names)}.get(remat.policy, ())
    return jax.checkpoint(fn, policy=jax.checkpoint_policies.save_only_these_names(*names, CHOICE), prevent_cse=False)


def names_of(model: ModelConfig, gated: bool) -> tuple[str, ...]:
    """The names that this model's blocks produce; `gated` is a property of its activation."""
    absent = set() if gated else {"mlp_gate"}
    if not model.mla.kv_rank:
        absent.add("latent")
    if not model.moe.experts:
        absent |= {"router_logits", "experts_out"}
    elif not (model.moe.shared or model.moe.first_dense or model.moe.every > 1):
        absent |= {"mlp_gate", "mlp_up", "mlp_hidden"}
    return tuple(name for name in NAMES if name not in absent)


def check_remat(remat: RematConfig, model: ModelConfig, gated: bool) -> None:
    """Raise ConfigError where `remat.names` is missing, unknown, not produced by this model, or has no effect."""
    if remat.policy != "names":
        if remat.names:
            raise ConfigError(
                f"remat.names {remat.names} has no effect under remat.policy {remat.policy}: set remat.policy to names"
            )
        return
    if not remat.names:
        raise ConfigError(
            f"remat.policy is names but remat.names is empty: choose from {', '.join(names_of(model, gated))}"
        )
    for name in remat.names:
        if name not in NAMES:
            raise ConfigError(f"remat.names has {name!r}, which no block names{nearest(name, NAMES)}")
        if name not in names_of(model, gated):
            raise ConfigError(
                f"remat.names has {name!r} ({NAMES[name]}), which this model does not produce "
                f"(model.activation {model.activation}, model.mla.kv_rank {model.mla.kv_rank}): "
                f"choose from {', '.join(names_of(model, gated))}"
            )


def checkpointed(fn: Callable[..., Any], remat: RematConfig, looped: bool = True) -> Callable[..., Any]:
    """`fn` (weights, x, ...) under the remat policy: the same values and gradients, different memory and recompute.

    `looped`: it runs in a loop of several iterations, across which the compiler cannot eliminate the recomputation.
    """
    policies = jax.checkpoint_policies
    match remat.policy:
        case "none":
            return fn
        case "full":
            policy = policies.save_only_these_names(CHOICE)
        case "offload":
            fn = _with_named_input(fn)
            policy = policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[CHOICE], names_which_can_be_offloaded=[_INPUT],
                offload_src="device", offload_dst="pinned_host",
            )  # fmt: skip
        case "dots":
            policy = policies.save_from_both_policies(
                policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(CHOICE)
            )
        case "names":
            policy = policies.save_only_these_names(*remat.names, CHOICE)
    # In a loop prevent_cse is not needed and prevents fusion.
    return jax.checkpoint(fn, policy=policy, prevent_cse=not looped)


_INPUT = "segment_input"


def _with_named_input(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda weights, x, *rest: fn(weights, checkpoint_name(x, _INPUT), *rest)
