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
DENSE = ["llama", "llama3_rope", "mistral", "qwen3", "gpt2"]
MIXTURES = ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"]
FAMILIES = [*DENSE, *MIXTURES]
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
    "mixtral": {**LLAMA, "norm_eps": 1e-5, "rope": RopeConfig(theta=1_000_000), "moe": {"experts": 8, "top_k": 2}},
    "qwen3_moe": {
        **LLAMA, "qk_norm": True, "rope": RopeConfig(theta=10_000), "moe": {"experts": 8, "top_k": 2, "d_ff": 48},
    },
    "deepseek_v3": {
        **TINY, "d_ff": 112, "max_length": 256, "head_dim": 16, "rope": RopeConfig(theta=10_000),
        "mla": {"kv_rank": 32, "q_rank": 48, "rope_dim": 8, "v_dim": 16},
        # The reference's correction bias is a constant of the model.
        "moe": {"experts": 8, "top_k": 3, "d_ff": 32, "shared": 1, "first_dense": 1, "router": "sigmoid_chosen",
                "scale": 2.5, "groups": 4, "groups_kept": 2, "bias_rate": 0.0},
    },
    "gpt_oss": {
        **LLAMA, "norm_eps": 1e-5, "d_ff": 48, "activation": "swiglu_oss", "rope": RopeConfig(theta=150_000),
        "qkv_bias": True, "out_bias": True, "mlp_bias": True, "attention_sinks": True, "windows": [16, None],
        "moe": {"experts": 8, "top_k": 2},
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
    # Mixtral
    "model.layers.*.block_sparse_moe.gate.weight": "layers.mlp.router.weight",
    "model.layers.*.block_sparse_moe.experts.*.w1.weight": "layers.mlp.gate.weight",
    "model.layers.*.block_sparse_moe.experts.*.w2.weight": "layers.mlp.down.weight",
    "model.layers.*.block_sparse_moe.experts.*.w3.weight": "layers.mlp.up.weight",
    # Qwen3 MoE, DeepSeek-V3
    "model.layers.*.mlp.gate.weight": "layers.mlp.router.weight",
    "model.layers.*.mlp.gate.e_score_correction_bias": "layers.mlp.router.correction",
    **{
        f"model.layers.*.mlp.{theirs}.{kind}_proj.weight": f"layers.mlp.{ours}{kind}.weight"
        for theirs, ours in {"experts.*": "", "shared_experts": "shared."}.items()
        for kind in ("gate", "up", "down")
    },
    # gpt-oss
    "model.layers.*.mlp.router.weight": "layers.mlp.router.weight",
    "model.layers.*.mlp.router.bias": "layers.mlp.router.bias",
    **{
        f"model.layers.*.mlp.experts.{kind}_proj{theirs}": f"layers.mlp.{kind}.{ours}"
        for kind in ("gate", "up", "down")
        for theirs, ours in {"": "weight", "_bias": "bias"}.items()
    },
    **{
        f"model.layers.*.self_attn.{theirs}_proj.bias": f"layers.attention.{ours}.bias"
        for theirs, ours in {"q": "query", "k": "key", "v": "value", "o": "out"}.items()
    },
    "model.layers.*.self_attn.sinks": "layers.attention.sinks",
    # DeepSeek's latent attention
    "model.layers.*.self_attn.q_a_proj.weight": "layers.attention.query_down.weight",
    "model.layers.*.self_attn.q_a_layernorm.weight": "layers.attention.query_latent_norm.scale",
    "model.layers.*.self_attn.q_b_proj.weight": "layers.attention.query_up.weight",
    "model.layers.*.self_attn.kv_a_proj_with_mqa.weight": "layers.attention.kv_down.weight",
    "model.layers.*.self_attn.kv_a_layernorm.weight": "layers.attention.kv_latent_norm.scale",
    "model.layers.*.self_attn.kv_b_proj.weight": "layers.attention.kv_up.weight",
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
    config = ModelConfig.model_validate(CONFIGS[family])
    model = build(config)
    tensors = _stack(load_file(ROOT / family / "model.safetensors"), config.moe.first_dense)
    if family == "gpt2":
        tensors = _split_qkv(tensors)
    if family == "gpt_oss":
        tensors = _split_gates(tensors)
    if config.mla.kv_rank:
        tensors = {name: _halves(name, tensor, config) for name, tensor in tensors.items()}
    table = {**GPT2_TABLE, **{name: name for name in tensors if name.startswith("layers.")}}
    params: dict[str, Any] = {}
    for name, tensor in tensors.items():
        path = (table if family == "gpt2" else LLAMA_TABLE)[name.replace("dense_layers", "layers")].split(".")
        path[0] = "dense_layers" if "dense_layers" in name else path[0]
        node, shape = params, model.params
        for part in path[:-1]:
            node, shape = node.setdefault(part, {}), shape[part]
        # torch's Linear is [out, in], and so are routers.
        square = name.startswith("lm_head") or (name.startswith("model.") and tensor.ndim - name.count("*") == 2)
        transposed = family != "gpt2" and square and not re.search("embed|bias", name)
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


def _stack(tensors: dict[str, np.ndarray], first_dense: int) -> dict[str, np.ndarray]:
    """Numbered tensors of one name stacked, experts before layers; the first dense layers are a stack of their own."""
    numbered: dict[str, dict[int, np.ndarray]] = {}
    out = {}
    for name, tensor in tensors.items():
        if found := re.fullmatch(r"(.*\.)(\d+)(\..*)", name):
            begin = found[1]
            if begin == "model.layers." and int(found[2]) < first_dense:
                begin = "model.dense_layers."
            numbered.setdefault(f"{begin}*{found[3]}", {})[int(found[2])] = tensor
        else:
            out[name] = tensor
    stacked = {name: np.stack([rows[i] for i in sorted(rows)]) for name, rows in numbered.items()}
    return out | (_stack(stacked, first_dense) if stacked else {})


def _split_gates(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """gpt-oss' joined projections, whose outputs alternate between gate and up."""
    joined = {name: tensor for name, tensor in tensors.items() if "gate_up_proj" in name}
    parts = {
        name.replace("gate_up", kind): tensor[..., start::2]
        for name, tensor in joined.items()
        for start, kind in enumerate(("gate", "up"))
    }
    return {name: tensor for name, tensor in tensors.items() if name not in joined} | parts


def _halves(name: str, tensor: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Rotary outputs of [layers, out, in] from DeepSeek's order of pairs (0, 1), (2, 3) ... to ours, i with i + P/2."""
    P = config.mla.rope_dim
    order = np.concatenate([np.arange(0, P, 2), np.arange(1, P, 2)])
    if "q_b_proj" in name:
        heads = tensor.reshape(tensor.shape[0], config.n_heads, -1, tensor.shape[-1])
        turned = np.concatenate([heads[:, :, :-P], heads[:, :, -P:][:, :, order]], axis=2)
        return turned.reshape(tensor.shape)
    if "kv_a_proj" in name:
        return np.concatenate([tensor[:, :-P], tensor[:, -P:][:, order]], axis=1)
    return tensor


def _split_qkv(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    out = dict(tensors)
    for kind in ("weight", "bias"):
        joined = out.pop(f"transformer.h.*.attn.c_attn.{kind}")
        for name, part in zip(("query", "key", "value"), np.split(joined, 3, axis=-1), strict=True):
            out[f"layers.attention.{name}.{kind}"] = part
    return out
