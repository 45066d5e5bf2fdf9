"""Mixtures compiled for 64 H100: ragged exchanges inside a node, a real grouped matmul, bounded temporaries."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtrain.config import validate
from jaxtrain.program.compile import PLAN_PACKAGES, compile_for

ROOT = Path(__file__).resolve().parents[2]
LAYERS = 2


@pytest.mark.prove
@pytest.mark.parametrize("remat", ["none", "full"])
def test_dispatch_and_combine_are_ragged_exchanges_inside_a_node(remat: str) -> None:
    config = validate({
        "model": {
            "vocab_size": 4096, "d_model": 512, "n_layers": LAYERS, "n_heads": 8, "d_ff": 256, "max_seq_len": 1024,
            "moe": {"experts": 64, "top_k": 4, "d_ff": 256, "balance_weight": 0.01, "bias_rate": 0.001},
        },
        "data": {"seq_len": 1024, "tokenizer": {"vocab_size": 4096}},
        "train": {"global_batch": 64}, "precision": {"compute": "bfloat16"}, "remat": {"policy": remat},
        "mesh": {"expert": 8, "data": 8}, "rules": {"preset": ["fsdp"]},
    })  # fmt: skip
    report = compile_for(config, "h100_8x8")
    exchanges = [one for one in report.collectives if one.kind == "ragged-all-to-all"]
    assert {one.axes for one in exchanges} == {("expert",)} and {one.domains for one in exchanges} == {1}
    assert {len(one.groups) for one in exchanges} == {8}
    calls = {
        back: sum(one.calls for one in exchanges if ("transpose" in one.op_name) == back) for back in (False, True)
    }
    # There and back; a checkpointed layer first does both again, the second for the gradient of a choice's weight.
    assert calls[False] == 2 * LAYERS
    assert calls[True] == (2 if remat == "none" else 4) * LAYERS
    assert not [one for one in report.inserted_resharding if one.kind == "ragged-all-to-all"]
    assert report.proof.holds


@pytest.mark.prove
def test_a_deepseek_v3_layer_stays_below_4_gib_of_temporaries() -> None:
    # 8,192 tokens a device, 256 experts over the 8 devices of a node, 8 of them a token; dropless, worst case held.
    sizes = {"expert": 8, "tokens": 8192, "d-model": 7168, "d-ff": 2048, "experts": 256, "top-k": 8}
    asked = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    command = [
        sys.executable,
        str(ROOT / "tools/bench/moe.py"),
        "--cluster",
        "h100_8x8",
        *asked,
        "--methods",
        "dropless",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (row,) = map(json.loads, done.stdout.splitlines())
    assert row["temporaries_mib"] < 4096


def test_the_compiler_finds_what_the_kernels_are_linked_with() -> None:
    wanted = (ROOT / "requirements-plan.txt").read_text()
    assert {"tokamax", "jax-cuda13-plugin"} <= {line.split("==")[0] for line in wanted.splitlines()}
    assert list(PLAN_PACKAGES.glob("jax_cuda*_plugin/libmosaic_gpu_runtime.so")), "run make setup-plan"
