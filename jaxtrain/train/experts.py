"""What the step does for mixtures of experts: the exact load of a global batch, the correction bias, the metrics.

N mixture layers, X experts, P devices of an expert group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config import AXES, Axis, ModelConfig
from jaxtrain.mesh.topology import Topology
from jaxtrain.nn.decoder import mixture_layers

Tree = Any


def needs_loads(config: ModelConfig) -> bool:
    """Whether a microbatch's loss depends on the load of the whole global batch."""
    moe = config.moe
    return moe.experts > 0 and moe.balance == "batch" and moe.balance_weight > 0


def balanced(params: Tree, config: ModelConfig, load_NX: jax.Array) -> Tree:
    """`params` with each correction bias moved by bias_rate towards an even load (Wang et al. 2024, algorithm 1)."""
    rate = config.moe.bias_rate
    if rate is None:
        return params
    load_NX, at = load_NX.astype(jnp.float32), 0
    step_NX = rate * jnp.sign(jnp.mean(load_NX, axis=1, keepdims=True) - load_NX)
    for path, layers in mixture_layers(config).items():
        step = step_NX[at : (at := at + layers)]
        params = _changed(params, (*path, "router", "correction"), step)
    return params


def _changed(tree: Tree, path: tuple[str, ...], step: jax.Array) -> Tree:
    if not path:
        return tree + step
    return {**tree, path[0]: _changed(tree[path[0]], path[1:], step)}


def expert_metrics(sums: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Metrics of one update from the sums of its layers; {} for a model without mixtures.

    imbalance: load of the busiest expert over the mean, of the worst layer. balance_loss and router_z_loss are sums
    over layers before their weights. expert_load [N, X]; expert_traffic [P, P]: rows sent over all layers, one way.
    """
    if "load" not in sums:
        return {}
    load_NX = sums["load"]
    mean_N = jnp.maximum(jnp.mean(load_NX.astype(jnp.float32), axis=1), 1e-9)
    return {
        "imbalance": jnp.max(jnp.max(load_NX, axis=1) / mean_N),
        "balance_loss": jnp.sum(sums["balance"]),
        "router_z_loss": jnp.sum(sums["router_z"]),
        "dropped": jnp.sum(sums["dropped"]),
        "overflowed": jnp.sum(sums["overflowed"]),
        "expert_load": load_NX,
        "expert_traffic": jnp.sum(sums["traffic"].astype(jnp.float32), axis=0),
    }


def crossing_pairs(topology: Topology, axes: tuple[Axis, ...]) -> np.ndarray:
    """Share of the groups along `axes` in which two members lie in different fast domains, float [P, P]."""
    order = [AXES.index(axis) for axis in axes]
    groups = np.moveaxis(topology.domain, order, range(len(order)))
    members = groups.reshape(int(np.prod(groups.shape[: len(order)], dtype=int)), -1)
    return np.mean(members[:, None] != members[None], axis=-1)


def traffic_metrics(traffic_PP: list[list[float]], row_bytes: int, crossing_PP: np.ndarray) -> dict[str, float]:
    """Bytes that expert layers sent in an update, there and back, forward and backward, and the share that crosses."""
    rows_PP = np.asarray(traffic_PP)
    total = float(rows_PP.sum())
    share = float((rows_PP * crossing_PP).sum()) / total if total else 0.0
    return {"expert_bytes": 4 * total * row_bytes, "expert_crossing_share": share}
