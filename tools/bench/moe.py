"""Time and memory of one mixture layer, forward and backward: dropless, bounded, by capacity, and a loop over experts.

    moe.py [--devices 4] [--tokens 512] [--d-model 64] [--d-ff 128] [--experts 16] [--top-k 2]
    moe.py --cluster h100_8x8 --expert 8 --tokens 8192 --d-model 7168 --d-ff 2048 --experts 256 --top-k 8

Prints one JSON object per line: method, skew (added to the logits of the favoured experts), imbalance, lost choices,
seconds (median of 5 after 2), temporaries_mib. With --cluster the layer is only compiled for its GPUs, in
bfloat16, with --tokens per device; temporaries are those of the compiler.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

METHODS: dict[str, dict[str, float]] = {
    "dropless": {},
    "buffer 1.5": {"buffer": 1.5},
    "capacity 1.25": {"capacity": 1.25},
}


def main(argv: list[str]) -> Iterator[dict[str, Any]]:
    """The rows of the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"devices": 4, "tokens": 512, "d-model": 64, "d-ff": 128, "experts": 16, "top-k": 2, "expert": 0}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--cluster")
    parser.add_argument("--methods", nargs="+", default=[*METHODS, "loop"])
    asked = parser.parse_args(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if asked.cluster is None:
        os.environ["JAX_NUM_CPU_DEVICES"] = str(asked.devices)
    import jax

    devices = described(asked.cluster) if asked.cluster else jax.devices()
    options = {"xla_gpu_enable_cub_radix_sort": False} if asked.cluster else {}
    for skew in (0.0,) if asked.cluster else (0.0, 1.0, 4.0):
        for method in asked.methods:
            compiled, arguments = compile_layer(asked, devices, method, skew, options)
            row = {"method": method, "skew": skew}
            row |= {} if asked.cluster else timed(compiled, arguments)
            yield row | {"temporaries_mib": round(compiled.memory_analysis().temp_size_in_bytes / 2**20, 1)}


def described(cluster: str) -> list[Any]:
    """Described GPUs of a cluster."""
    from jax.extend import backend

    from jaxtrain.config import RunConfig
    from jaxtrain.program.compile import make_request, named_cluster
    from jaxtrain.program.worker import compile_only_devices

    config = RunConfig().model_copy(update={"cluster": named_cluster(cluster)})
    devices = compile_only_devices(make_request(config, None, "cuda"))
    # Kernels query the capabilities of the default device.
    backend.get_default_device = lambda: devices[0]
    return devices


def compile_layer(asked: Any, devices: list[Any], method: str, skew: float, options: dict[str, Any]) -> Any:
    """The compiled gradient of a layer's mean square, and its arguments: arrays, or shapes for described devices."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from jaxtrain.config import AXES, RulesConfig
    from jaxtrain.mesh.rules import resolve_rules
    from jaxtrain.ops.dispatch import ExpertLinear, Experts

    group = asked.expert or len(devices)
    mesh = Mesh(np.array(devices).reshape(len(devices) // group, 1, 1, 1, group), AXES)
    dtype = jnp.bfloat16 if asked.cluster else jnp.float32
    D, F, X = asked.d_model, asked.d_ff, asked.experts
    tokens, owners = PartitionSpec(("data", "expert")), PartitionSpec("expert")
    shapes = {
        "x": ((len(devices), asked.tokens, D), dtype, tokens),
        "router": ((D, X), jnp.float32, PartitionSpec()),
        **dict.fromkeys(("gate", "up"), ((X, D, F), dtype, owners)),
        "down": ((X, F, D), dtype, owners),
    }

    def draw(number: int, shape: tuple[int, ...], dtype: Any, spec: Any) -> Any:
        sharding = NamedSharding(mesh, spec)
        if asked.cluster:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        # Weights are scaled to preserve the variance of their inputs; x has unit variance.
        values = np.random.default_rng(number).normal(size=shape) / np.sqrt(shape[-2] if number else 1)
        return jax.device_put(jnp.asarray(values, dtype), sharding)

    drawn = {name: draw(i, *spec) for i, (name, spec) in enumerate(shapes.items())}
    arguments = (
        drawn["x"],
        drawn["router"],
        Experts(*(ExpertLinear(drawn[name], None) for name in ("gate", "up", "down"))),
    )
    loss = partial(layer_loss, asked, mesh, resolve_rules(RulesConfig()), method, skew)
    compiled = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True)).lower(*arguments).compile(compiler_options=options)
    return compiled, arguments


def layer_loss(asked: Any, mesh: Any, rules: Any, method: str, skew: float, x: Any, router: Any, experts: Any) -> Any:
    """Mean square of a layer's outputs, and (imbalance, lost choices)."""
    import contextlib
    import math

    import jax
    import jax.numpy as jnp

    from jaxtrain.mesh.constraints import use_rules
    from jaxtrain.ops import routing
    from jaxtrain.ops.dispatch import mixture
    from jaxtrain.ops.reference import use_reference

    def swiglu(gate: jax.Array | None, up: jax.Array) -> jax.Array:
        assert gate is not None
        return jax.nn.silu(gate) * up

    bounds, dropped, capacity = METHODS.get(method, {}), jnp.int32(0), None
    with use_rules(rules, mesh), use_reference() if method == "loop" else contextlib.nullcontext():
        logits = x.astype(jnp.float32) @ router + skew * (jnp.arange(asked.experts) < asked.top_k)
        routed = routing.route(logits, jnp.ones(x.shape[:2], bool), asked.top_k, "softmax_chosen")
        load = routing.load_of(routed)
        if "capacity" in bounds:
            capacity = math.ceil(bounds["capacity"] * asked.top_k * x.shape[1] / asked.experts)
            order = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
            routed, dropped = routing.apply_capacity(routed, order, capacity)
        y, lost, _ = mixture(
            x, routed.chosen_BLK, routed.weights_BLK, experts, swiglu, capacity, bounds.get("buffer"),
        )  # fmt: skip
    return jnp.mean(jnp.square(y.astype(jnp.float32))), (jnp.max(load) / jnp.mean(load), dropped + lost)


def timed(compiled: Any, arguments: Any) -> dict[str, Any]:
    """Median seconds of a call, and its counts."""
    import jax
    import numpy as np

    seconds = []
    for _ in range(7):
        begin = time.perf_counter()
        _, (imbalance, lost) = jax.block_until_ready(compiled(*arguments))
        seconds.append(time.perf_counter() - begin)
    return {
        "imbalance": round(float(imbalance), 2),
        "lost": int(lost),
        "seconds": round(float(np.median(seconds[2:])), 4),
    }


if __name__ == "__main__":
    for line in main(sys.argv[1:]):
        print(json.dumps(line), flush=True)
