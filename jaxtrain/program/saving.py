"""What saving takes: memory of a save that reorders the layers of a pipeline, bytes on the nodes' local disks."""

from __future__ import annotations

import jax

from jaxtrain.checkpoint.digest import flatten_state
from jaxtrain.checkpoint.order import CheckpointOrder, shard_bytes
from jaxtrain.checkpoint.units import plan_units, tier_bytes
from jaxtrain.train.resolve import Bound


def state_bytes(bound: Bound) -> int:
    """Bytes of the state in the memory of one device; offloaded leaves are in host memory."""
    leaves = jax.tree.leaves(bound.abstract)
    return sum(shard_bytes(leaf) for leaf in leaves if leaf.sharding.memory_kind != "pinned_host")


def save_bytes(bound: Bound) -> int:
    """Peak bytes of one device during a save: the state, and what reordering its largest leaf adds.

    A save reorders one leaf after the other (checkpoint/order.py); the largest one is compiled for these devices.
    """
    found = CheckpointOrder(bound).largest_reordering()
    if found is None:
        return state_bytes(bound)
    function, leaf = found
    memory = function.lower(leaf).compile().memory_analysis()
    added = memory.output_size_in_bytes + memory.temp_size_in_bytes - memory.alias_size_in_bytes
    return state_bytes(bound) + int(added)


def local_tier_bytes(bound: Bound, nodes: int) -> dict[str, int] | None:
    """Bytes of one save on local disks (checkpoint.local), None without: own and copies on the fullest node, sent."""
    config = bound.config.checkpoint.local
    if config.directory is None:
        return None
    per_node = bound.topology.devices.size // nodes
    leaves = flatten_state(bound.abstract)
    units = plan_units(leaves, lambda device: int(device.id) // per_node, range(nodes), config.peers)
    size = tier_bytes(units)
    return {"own": size.own, "copies": size.copies, "sent": size.sent, "keep": config.keep}
