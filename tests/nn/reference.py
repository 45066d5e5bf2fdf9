"""Reference models of transformers (tests/data/reference) as jaxtrain models: a tiny table a family."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from jaxtrain.config import ModelConfig, RopeConfig
from jaxtrain.nn.model import Model, build

ROOT = Path(__file__).resolve().parents[1] / "data" / "reference"
FAMILIES = ["llama", "llama3_rope", "mistral", "qwen3", "gpt2"]
TINY = {"vocab_size": 192, "d_model": 64, "n_layers": 3, "n_heads": 4, "norm_eps": 1e-6}
LLAMA = {**TINY, "n_kv_heads": 2, "head_dim": 16, "d_ff": 128, "max_length": 256, "rope": RopeConfig(theta=500_000)}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama3_rope": {
        **LLAMA, "tied_head": True,
        "rope": RopeConfig(theta=500_000, scaling="llama3", factor=8, low_freq_factor=1, high_freq_factor=4,
                           original_length=64),
    },
    "mistral": {**LLAMA, "windows": [16], "rope": RopeConfig(theta=10_000)},
    "qwen3": {**LLAMA, "qk_norm": True, "rope": RopeConfig(theta=1_000_000)},
    "gpt2": {
        **TINY, "d_ff": 256, "max_length": 128, "norm": "layernorm", "norm_eps": 1e-5, "activation": "gelu_tanh",
        "positions": "learned", "qkv_bias": True, "out_bias": True, "mlp_bias": True, "tied_head": True,
    },
}  # fmt: skip

# Path in the hub (layers as *) -> ours. torch's Linear is [out, in], GPT-2's Conv1D [in, out].
LLAMA_TABLE = {
    "model.embed_tokens.weight": "embed.tokens",
    "model.layers.*.input_layernorm.weight": "layers.attention_norm.scale",
    "model.layers.*.post_attention_layernorm.weight": "layers.mlp_norm.scale",
    "model.layers.*.self_attn.q_proj.weight": "layers.attention.query.weight",
    "model.layers.*.self_attn.k_proj.weight": "layers.attention.key.weight",
    "model.layers.*.self_attn.v_proj.weight": "layers.attention.value.weight",
    "model.layers.*.self_attn.q_norm.weight": "layers.attention.query_norm.scale",
    "model.layers.*.self_attn.k_norm.weight": "layers.attention.key_norm.scale",
    "model.layers.*.self_attn.o_proj.weight": "layers.attention.out.weight",
    "model.layers.*.mlp.gate_proj.weight": "layers.mlp.gate.weight",
    "model.layers.*.mlp.up_proj.weight": "layers.mlp.up.weight",
    "model.layers.*.mlp.down_proj.weight": "layers.mlp.down.weight",
    "model.norm.weight": "norm.scale",
    "lm_head.weight": "head.weight",
}
GPT2_TABLE = {
    "transformer.wte.weight": "embed.tokens",
    "transformer.wpe.weight": "embed.positions",
    "transformer.ln_f.weight": "norm.scale",
    "transformer.ln_f.bias": "norm.bias",
    **{
        f"transformer.h.*.{theirs}.{kind}": f"layers.{ours}.{'scale' if kind == 'weight' and 'ln' in theirs else kind}"
        for theirs, ours in {
            "ln_1": "attention_norm", "ln_2": "mlp_norm", "attn.c_proj": "attention.out",
            "mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down",
        }.items()
        for kind in ("weight", "bias")
    },
}  # fmt: skip


@dataclass(frozen=True)
class Reference:
    model: Model
    params: dict[str, Any]
    arrays: dict[str, np.ndarray]
    numbers: dict[str, Any]


def load(family: str) -> Reference:
    model = build(ModelConfig.model_validate(CONFIGS[family]))
    tensors = _stack(load_file(ROOT / family / "model.safetensors"))
    if family == "gpt2":
        tensors = _split_qkv(tensors)
    table = {**GPT2_TABLE, **{name: name for name in tensors if name.startswith("layers.")}}
    params: dict[str, Any] = {}
    for name, tensor in tensors.items():
        path = (table if family == "gpt2" else LLAMA_TABLE)[name].split(".")
        node, shape = params, model.params
        for part in path[:-1]:
            node, shape = node.setdefault(part, {}), shape[part]
        transposed = (family != "gpt2" and name.endswith("proj.weight")) or name == "lm_head.weight"
        node[path[-1]] = (tensor.swapaxes(-1, -2) if transposed else tensor).reshape(shape[path[-1]].shape)
    arrays = dict(np.load(ROOT / family / "reference.npz"))
    return Reference(model, params, arrays, json.loads((ROOT / family / "reference.json").read_text()))


def shifted(labels_BL: np.ndarray) -> np.ndarray:
    """Labels of our convention (the target of each position) from the hub's (the token itself, -100 unscored)."""
    out = np.full_like(labels_BL, -1)
    out[:, :-1] = np.where(labels_BL[:, 1:] == -100, -1, labels_BL[:, 1:])
    return out


def places(tokens_BL: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions and segments of rows that hold one whole document each."""
    return np.broadcast_to(np.arange(tokens_BL.shape[1]), tokens_BL.shape), np.ones_like(tokens_BL)


def _stack(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    layers: dict[str, dict[int, np.ndarray]] = {}
    out = {}
    for name, tensor in tensors.items():
        if found := re.fullmatch(r"(.*\.)(\d+)(\..*)", name):
            layers.setdefault(f"{found[1]}*{found[3]}", {})[int(found[2])] = tensor
        else:
            out[name] = tensor
    return out | {name: np.stack([rows[i] for i in range(len(rows))]) for name, rows in layers.items()}


def _split_qkv(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    out = dict(tensors)
    for kind in ("weight", "bias"):
        joined = out.pop(f"transformer.h.*.attn.c_attn.{kind}")
        for name, part in zip(("query", "key", "value"), np.split(joined, 3, axis=-1), strict=True):
            out[f"layers.attention.{name}.{kind}"] = part
    return out
