"""The step with attention kernels, compiled for GPUs that are not there."""

from __future__ import annotations

import pytest

from jaxtrain.config import ConfigError, replace, validate
from jaxtrain.program.compile import compile_for

BASE = validate(
    {
        "model": {"vocab_size": 512, "d_model": 256, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 64},
        "data": {"seq_len": 512, "tokenizer": {"vocab_size": 512}},
        "train": {"global_batch": 16},
        "precision": {"compute": "bfloat16"},
        "mesh": {"data": 4, "tensor": 4},
        "rules": {"preset": ["fsdp", "tensor"], "replicated_limit": 10**9},
    }
)


def test_auto_is_tokamax_with_windows_that_differ_and_a_soft_cap():
    report = compile_for(replace(BASE, "model.windows=[null, 128]", "model.attention_softcap=50"), "h100_8x8", 16)
    assert any(note.startswith("attention: tokamax (not dense: ") for note in report.notes), report.notes
    # A kernel in the forward pass and two in the backward one, in each of two layers.
    assert [(count, "mosaic_gpu" in target) for target, count in report.flops.opaque] == [(6, True)]
    assert report.unknown == ()


def test_cudnn_if_sequences_hold_one_document():
    report = compile_for(replace(BASE, "attention.backend=cudnn", "data.packing=none"), "h100_8x8", 16)
    assert any(note.startswith("attention: cudnn (") for note in report.notes), report.notes
    # Its FLOPs are in the text: two products forward, five backward, of whole score matrices.
    passes = "ops/kernels.py", "ops/residuals.py"
    attention = sum(n for source, n in report.flops.by_source.items() if any(each in source for each in passes))
    assert attention == 2 * 4 * 7 * 2 * 512 * 512 * 64  # layers x sequences x products x a head's scores
    assert report.unknown == ()


def test_an_unsupported_kernel_is_refused_before_compilation():
    with pytest.raises(ConfigError, match=r"attention\.backend cudnn cannot.*packed sequence.*: dense, tokamax, xla"):
        compile_for(replace(BASE, "attention.backend=cudnn"), "h100_8x8", 16)
