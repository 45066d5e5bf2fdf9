"""Held-out loss of configs/tiny.yaml in float32, bfloat16 and with recipes of 8 bits: the same data and seeds.

Prints the loss of each run, and of each precision the gap of its mean to that of bfloat16. On a CPU the recipes
quantize the same values as on a GPU. A run takes about five minutes on two cores.

python tools/bench/precision.py [--steps 320] [--seeds 3] [--config tiny] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

PRECISIONS = {
    "float32": ("float32", "null"),
    "bfloat16": ("bfloat16", "null"),
    "float8": ("bfloat16", "float8"),
    "float8_rowwise": ("bfloat16", "float8_rowwise"),
    "mxfp8": ("bfloat16", "mxfp8"),
}


def held_out_loss(config: str, precision: str, seed: int, steps: int, folder: Path) -> float:
    """Train one run; the loss of its last evaluation, in nats a token."""
    compute, recipe = PRECISIONS[precision]
    run = folder / f"{precision}-{seed}"
    decay = steps * 3 // 8
    options = {
        "train.seed": seed, "train.steps": steps, "precision.compute": compute, "precision.recipe": recipe,
        "optimizer.decay": decay, "optimizer.warmup": min(20, steps - decay), "eval.every": steps,
        "checkpoint.every": steps, "train.sample_prompt": "",
    }  # fmt: skip
    overrides = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "jaxtrain", "train", config, "--run", str(run), *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return float(json.loads((run / "summary.json").read_text())["eval_loss_last"])


def main() -> None:
    """Train every precision with every seed and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--config", default="tiny")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    losses: dict[str, list[float]] = {name: [] for name in PRECISIONS}
    with tempfile.TemporaryDirectory(prefix="jaxtrain-precision-") as folder:
        for seed in range(arguments.seeds):
            for precision, found in losses.items():
                found.append(held_out_loss(arguments.config, precision, seed, arguments.steps, Path(folder)))
                print(f"{precision} seed {seed}: {found[-1]:.4f}", file=sys.stderr, flush=True)
    base = statistics.fmean(losses["bfloat16"])
    print(f"| {arguments.config}, {arguments.steps} steps | held-out loss of each seed | gap of the mean to bfloat16 |")
    print("|---|---|---|")
    for precision, found in losses.items():
        gap = statistics.fmean(found) / base - 1
        print(f"| {precision} | {', '.join(f'{loss:.4f}' for loss in found)} | {gap:+.2%} |")
    if arguments.json:
        arguments.json.write_text(json.dumps({"steps": arguments.steps, "losses": losses}))


if __name__ == "__main__":
    main()
