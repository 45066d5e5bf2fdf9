"""Folders of the hub for tests: the reference models, their parameter trees, files made of random numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxtrain.config import ModelConfig
from jaxtrain.hub.family import Family, model_of
from jaxtrain.hub.load import describe
from jaxtrain.mesh.param import Param
from jaxtrain.nn.model import Model, build

ROOT = Path(__file__).resolve().parents[1] / "data" / "reference"
DENSE = ["llama", "llama3_rope", "mistral", "qwen2", "qwen3", "gpt2"]
MIXTURES = ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss_yarn"]


def tensors_in(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a folder, as the safetensors library reads it."""
    return {name: array for file in sorted(folder.glob("*.safetensors")) for name, array in load_file(file).items()}


def write_folder(folder: Path, config: Path, tensors: dict[str, np.ndarray]) -> Path:
    """A folder of one file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes((config / "config.json").read_bytes())
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, folder / "model.safetensors")
    return folder


def opened(folder: Path, **changes: Any) -> tuple[Family, Model, int]:
    """Family, model (settings changed) and the hub's vocabulary of a folder."""
    family, hub, settings = describe(folder)
    config = model_of(settings | changes)
    return family, model_for(config), hub["vocab_size"]


def model_for(config: ModelConfig) -> Model:
    """The decoder's own tree, or that of the names agreed for mixtures, latent attention and further tokens."""
    special = config.moe.experts or config.mla.kv_rank or config.mtp or config.attention_sinks
    return Model(config, None, agreed_tree(config)) if special else build(config)  # type: ignore[arg-type]


def agreed_tree(config: ModelConfig) -> dict[str, Any]:
    """Tree of Param of a mixture, as the decoder names them."""
    from jaxtrain.hub.family import layer_numbers

    D, V, F, moe = config.d_model, config.vocab_size, config.d_ff, config.moe
    P = Param
    numbers = layer_numbers(config)

    def gated(width: int, lead: tuple[int, ...] = (), names: tuple[str, ...] = ()) -> dict[str, Any]:
        wide = (*lead, D, width), (*names, "embed", "mlp")
        mlp: dict[str, Any] = {"gate": {"weight": P(*wide)}, "up": {"weight": P(*wide)}}
        mlp["down"] = {"weight": P((*lead, width, D), (*names, "mlp", "embed"))}
        if config.mlp_bias:
            for name in ("gate", "up"):
                mlp[name]["bias"] = P((*lead, width), (*names, "mlp"))
            mlp["down"]["bias"] = P((*lead, D), (*names, "norm"))
        return mlp

    def mixture() -> dict[str, Any]:
        mlp = gated(moe.d_ff or F, (moe.experts,), ("experts",))
        mlp["router"] = {"weight": P((D, moe.experts), ("embed", "whole"))}
        if config.mlp_bias:
            mlp["router"]["bias"] = P((moe.experts,), ("whole",))
        if moe.bias_rate is not None:
            mlp["router"]["correction"] = P((moe.experts,), ("whole",))
        if moe.shared:
            mlp["shared"] = gated(moe.shared * (moe.d_ff or F))
        return mlp

    def block(mixed: bool) -> dict[str, Any]:
        attention = latent(config) if config.mla.kv_rank else grouped(config)
        norm = {"scale": P((D,), ("norm",))}
        return {
            "attention_norm": norm, "mlp_norm": norm, "attention": attention, "mlp": mixture() if mixed else gated(F),
        }  # fmt: skip

    def stack(tree: Any, layers: int) -> Any:
        return jax.tree.map(lambda p: P((layers, *p.shape), ("layers", *p.names)), tree)

    tree = {
        "embed": {"tokens": P((V, D), ("vocab", "embed"))},
        "layers": stack(block(moe.experts > 0), len(numbers["layers"])),
        "norm": {"scale": P((D,), ("norm",))},
        "head": {"weight": P((D, V), ("embed", "vocab"))},
    }
    if numbers["dense_layers"]:
        tree["dense_layers"] = stack(block(False), len(numbers["dense_layers"]))
    if config.mtp:
        norm = {"scale": P((D,), ("norm",))}
        ahead = {"embed_norm": norm, "hidden_norm": norm, "norm": norm, "block": block(moe.experts > 0)}
        ahead["project"] = {"weight": P((2 * D, D), ("whole", "embed"))}
        tree["mtp"] = stack(ahead, config.mtp)
    return tree


def grouped(config: ModelConfig) -> dict[str, Any]:
    D, H, K, E = config.d_model, config.n_heads, config.kv_heads, config.width_of_head
    tree: dict[str, Any] = {
        "query": {"weight": Param((D, H, E), ("embed", "heads", "head_dim"))},
        "key": {"weight": Param((D, K, E), ("embed", "kv_heads", "head_dim"))},
        "value": {"weight": Param((D, K, E), ("embed", "kv_heads", "head_dim"))},
        "out": {"weight": Param((H, E, D), ("heads", "head_dim", "embed"))},
    }
    if config.qkv_bias:
        for name, heads in (("query", H), ("key", K), ("value", K)):
            tree[name]["bias"] = Param((heads, E), ("heads" if name == "query" else "kv_heads", "head_dim"))
    if config.out_bias:
        tree["out"]["bias"] = Param((D,), ("norm",))
    if config.qk_norm:
        tree |= {name: {"scale": Param((E,), ("head_dim",))} for name in ("query_norm", "key_norm")}
    if config.attention_sinks:
        tree["sinks"] = Param((H,), ("heads",))
    return tree


def latent(config: ModelConfig) -> dict[str, Any]:
    D, H, E, mla = config.d_model, config.n_heads, config.width_of_head, config.mla
    R, Q, r, V = mla.kv_rank, mla.q_rank, mla.rope_dim, mla.v_dim or E
    return {
        "query_down": {"weight": Param((D, Q), ("embed", "whole"))},
        "query_latent_norm": {"scale": Param((Q,), ("whole",))},
        "query_up": {"weight": Param((Q, H, E + r), ("whole", "heads", "head_dim"))},
        "kv_down": {"weight": Param((D, R + r), ("embed", "whole"))},
        "kv_latent_norm": {"scale": Param((R,), ("whole",))},
        "kv_up": {"weight": Param((R, H, E + V), ("whole", "heads", "head_dim"))},
        "out": {"weight": Param((H, V, D), ("heads", "head_dim", "embed"))},
    }
