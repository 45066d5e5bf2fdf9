"""Shrink a configuration so that it compiles and runs in seconds, keeping the model's structure."""

from __future__ import annotations

import math
from typing import Any

from jaxtrain.config import MlaConfig, ModelConfig, MoeConfig, OptimizerConfig, RunConfig, to_tree, validate

SEQ_LEN, BATCH, VOCAB, WIDTH, HEAD, LAYERS = 32, 16, 128, 64, 8, 8
"""Tokens a sequence, sequences a global batch, vocabulary size, d_model, head_dim, number of layers."""

SHRINK_RULES = (
    "widths: d_model 64, head_dim 8 (7 if odd), d_ff 96, expert d_ff 32, vocabulary 128, sequences of 32 tokens",
    "key/value heads, and query heads per key/value head: their power of two, at most 8 heads, times 3 if one of them "
    "has an odd factor",
    "layers: whole window patterns, at least 8 or all there are; 1 leading dense layer; a mixture at most every 2nd "
    "layer",
    "windows: the same share of the sequence, from 2 tokens to half of it; RoPE scaling from an original length of 16",
    "experts: 8, or 12 with an odd factor; top_k 2 (1 stays 1); 2 groups, of which 1 is selected if not all were",
    "batch: 16 sequences, in 2 microbatches if there were several; remat at most every 2nd layer",
    "unchanged: tied embeddings, norms, biases, activation, positions, soft caps, sinks, router, shared experts, "
    "latent attention, multi-token prediction, the optimizer, the loss, whatever user code registered",
    "set: clipping, weight decay, z-loss, the mixtures' balance loss and z-loss; float32 without a recipe; Adam's eps "
    "1e-4, so that gradients of rounding size make no full step; lion's learning rate 3e-5, so that a flipped sign "
    "changes no later gradient; no bound of the experts' buffers, since drops depend on the layout",
)
"""What `shrink` does, one rule a line; printed by `verify`."""

OPTIMIZER = {
    "learning_rate": 3e-3, "schedule": "cosine", "unit": "steps", "warmup": 2, "decay": 0, "total": None,
    "final_ratio": 0.1, "eps": 1e-4, "weight_decay": 0.1, "clip_norm": 1.0,
}  # fmt: skip
SIGNED_RATE = 3e-5
BUILTIN_SCHEDULES = ("cosine", "linear", "wsd", "constant")


def shrink(config: RunConfig) -> RunConfig:
    """The configuration shrunk by SHRINK_RULES; mesh, rules and attention settings are unchanged."""
    tree, train = to_tree(config), config.train
    accumulates = train.microbatch is not None or (train.accumulation or 1) > 1
    model = _model(config.model, config.data.seq_len)
    return validate({
        "mesh": tree["mesh"], "attention": tree["attention"],
        "remat": {**tree["remat"], "every": min(config.remat.every, 2)},
        "pipeline": {**tree["pipeline"], "microbatches": None, "stages": "auto"},
        "rules": {**tree["rules"], "replicated_limit": 10**9},
        "model": model,
        "data": {"seq_len": SEQ_LEN, "tokenizer": {"vocab_size": model["unpadded_vocab_size"] or VOCAB}},
        "train": {
            "steps": 10, "global_batch": BATCH, "accumulation": 1 + accumulates, "z_loss": 1e-2, "sample_prompt": "",
            "loss": train.loss, "metrics": train.metrics,
        },
        "optimizer": {**tree["optimizer"], **_optimizer(config.optimizer)},
        "eval": {"every": None},
    })  # fmt: skip


def _optimizer(config: OptimizerConfig) -> dict[str, Any]:
    """Optimizer settings; a schedule that user code registered is kept."""
    kept = {} if config.schedule in BUILTIN_SCHEDULES else {"schedule": config.schedule}
    # A sign that rounding flips must not change the gradients of the next step by more than rounding does.
    small = {"learning_rate": SIGNED_RATE} if config.name == "lion" else {}
    return OPTIMIZER | kept | small


def _model(model: ModelConfig, seq_len: int) -> dict[str, Any]:
    groups = _shrink_count(model.n_heads // model.kv_heads, 2)
    kv_heads = _shrink_count(model.kv_heads, 3 - _factors_of_two(groups))
    kv_heads //= math.gcd(kv_heads, groups, 3)
    head = HEAD - model.width_of_head % 2
    scale = model.attention_scale
    return {
        **model.model_dump(),
        "vocab_size": VOCAB, "unpadded_vocab_size": model.unpadded_vocab_size and VOCAB - 8,
        "d_model": WIDTH, "n_layers": _layers(model), "n_heads": groups * kv_heads,
        "n_kv_heads": kv_heads, "head_dim": head, "d_ff": 96, "max_seq_len": SEQ_LEN,
        "init_std": WIDTH**-0.5,
        "windows": [w and max(2, min(SEQ_LEN // 2, round(SEQ_LEN * w / seq_len))) for w in model.windows],
        "rope": {**model.rope.model_dump(), "original_seq_len": SEQ_LEN // 2},
        "attention_scale": scale and scale * math.sqrt(model.width_of_head / head),
        "moe": _mixture(model.moe), "mla": _latent(model.mla, model.width_of_head, head), "mtp": min(model.mtp, 2),
    }  # fmt: skip


def _layers(model: ModelConfig) -> int:
    pattern = math.lcm(len(model.windows), 2)
    return min(model.n_layers, pattern * -(-LAYERS // pattern))


def _mixture(moe: MoeConfig) -> dict[str, Any]:
    if not moe.experts:
        return {}
    groups = min(moe.groups, 2)
    return {
        **moe.model_dump(),
        "experts": max(_shrink_count(moe.experts, 3), groups), "top_k": min(moe.top_k, 2), "groups": groups,
        "top_groups": groups if moe.top_groups == moe.groups else 1, "d_ff": moe.d_ff and 32,
        "shared": min(moe.shared, 2), "first_dense": min(moe.first_dense, 1), "every": min(moe.every, 2),
        "balance_weight": 2e-2, "z_weight": 1e-2, "buffer": None,
    }  # fmt: skip


def _latent(mla: MlaConfig, head_dim: int, new_head_dim: int) -> dict[str, Any]:
    if not mla.kv_rank:
        return {}
    value = None if mla.v_dim is None else new_head_dim if mla.v_dim == head_dim else new_head_dim - 2
    return {"kv_rank": 16, "q_rank": min(mla.q_rank, 24), "rope_dim": 4, "v_dim": value}


def _shrink_count(n: int, max_twos: int) -> int:
    """The power of two in n, at most 2**max_twos, times 3 if n has an odd factor."""
    twos = _factors_of_two(n)
    return 2 ** min(twos, max_twos) * (3 if n >> twos > 1 else 1)


def _factors_of_two(n: int) -> int:
    return (n & -n).bit_length() - 1
