"""Make the run of the current schema: python tests/data/runs/make.py writes vN.tar.xz beside this file.

One archive for each schema version (jaxtrain.config.SCHEMA), made once, by the code of its time: a run of two steps and
its corpus. tests/train/test_schemas.py resumes each of them.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

CONFIG = {
    "model": {
        "vocab_size": 258, "d_model": 8, "n_layers": 1, "n_heads": 1, "d_ff": 8, "max_seq_len": 16, "tied_head": True,
    },
    "data": {"sources": [{"text": "corpus"}], "tokenizer": {"vocab_size": 258}, "seq_len": 16, "cache": "cache"},
    "train": {"steps": 2, "global_batch": 2, "sample_tokens": 2},
    "optimizer": {"learning_rate": 1e-2, "warmup": 1},
    "checkpoint": {"every": 2, "keep": 1},
    "eval": {"every": None},
    "observe": {"tensorboard": False},
}  # fmt: skip


def main() -> None:
    """Train the run in a temporary folder and pack it."""
    from jaxtrain.cli import main as jaxtrain
    from jaxtrain.config import SCHEMA

    target = Path(__file__).resolve().parent / f"v{SCHEMA}.tar.xz"
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("corpus").mkdir()
        for n in range(12):
            Path(f"corpus/f{n}.txt").write_text(
                "".join(f"line {i} of file {n}: the sum is {i * n}\n" for i in range(12))
            )
        Path("run.yaml").write_text(yaml.safe_dump(CONFIG))
        socket.gethostname = lambda: "node0"
        sys.argv = ["jaxtrain", "train", "run.yaml", "--run", "run"]
        assert jaxtrain(sys.argv[1:]) == 0
        Path("run/loss.png").unlink()
        reproducible = ["--sort=name", "--owner=0", "--group=0", "--numeric-owner"]
        subprocess.run(["tar", *reproducible, "-cJf", str(target), "run", "corpus"], check=True)


if __name__ == "__main__":
    main()
