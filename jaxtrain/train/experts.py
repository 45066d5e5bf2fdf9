"""Mixtures of experts in the train step: loads of a global batch, the correction bias, metrics, crossing traffic.

N mixture layers, X experts, P devices of an expert group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import comb
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config import AXES, ConfigError, ModelConfig
from jaxtrain.mesh.rules import Rules
from jaxtrain.mesh.topology import Topology
from jaxtrain.nn.layer_table import mixture_layers
from jaxtrain.nn.model import Model

Tree = Any
# 58 layers of 256 experts would write 70 kB a step.
LOADS_A_STEP = 2048


def check_experts(config: ModelConfig) -> None:
    """Raise ConfigError for settings of a mixture that exclude each other."""
    moe = config.moe
    if moe.experts and moe.capacity is not None and moe.buffer is not None:
        raise ConfigError(
            f"model.moe.buffer {moe.buffer} has no effect beside model.moe.capacity {moe.capacity}, which bounds what "
            "a device receives: set one of them to null"
        )


def loads_every(config: ModelConfig) -> int:
    """Steps from one recorded expert_load to the next: at most LOADS_A_STEP numbers a step on average."""
    layers = sum(mixture_layers(config).values())
    return max(1, -(-layers * config.moe.experts // LOADS_A_STEP))


def needs_loads(config: ModelConfig) -> bool:
    """Whether a microbatch's loss depends on the load of the whole global batch."""
    moe = config.moe
    return moe.experts > 0 and moe.balance == "batch" and moe.balance_weight > 0


def balanced(params: Tree, model: Model, load_NX: jax.Array) -> Tree:
    """`params` with each correction bias moved by bias_rate towards an even load (Wang et al. 2024, algorithm 1)."""
    rate = model.config.moe.bias_rate
    if rate is None:
        return params
    load_NX, at = load_NX.astype(jnp.float32), 0
    step_NX = rate * jnp.sign(jnp.mean(load_NX, axis=1, keepdims=True) - load_NX)
    for path, layers in mixture_layers(model.config).items():
        step = model.to_stack(path[0], step_NX[at : (at := at + layers)])
        params = _changed(params, (*path, "router", "correction"), step)
    return params


def _changed(tree: Tree, path: tuple[str, ...], step: jax.Array) -> Tree:
    if not path:
        return tree + step
    return {**tree, path[0]: _changed(tree[path[0]], path[1:], step)}


def expert_metrics(sums: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Metrics of one step from the sums of its layers; {} for a model without mixtures.

    imbalance: load of the busiest expert over the mean, of the worst layer. balance_loss and router_z_loss are sums
    over layers before their weights, of the global batch. expert_load [N, X]; expert_traffic [P, P]: tokens sent over
    all layers, one way.
    """
    if "load" not in sums:
        return {}
    load_NX = sums["load"]
    mean_N = jnp.maximum(jnp.mean(load_NX.astype(jnp.float32), axis=1), 1e-9)
    return {
        "imbalance": jnp.max(jnp.max(load_NX, axis=1) / mean_N),
        "balance_loss": jnp.sum(sums["balance"] if "balance" in sums else _batch_balance(load_NX, sums["mass"])),
        "router_z_loss": jnp.sum(sums["router_z"]),
        "dropped": jnp.sum(sums["dropped"]),
        "overflowed": jnp.sum(sums["overflowed"]),
        "expert_load": load_NX,
        "expert_traffic": jnp.sum(sums["traffic"].astype(jnp.float32), axis=0),
    }


def _batch_balance(load_NX: jax.Array, mass_NX: jax.Array) -> jax.Array:
    """X sum(f P) / K of each layer (ops/routing.py batch_balance) from the sums over the global batch."""
    share_NX = load_NX / jnp.maximum(jnp.sum(load_NX, axis=1, keepdims=True), 1)
    return load_NX.shape[1] * jnp.sum(share_NX * mass_NX, axis=1)


def crossing_pairs(topology: Topology, rules: Rules) -> np.ndarray:
    """Share of the groups that hold the experts in which two members are in different fast domains, float [P, P]."""
    order = [AXES.index(axis) for axis in rules.axes("experts") if topology.sizes[axis] > 1]
    groups = np.moveaxis(topology.domain, order, range(len(order)))
    members = groups.reshape(int(np.prod(groups.shape[: len(order)], dtype=int)), -1)
    return np.mean(members[:, None] != members[None], axis=-1)


def traffic_metrics(traffic_PP: list[list[float]], token_bytes: int, crossing_PP: np.ndarray) -> dict[str, float]:
    """Bytes that expert layers sent in a step (both ways, forward and backward), and the share that crosses domains."""
    tokens_PP = np.asarray(traffic_PP)
    total = float(tokens_PP.sum())
    share = float((tokens_PP * crossing_PP).sum()) / total if total else 0.0
    return {"expert_bytes": 4 * total * token_bytes, "expert_crossing_share": share}


@dataclass(frozen=True)
class CrossDomainTokens:
    """Copies of a token that a mixture layer sends to experts in other fast domains, on average over an even router.

    sent: as implemented, one copy a choice. once, once_limited: if a token were sent once a domain, without and with
    the router's limit to groups of experts.
    """

    sent: float
    once: float
    once_limited: float


def cross_domain_tokens(model: ModelConfig, crossing_PP: np.ndarray) -> CrossDomainTokens | None:
    """What crosses domains where an expert group spans several; None where it stays inside one."""
    moe, inside = model.moe, 1.0 - float(crossing_PP.mean())
    if not moe.experts or inside > 1 - 1e-9:
        return None
    domains = round(1 / inside)

    def others(groups: int, chosen: int) -> float:
        """Mean number of other domains with a chosen expert: the groups are spread evenly over the domains."""
        size, own = moe.experts // groups, groups // domains
        none = sum(
            comb(own, i) * comb(groups - own, chosen - i) / comb(groups, chosen)
            * comb((chosen - i) * size, moe.top_k) / comb(chosen * size, moe.top_k)
            for i in range(min(own, chosen) + 1)
        )  # fmt: skip
        return (domains - 1) * (1 - none)

    once = others(moe.experts, moe.experts)
    limited = once if moe.groups == moe.top_groups or moe.groups % domains else others(moe.groups, moe.top_groups)
    return CrossDomainTokens(moe.top_k * (1 - inside), once, limited)
