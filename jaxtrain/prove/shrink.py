"""A configuration made small enough to prove, with the same structure: the rule is data, and is printed."""

from __future__ import annotations

import math
from typing import Any

from jaxtrain.config import MlaConfig, ModelConfig, MoeConfig, RunConfig, to_tree, validate

LENGTH, ROWS, VOCAB, WIDTH, HEAD, LAYERS = 32, 16, 128, 64, 8, 8
"""Tokens of a row, rows of an update, entries of the vocabulary, width of the residual stream, of a head, layers."""
UPDATES = 3
"""Updates that are compared."""

RULE = (
    "widths: d_model 64, head 8 (odd stays odd: 7), d_ff 96, an expert's 32, vocabulary 128, rows of 32 tokens",
    "key/value heads and query heads a key/value head: powers of two up to 8 heads, times 3 where one has an"
    " odd factor",
    "layers: whole window patterns, at least 8 or all that there are; dense first layers 1, a mixture at most every"
    " 2nd layer",
    "windows: the same share of the row, from 2 tokens to half a row; scaled rotary positions were trained on 16",
    "experts: 8, or 12 where an odd factor is; 2 of them a token (1 stays 1); groups 2, half of them kept",
    "microbatches: 16 rows an update, 2 microbatches where there are several; remat at most every 2nd layer",
    "kept as they are: tying, norms, biases, activation, positions, soft caps, sinks, router, shared experts, latent "
    "attention, further tokens, the optimizer's rule",
    "switched on: clipping, weight decay, z-loss, the mixtures' balancing and z-loss; float32; Adam's eps is 1e-4, so "
    "that a gradient of rounding noise makes no whole step; no capacity, which drops by rows, not by tokens",
)
"""What `shrink` does, a sentence a line."""

OPTIMIZER = {
    "learning_rate": 3e-3, "schedule": "cosine", "unit": "steps", "warmup": 2, "decay": 0, "total": None,
    "final_ratio": 0.1, "eps": 1e-4, "weight_decay": 0.1, "clip_norm": 1.0,
}  # fmt: skip


def shrink(config: RunConfig) -> RunConfig:
    """The configuration of a proof by RULE; its mesh, rules and way of attention are left as they are."""
    tree, train = to_tree(config), config.train
    accumulates = train.microbatch is not None or (train.accumulation or 1) > 1
    return validate({
        "mesh": tree["mesh"], "attention": tree["attention"],
        "remat": {**tree["remat"], "every": min(config.remat.every, 2)},
        "pipeline": {**tree["pipeline"], "microbatches": None, "stages": "auto"},
        "rules": {**tree["rules"], "replicated_limit": 10**9},
        "model": _model(config.model, config.data.seq_len),
        "data": {"seq_len": LENGTH, "tokenizer": {"vocab_size": VOCAB}},
        "train": {
            "steps": 10, "global_batch": ROWS, "accumulation": 1 + accumulates, "z_loss": 1e-2, "sample_prompt": "",
        },
        "optimizer": {**tree["optimizer"], **OPTIMIZER},
        "eval": {"every": None},
    })  # fmt: skip


def _model(model: ModelConfig, length: int) -> dict[str, Any]:
    groups = _small(model.n_heads // model.kv_heads, 2)
    kv_heads = _small(model.kv_heads, 3 - _twos(groups))
    kv_heads //= math.gcd(kv_heads, groups, 3)
    head = HEAD - model.width_of_head % 2
    scale = model.attention_scale
    return {
        **model.model_dump(),
        "vocab_size": VOCAB, "d_model": WIDTH, "n_layers": _layers(model), "n_heads": groups * kv_heads,
        "n_kv_heads": kv_heads, "head_dim": head, "d_ff": 96, "max_seq_len": LENGTH,
        "init_std": WIDTH**-0.5,
        "windows": [w and max(2, min(LENGTH // 2, round(LENGTH * w / length))) for w in model.windows],
        "rope": {**model.rope.model_dump(), "original_seq_len": LENGTH // 2},
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
        "experts": max(_small(moe.experts, 3), groups), "top_k": min(moe.top_k, 2), "groups": groups,
        "top_groups": groups if moe.top_groups == moe.groups else 1, "d_ff": moe.d_ff and 32,
        "shared": min(moe.shared, 2), "first_dense": min(moe.first_dense, 1), "every": min(moe.every, 2),
        "balance_weight": 2e-2, "z_weight": 1e-2, "capacity": None, "buffer": None,
    }  # fmt: skip


def _latent(mla: MlaConfig, before: int, after: int) -> dict[str, Any]:
    if not mla.kv_rank:
        return {}
    value = None if mla.v_dim is None else after if mla.v_dim == before else after - 2
    return {"kv_rank": 16, "q_rank": min(mla.q_rank, 24), "rope_dim": 4, "v_dim": value}


def _small(n: int, most: int) -> int:
    """n's power of two, up to 2**most, times 3 where n has an odd factor."""
    twos = _twos(n)
    return 2 ** min(twos, most) * (3 if n >> twos > 1 else 1)


def _twos(n: int) -> int:
    return (n & -n).bit_length() - 1
