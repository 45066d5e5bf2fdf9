"""Time the real train step of a configuration on this machine: `train_step.py CONFIG [--section.key value ...]`.

Prints one JSON object: parameters, tokens_per_s (median of 20 steps after 5), step_s percentiles, first_step_s (from
the start of this command to the end of the first step), compile_s, peak_rss_gib. Sequences
are full and random; all tokens are scored.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def process_age() -> float:
    """Seconds since this process was started (Linux)."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def main(argv: list[str]) -> dict[str, object]:
    """Run the steps and return the numbers."""
    import jax
    import numpy as np

    from jaxtrain.cli import split_overrides
    from jaxtrain.config import load_config
    from jaxtrain.train.batch import shard_batch
    from jaxtrain.train.resolve import bind
    from jaxtrain.train.step import compile_step

    (path,), overrides = split_overrides(argv)
    config = load_config(path, overrides)
    setup = bind(config)
    begin = time.perf_counter()
    step = compile_step(setup.step, setup.abstract, setup.abstract_batch)
    compile_s = time.perf_counter() - begin
    state = setup.init_state()
    shape = (config.train.global_batch, config.data.seq_len)
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, (shape[0], shape[1] + 1), np.int32)
    positions = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    fields = {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "segments": np.ones(shape, np.int32),
        "positions": positions,
    }
    batch = shard_batch(fields, 0, setup.batch_shape, setup.batch_sharding)
    seconds: list[float] = []
    for number in range(26):
        begin = time.perf_counter()
        state, metrics = step(state, batch)
        loss = float(metrics["loss"])
        seconds.append(time.perf_counter() - begin)
        if number == 0:
            first_step_s = process_age()
    measured = np.array(seconds[6:])
    return {
        "config": path,
        "parameters": setup.model.count(),
        "devices": jax.device_count(),
        "tokens_per_s": round(shape[0] * shape[1] / float(np.median(measured)), 1),
        "step_s": {f"p{q}": round(float(np.percentile(measured, q)), 4) for q in (10, 50, 90)},
        "first_step_s": round(first_step_s, 2),
        "compile_s": round(compile_s, 2),
        "peak_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 3),
        "loss": loss,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
