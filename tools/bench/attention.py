"""Time and temporaries of attention backends and context-parallel methods: `attention.py [--lengths 2048] [--seq 4]`.

One sequence, forward and backward, on the devices of this machine: each backend on one device, then each method of
attention.context_parallel with the sequence sharded over --seq devices (simulated on a CPU). Temporaries are those of
the compiler for one device; time is the median of three runs, for lengths up to --timed. --json prints the rows of the
table as one JSON list.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

DOCUMENTS = 4
RUNS = 3


def main(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every case; returns one dict each, with a `reason` instead of numbers where a backend cannot serve it."""
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(options.seq))
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from jaxtrain.config import AXES
    from jaxtrain.ops.attention import BACKENDS
    from jaxtrain.ops.context import CONTEXT_METHODS

    devices = jax.devices()
    if len(devices) < options.seq:
        sys.exit(f"--seq {options.seq}: this machine has {len(devices)} devices")
    single, sharded = (
        Mesh(np.array(devices[:count]).reshape([count if axis == "seq" else 1 for axis in AXES]), AXES)
        for count in (1, options.seq)
    )
    cases = [(single, backend.name, "ring") for backend in BACKENDS]
    if options.seq > 1:
        cases += [
            (sharded, backend.name, context_method)
            for context_method in CONTEXT_METHODS
            for backend in BACKENDS
            if backend.kernel is not None
        ]
    rows = []
    for length in options.lengths:
        for mesh, backend, context_method in cases:
            name = backend if mesh is single else f"{context_method} over {options.seq}, {backend}"
            rows.append({"method": name, "seq_len": length, **measure(options, mesh, backend, context_method, length)})
            print(show(rows[-1]), file=sys.stderr)
    return rows


def measure(options: argparse.Namespace, mesh: Any, backend: str, context_method: str, length: int) -> dict[str, Any]:
    """temp_mib of one device and, for lengths up to --timed, seconds; or the reason why the backend cannot serve it."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxtrain.config import ConfigError, RulesConfig, validate
    from jaxtrain.mesh.constraints import use_rules
    from jaxtrain.mesh.rules import resolve_rules
    from jaxtrain.ops.attention import attend, use_attention
    from jaxtrain.train.options import compiler_options

    config = validate({"attention": {"backend": backend, "context_parallel": context_method}})
    rules = resolve_rules(RulesConfig())
    window, shapes = options.window, head_shapes(options, length)

    def total(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, positions: jax.Array) -> jax.Array:
        with use_rules(rules, mesh), use_attention(config):
            return jnp.sum(attend(q, k, v, segments, positions, window).astype(jnp.float32))

    sharding = NamedSharding(mesh, PartitionSpec(None, "seq"))
    arrays = [jax.ShapeDtypeStruct(shape, options.dtype, sharding=sharding) for shape in shapes]
    tokens = [jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=sharding)] * 2
    try:
        lowered = jax.jit(jax.grad(total, (0, 1, 2))).lower(*arrays, *tokens)
    except ConfigError as error:
        return {"reason": str(error)}
    compiled = lowered.compile(compiler_options=compiler_options({}, mesh) or None)
    memory = compiled.memory_analysis()
    assert memory is not None, "this compiler reports no memory"
    found = {"temp_mib": memory.temp_size_in_bytes / 2**20}
    if length > options.timed:
        return found
    keys = jax.random.split(jax.random.key(0), len(shapes))
    values = [jax.random.normal(key, shape, options.dtype) for key, shape in zip(keys, shapes, strict=True)]
    inputs = jax.device_put((*values, *packed(mesh, length)), sharding)
    return found | {"seconds": median(lambda: jax.block_until_ready(compiled(*inputs)))}


def head_shapes(options: argparse.Namespace, length: int) -> list[tuple[int, ...]]:
    """Shapes of q, k and v."""
    heads = options.heads, options.kv_heads, options.kv_heads
    return [(1, length, count, options.width) for count in heads]


def packed(mesh: Any, length: int) -> Iterator[Any]:
    """Segments and positions of a sequence of equal documents, in storage order."""
    import numpy as np

    from jaxtrain.ops.zigzag import zigzag_order

    size = -(-length // DOCUMENTS)
    order = zigzag_order(length, mesh.shape["seq"])
    for field in (order // size + 1, order % size):
        yield field[None].astype(np.int32)


def median(run: Callable[[], Any]) -> float:
    """Median seconds of a run, without the first."""
    run()
    seconds = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[RUNS // 2]


def show(row: dict[str, Any]) -> str:
    """One line of the table."""
    if "reason" in row:
        return f"| {row['method']} | {row['seq_len']} | - | {row['reason']} |"
    seconds = f"{row['seconds']:.3f}" if "seconds" in row else ""
    return f"| {row['method']} | {row['seq_len']} | {row['temp_mib']:.1f} | {seconds} |"


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--seq", type=int, default=1)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=1)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--window", type=int)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--timed", type=int, default=4096)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(argv)


if __name__ == "__main__":
    chosen = parse(sys.argv[1:])
    print(
        "| method | length | temporaries, MiB per device | forward + backward, s |\n|---|--:|--:|--:|", file=sys.stderr
    )
    table = main(chosen)
    if chosen.json:
        print(json.dumps(table))
