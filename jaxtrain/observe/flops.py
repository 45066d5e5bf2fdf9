"""Model FLOPs and parameter counts in closed form, and the peak FLOP/s of known devices.

The formula, for one position of a sequence of `length` positions (from the configuration, nothing is measured):

    forward  = 2 * matmul weights + 2 * n_heads * (key width + value width) * (keys, summed over layers)
    training = 3 * forward

A multiply and an add are two FLOPs; the backward pass costs twice the forward. Matmul weights are the projections, the
feed-forward layer and the output head; of a mixture the router, the shared experts and top_k routed experts. Each block
of multi-token prediction counts with a head. The embedding lookup, norms, softmax and recomputation by remat are not
model FLOPs (PaLM, arXiv:2204.02311, appendix B). "full" counts `length` keys per position, as without a mask. "causal"
counts the keys that a position sees on average: (length + 1) / 2, fewer in a sliding window. Document boundaries in
packed sequences are not subtracted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from jaxtrain.config import ModelConfig

if TYPE_CHECKING:
    from jaxtrain.nn.layer_table import LayerSlot

Compute = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class ModelFlops:
    """Training FLOPs of one position, without masked scores (causal) and with them (full)."""

    causal: float
    full: float


@dataclass(frozen=True)
class PeakFlops:
    """Dense TFLOP/s of one device; None where it lacks this arithmetic or no figure is published."""

    bfloat16: float | None
    float16: float | None
    tensor32: float | None
    """float32 arrays at XLA's default precision: TF32 from Ampere on, one bfloat16 pass on a TPU."""
    float32: float | None
    """float32 arrays at highest precision."""


# Vendors' figures without sparsity. A name matches whole words of jax' device_kind; the longest matching name is used.
PEAKS: dict[str, PeakFlops] = {
    # NVIDIA V100 datasheet (SXM2)
    "V100": PeakFlops(None, 125.0, 15.7, 15.7),
    # NVIDIA A100 datasheet (SXM and PCIe have the same peaks)
    "A100": PeakFlops(312.0, 312.0, 156.0, 19.5),
    # NVIDIA A10, L4, L40, L40S datasheets, sparse figures halved
    "A10": PeakFlops(125.0, 125.0, 62.5, 31.2),
    "L4": PeakFlops(121.0, 121.0, 60.0, 30.3),
    "L40": PeakFlops(181.05, 181.05, 90.5, 90.5),
    "L40S": PeakFlops(362.05, 362.05, 183.0, 91.6),
    # NVIDIA H100 architecture whitepaper v1.04, table 2; NVL: H100 NVL product brief, sparse figures halved
    "H100": PeakFlops(989.4, 989.4, 494.7, 66.9),
    "H100 PCIe": PeakFlops(756.0, 756.0, 378.0, 51.2),
    "H100 NVL": PeakFlops(835.5, 835.5, 417.5, 60.0),
    # NVIDIA H200 and GH200 datasheets: the H100's chip
    "H200": PeakFlops(989.4, 989.4, 494.7, 66.9),
    "H200 NVL": PeakFlops(835.5, 835.5, 417.5, 60.0),
    "GH200": PeakFlops(989.4, 989.4, 494.7, 66.9),
    # NVIDIA HGX B200 and HGX B300 specifications: 36 PFLOP/s BF16 and 18 TF32 with sparsity, 600 TFLOP/s FP32, over 8
    "B200": PeakFlops(2250.0, 2250.0, 1125.0, 75.0),
    "B300": PeakFlops(2250.0, 2250.0, 1125.0, 75.0),
    # NVIDIA GB200 and GB300 NVL72 specifications, over 72: 360 PFLOP/s BF16 and 180 TF32 with sparsity, 5.76 FP32
    "GB200": PeakFlops(2500.0, 2500.0, 1250.0, 80.0),
    "GB300": PeakFlops(2500.0, 2500.0, 1250.0, 80.0),
    # Google Cloud TPU documentation, system architecture pages; jax calls v5e and v6e "lite", v5p "v5"
    "TPU v4": PeakFlops(275.0, None, 275.0, None),
    "TPU v5": PeakFlops(459.0, None, 459.0, None),
    "TPU v5p": PeakFlops(459.0, None, 459.0, None),
    "TPU v5 lite": PeakFlops(197.0, None, 197.0, None),
    "TPU v5e": PeakFlops(197.0, None, 197.0, None),
    "TPU v6 lite": PeakFlops(918.0, None, 918.0, None),
    "TPU v6e": PeakFlops(918.0, None, 918.0, None),
}


def peak_flops(device_kind: str, compute: Compute, matmul_precision: str | None = None) -> float | None:
    """Dense peak FLOP/s of one device for a compute dtype; None for an unknown device, a CPU or a MIG slice.

    `matmul_precision` is jax' jax_default_matmul_precision: "highest" and "float32" compute float32 matmuls in float32.
    """
    names = [name for name in PEAKS if re.search(rf"\b{re.escape(name)}\b", device_kind)]
    if not names or re.search(r"\bMIG\b", device_kind):
        return None
    exact = matmul_precision in ("highest", "float32")
    column = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32" if exact else "tensor32"}[compute]
    tera = getattr(PEAKS[max(names, key=len)], column)
    return None if tera is None else tera * 1e12


def training_flops(model: ModelConfig, length: int) -> ModelFlops:
    """Training FLOPs of one position in sequences of `length` positions, by the formula at the top of this file."""
    matmuls = 2 * matmul_weights(model)
    score = 2 * model.n_heads * sum(_head_widths(model))
    layers = _layer_slots(model)
    visible = sum(visible_keys(length, layer.window) for layer in layers)
    return ModelFlops(3 * (matmuls + score * visible), 3 * (matmuls + score * length * len(layers)))


def kernel_flops(model: ModelConfig, length: int, attention: bool, experts: bool) -> float:
    """The part of `training_flops(...).full` in attention kernels, and in the matmuls of routed experts."""
    layers = model.n_layers + model.mtp
    scores = 2 * model.n_heads * sum(_head_widths(model)) * length * layers if attention else 0
    mixtures = _mixtures(model) + model.mtp if model.moe.experts and experts else 0
    routed = 2 * mixtures * (_experts(model, model.moe.top_k) - _experts(model, 0))
    return 3 * (scores + routed)


def visible_keys(length: int, window: int | None) -> float:
    """Keys that a position sees under a causal mask, itself included, averaged over `length` positions."""
    most = min(length, window or length)
    return (most * (most + 1) / 2 + (length - most) * most) / length


def matmul_weights(model: ModelConfig) -> int:
    """Weights that multiply each position: projections, feed-forward layers, active experts, heads (tied or not)."""
    mixtures = _mixtures(model)
    layers = (model.n_layers + model.mtp) * _attention(model) + (model.n_layers - mixtures) * _dense(model)
    mtp = model.mtp * (2 * model.d_model**2 + (_active(model) if model.moe.experts else _dense(model)))
    return layers + mixtures * _active(model) + mtp + (1 + model.mtp) * model.d_model * model.vocab_size


def count_parameters(model: ModelConfig, active: bool = False) -> int:
    """Number of parameters in closed form; a tied head counts once. `active`: with top_k experts of each mixture.

    Active parameters exclude the blocks of multi-token prediction, which run in training only.
    """
    mixtures, depths = _mixtures(model), 0 if active else model.mtp
    experts = model.moe.top_k if active else model.moe.experts
    norm = model.d_model * _norm_vectors(model)
    attention = _attention(model) + _attention_vectors(model) + 2 * norm
    mixture = _experts(model, experts) + _mixture_vectors(model, experts)
    dense = _dense(model) + _biases(model, model.d_ff)
    mtp = depths * (attention + (mixture if mixtures else dense) + 3 * norm + 2 * model.d_model**2)
    tables = model.vocab_size * (1 if model.tied_head else 2) + model.max_seq_len * (model.positions == "learned")
    layers = model.n_layers * attention + mixtures * mixture + (model.n_layers - mixtures) * dense
    return layers + mtp + norm + tables * model.d_model


def _mixtures(model: ModelConfig) -> int:
    """Number of mixtures, without those of multi-token prediction."""
    return sum(slot.mixture is not None for slot in _layer_slots(model)[: model.n_layers])


def _head_widths(model: ModelConfig) -> tuple[int, int]:
    """Width of a head's key and of its value."""
    width, mla = model.width_of_head, model.mla
    return (width + mla.rope_dim, mla.v_dim or width) if mla.kv_rank else (width, width)


def _attention(model: ModelConfig) -> int:
    """Weights of the projections of an attention layer."""
    d, heads, mla = model.d_model, model.n_heads, model.mla
    key, value = _head_widths(model)
    if not mla.kv_rank:
        return 2 * d * key * (heads + model.kv_heads)
    query = mla.q_rank * (d + heads * key) if mla.q_rank else d * heads * key
    latent = d * (mla.kv_rank + mla.rope_dim) + mla.kv_rank * heads * (model.width_of_head + value)
    return query + latent + heads * value * d


def _attention_vectors(model: ModelConfig) -> int:
    """Biases, norms per head or of latent vectors, and sinks of an attention layer."""
    query, key = model.n_heads * model.width_of_head, model.kv_heads * model.width_of_head
    biases = (query + 2 * key) * model.qkv_bias + model.d_model * model.out_bias
    norms = 2 * model.width_of_head * model.qk_norm
    latent = model.mla.kv_rank + model.mla.q_rank if model.mla.kv_rank else 0
    return biases + norms + latent + model.n_heads * model.attention_sinks


# What follows is read from the modules that define it when FLOPs are counted: reading a compiled program needs no jax.


def _layer_slots(model: ModelConfig) -> tuple[LayerSlot, ...]:
    from jaxtrain.nn.layer_table import layer_table

    return layer_table(model)


def _matrices(model: ModelConfig) -> int:
    """Number of matrices of a feed-forward layer."""
    from jaxtrain.nn.activations import ACTIVATIONS

    return 3 if ACTIVATIONS[model.activation].gated else 2


def _norm_vectors(model: ModelConfig) -> int:
    """Number of vectors of a norm: a scale, and a bias where its kind has one."""
    from jaxtrain.nn.layers import NORMS

    return 2 if NORMS[model.norm].bias else 1


def _dense(model: ModelConfig) -> int:
    return model.d_model * model.d_ff * _matrices(model)


def _biases(model: ModelConfig, width: int) -> int:
    return (model.d_model + width * (_matrices(model) - 1)) * model.mlp_bias


def _experts(model: ModelConfig, routed: int) -> int:
    """Weights of a mixture with `routed` of its routed experts: router, routed and shared experts."""
    moe, d = model.moe, model.d_model
    return d * moe.experts + (routed + moe.shared) * d * (moe.d_ff or model.d_ff) * _matrices(model)


def _active(model: ModelConfig) -> int:
    return _experts(model, model.moe.top_k)


def _mixture_vectors(model: ModelConfig, routed: int) -> int:
    """Biases of routed experts, of the shared one and of the router, and its correction."""
    moe, width = model.moe, model.moe.d_ff or model.d_ff
    shared = _biases(model, moe.shared * width) if moe.shared else 0
    router = moe.experts * (model.mlp_bias + (moe.bias_rate is not None))
    return routed * _biases(model, width) + shared + router
