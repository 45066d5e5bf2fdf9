"""Recipes of 8 bits in programs compiled for GPUs: every chosen matmul, what is gathered, and fallbacks by name."""

from __future__ import annotations

from functools import cache
from io import StringIO

import pytest
from rich.console import Console

from jaxtrain.config import ConfigError, load_config, replace, validate
from jaxtrain.program.compile import compile_for
from jaxtrain.program.report import ProgramReport
from jaxtrain.report.compiled import print_compiled

LAYERS, D, F, V, L = 2, 256, 1024, 512, 256
BASE = validate({
    "model": {"vocab_size": V, "d_model": D, "n_layers": LAYERS, "n_heads": 8, "n_kv_heads": 4, "d_ff": F,
              "max_seq_len": L},
    "data": {"seq_len": L, "tokenizer": {"vocab_size": V}},
    "train": {"global_batch": 16},
    "precision": {"compute": "bfloat16"},
    "remat": {"policy": "full"},
    "rules": {"preset": ["fsdp"], "replicated_limit": 10**9},
    "attention": {"backend": "dense"},
})  # fmt: skip
PATHS = {"attention.query", "attention.key", "attention.value", "attention.out", "mlp.gate", "mlp.up", "mlp.down"}
WEIGHTS = LAYERS * (D * 32 * (8 + 4 + 4 + 8) + 3 * D * F)


@cache
def compiled(*overrides: str, cluster: str = "h100_8x8") -> ProgramReport:
    return compile_for(replace(BASE, *overrides), cluster, 16)


def gathered(report: ProgramReport) -> int:
    return sum(row.payload for row in report.traffic if row.kind == "all-gather")


def test_every_chosen_matmul_runs_in_8_bits_and_weights_travel_so() -> None:
    report = compiled("precision.recipe=float8")
    matmuls = {(one.path, one.step): one for one in report.low_precision}
    assert {path for path, _ in matmuls} == PATHS and len(matmuls) == 3 * len(PATHS)
    for (_, step), one in matmuls.items():
        assert one.calls == one.low and one.kernels == ("__cublas$lt$matmul$f8",)
        # Forward products are recomputed, but where nothing reads their result again (the last one of a layer).
        assert one.calls in ((LAYERS, 2 * LAYERS) if step == "forward" else (LAYERS,))
    assert report.options["xla_gpu_enable_triton_gemm"] is False
    # Gathered forward and backward, 8 bits instead of 16; the rest is head, embedding and norms.
    saved = gathered(compiled()) - gathered(report)
    assert saved == pytest.approx(2 * WEIGHTS, rel=0.01)
    console = Console(width=120, file=StringIO())
    print_compiled(report, console)
    assert "Matmuls in 8 bits" in console.file.getvalue()
    assert {row["path"] for row in report.to_json()["low_precision"]} == PATHS


def test_a_matmul_that_falls_back_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError) as error:
        compiled("precision.recipe=float8", "precision.recipe_kinds=[mlp]", "xla.xla_gpu_enable_triton_gemm=true")
    text = str(error.value)
    assert "computes matmuls in bfloat16" in text and "xla.xla_gpu_enable_triton_gemm: false" in text
    assert all(f"{path} {step}" in text for path in ("mlp.up", "mlp.down") for step in ("forward", "dgrad", "wgrad"))
    assert "attention" not in text


@pytest.mark.prove
def test_recipes_of_rows_and_of_blocks() -> None:
    rows = compiled("precision.recipe=float8_rowwise").low_precision
    assert {one.path for one in rows} == PATHS and all(one.low == one.calls for one in rows)
    blocks = compiled("precision.recipe=mxfp8", cluster="b200_8x8").low_precision
    assert {one.path for one in blocks} == PATHS
    assert all(one.low == one.calls > 0 and one.kernels == ("__cudnn$blockScaledDot",) for one in blocks)


@pytest.mark.prove
@pytest.mark.parametrize("name", ["llama3_8b", "llama3_70b", "llama3_8b_pipe"])
def test_shipped_configurations_run_every_chosen_matmul_in_8_bits(name: str) -> None:
    report = compile_for(replace(load_config(name), "precision.recipe=float8"), "h100_8x8")
    assert len(report.low_precision) == 3 * len(PATHS)
    assert all(one.low == one.calls for one in report.low_precision)
