"""The train state: one pure tree, initialised in its shards.

params     float32 master parameters
opt        the optimizer's state
scaler     loss scale and skip counters
steps      applied optimizer steps, int32
tokens     scored tokens trained so far, an exact two-word counter
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtrain.config import PrecisionConfig
from jaxtrain.mesh.layout import Layout, bytes_per_device
from jaxtrain.nn.model import Model
from jaxtrain.numerics import scaling
from jaxtrain.numerics.counter import counter_zero

TrainState = dict[str, Any]


def new_state(
    model: Model, optimizer: optax.GradientTransformation, precision: PrecisionConfig, key: jax.Array
) -> TrainState:
    """The state before the first step; traced inside jit so that each leaf is created in its shards."""
    return state_of(model.init(key), optimizer, precision)


def state_of(params: Any, optimizer: optax.GradientTransformation, precision: PrecisionConfig) -> TrainState:
    """The state before the first step, of given weights."""
    return {
        "params": params,
        "opt": optimizer.init(params),
        "scaler": scaling.init(precision),
        "steps": jnp.zeros((), jnp.int32),
        "tokens": counter_zero(),
    }


def abstract_state(
    model: Model, optimizer: optax.GradientTransformation, precision: PrecisionConfig, layout: Layout, mesh: Mesh
) -> TrainState:
    """Shapes, dtypes and shardings of the state; nothing is allocated."""
    shapes = jax.eval_shape(lambda key: new_state(model, optimizer, precision, key), jax.random.key(0))
    specs = jax.tree.map(lambda _: PartitionSpec(), shapes)
    specs["params"] = layout.master_params
    specs["opt"] = layout.optimizer_specs(shapes["opt"], model.params)
    return jax.tree.map(
        lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)),
        shapes,
        specs,
    )


def init_state(
    model: Model,
    optimizer: optax.GradientTransformation,
    precision: PrecisionConfig,
    abstract: TrainState,
    seed: int,
) -> TrainState:
    """Initialise every leaf directly in its shards; the values do not depend on the sharding."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(lambda key: new_state(model, optimizer, precision, key), out_shardings=shardings)(
        jax.random.key(seed)
    )


def state_from_params(
    params: Any, optimizer: optax.GradientTransformation, precision: PrecisionConfig, abstract: TrainState
) -> TrainState:
    """The state before the first step of weights that are sharded already; they are not copied."""
    shardings = {name: jax.tree.map(lambda leaf: leaf.sharding, part) for name, part in abstract.items()}

    def rest(params: Any) -> TrainState:
        return {name: part for name, part in state_of(params, optimizer, precision).items() if name != "params"}

    del shardings["params"]
    return {"params": params, **jax.jit(rest, out_shardings=shardings)(params)}


def state_bytes_per_device(abstract: TrainState) -> dict[str, int]:
    """Bytes that one device holds of each part of the state."""
    sizes = jax.tree.leaves(abstract)[0].sharding.mesh.shape
    specs = {name: jax.tree.map(lambda leaf: leaf.sharding.spec, part) for name, part in abstract.items()}
    return {name: bytes_per_device(part, specs[name], sizes) for name, part in abstract.items()}
