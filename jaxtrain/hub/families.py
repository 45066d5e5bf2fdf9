"""The families' tables: one mapping per tensor, one field per setting. Shared parts are defined once."""

from __future__ import annotations

import math
from dataclasses import replace

from jaxtrain.config import ConfigError, ModelConfig
from jaxtrain.hub.family import Family
from jaxtrain.hub.fields import (
    Field,
    Json,
    Settings,
    equal,
    fixed,
    implied,
    layer_windows,
    one_of,
    one_window,
    required,
    rope,
    rope_parameters,
    yarn_mscale,
)
from jaxtrain.hub.mapping import TensorMapping, tensor

LAYER = "model.layers.{layer}."

COMMON = (
    equal("vocab_size", "vocab_size"),
    equal("hidden_size", "d_model"),
    equal("num_hidden_layers", "n_layers"),
    equal("num_attention_heads", "n_heads"),
    equal("max_position_embeddings", "max_seq_len"),
    equal("rms_norm_eps", "norm_eps"),
    equal("initializer_range", "init_std", 0.02),
    equal("tie_word_embeddings", "tied_head", False),
    implied(norm="rmsnorm", positions="rope"),
)
KV_HEADS = equal("num_key_value_heads", "n_kv_heads")
SWIGLU = (fixed("hidden_act", "silu", "swish"), implied(activation="swiglu"))
FF_WIDTH = equal("intermediate_size", "d_ff")
WIDTHS = (FF_WIDTH, equal("head_dim", "head_dim", None))
BIASED = equal("attention_bias", ("qkv_bias", "out_bias"), False)
QK_NORM = implied(qk_norm=True)

OUTER = {
    "embed/tokens": tensor("model.embed_tokens.weight", "V,D"),
    "norm/scale": tensor("model.norm.weight", "D"),
    "head/weight": tensor("lm_head.weight", "V,D", "DV"),
}
NORMS = {
    "attention_norm/scale": tensor(LAYER + "input_layernorm.weight", "D"),
    "mlp_norm/scale": tensor(LAYER + "post_attention_layernorm.weight", "D"),
}
ATTENTION = {
    "attention/query/weight": tensor(LAYER + "self_attn.q_proj.weight", "HE,D", "DHE"),
    "attention/query/bias": tensor(LAYER + "self_attn.q_proj.bias", "HE"),
    "attention/key/weight": tensor(LAYER + "self_attn.k_proj.weight", "KE,D", "DKE"),
    "attention/key/bias": tensor(LAYER + "self_attn.k_proj.bias", "KE"),
    "attention/value/weight": tensor(LAYER + "self_attn.v_proj.weight", "KE,D", "DKE"),
    "attention/value/bias": tensor(LAYER + "self_attn.v_proj.bias", "KE"),
    "attention/query_norm/scale": tensor(LAYER + "self_attn.q_norm.weight", "E"),
    "attention/key_norm/scale": tensor(LAYER + "self_attn.k_norm.weight", "E"),
    "attention/out/weight": tensor(LAYER + "self_attn.o_proj.weight", "D,HE", "HED"),
    "attention/out/bias": tensor(LAYER + "self_attn.o_proj.bias", "D"),
}
LATENT = {
    "attention/query/weight": tensor(LAYER + "self_attn.q_proj.weight", "HE,D", "DHE", interleaved="E"),
    "attention/query_down/weight": tensor(LAYER + "self_attn.q_a_proj.weight", "R,D", "DR"),
    "attention/query_latent_norm/scale": tensor(LAYER + "self_attn.q_a_layernorm.weight", "R"),
    "attention/query_up/weight": tensor(LAYER + "self_attn.q_b_proj.weight", "HE,R", "RHE", interleaved="E"),
    "attention/kv_down/weight": tensor(LAYER + "self_attn.kv_a_proj_with_mqa.weight", "R,D", "DR", interleaved="R"),
    "attention/kv_latent_norm/scale": tensor(LAYER + "self_attn.kv_a_layernorm.weight", "R"),
    "attention/kv_up/weight": tensor(LAYER + "self_attn.kv_b_proj.weight", "HE,R", "RHE"),
    "attention/out/weight": tensor(LAYER + "self_attn.o_proj.weight", "D,HE", "HED"),
}


def feed_forward(
    prefix: str, path: str = "mlp", names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, TensorMapping]:
    """Mappings of a gated feed-forward layer that the hub stores as three linear layers under `prefix`."""
    gate, up, down = names
    return {
        f"{path}/gate/weight": tensor(f"{LAYER}{prefix}.{gate}.weight", "F,D", "DF"),
        f"{path}/gate/bias": tensor(f"{LAYER}{prefix}.{gate}.bias", "F"),
        f"{path}/up/weight": tensor(f"{LAYER}{prefix}.{up}.weight", "F,D", "DF"),
        f"{path}/up/bias": tensor(f"{LAYER}{prefix}.{up}.bias", "F"),
        f"{path}/down/weight": tensor(f"{LAYER}{prefix}.{down}.weight", "D,F", "FD"),
        f"{path}/down/bias": tensor(f"{LAYER}{prefix}.{down}.bias", "D"),
    }


def router(prefix: str) -> dict[str, TensorMapping]:
    """The mapping of a router's weight."""
    return {"mlp/router/weight": tensor(f"{LAYER}{prefix}.weight", "X,D", "DX")}


LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    base="model.",
    fields=(
        *COMMON, equal("num_key_value_heads", "n_kv_heads", None), *SWIGLU, *WIDTHS, BIASED,
        equal("mlp_bias", "mlp_bias", False), rope(10_000.0), implied(windows=[None]),
    ),
    outer=OUTER,
    block={**NORMS, **ATTENTION, **feed_forward("mlp")},
    experts={},
    mtp={},
    copies={"lm_head.weight": "model.embed_tokens.weight"},
    buffers=("*.rotary_emb.inv_freq",),
    ignored_keys=frozenset(),
)  # fmt: skip
MISTRAL = replace(
    LLAMA, name="mistral", architecture="MistralForCausalLM",
    fields=(*COMMON, KV_HEADS, *SWIGLU, *WIDTHS, rope(10_000.0), one_window(4096)),
)  # fmt: skip
QWEN2 = replace(
    LLAMA, name="qwen2", architecture="Qwen2ForCausalLM",
    fields=(
        *COMMON, KV_HEADS, *SWIGLU, *WIDTHS, implied(qkv_bias=True), rope(10_000.0),
        layer_windows(switch=True, default=4096),
    ),
)  # fmt: skip
QWEN3 = replace(
    LLAMA, name="qwen3", architecture="Qwen3ForCausalLM",
    fields=(
        *COMMON, KV_HEADS, *SWIGLU, FF_WIDTH, equal("head_dim", "head_dim", 128), BIASED, QK_NORM, rope(10_000.0),
        layer_windows(switch=True, default=4096),
    ),
)  # fmt: skip
MIXTRAL = replace(
    LLAMA, name="mixtral", architecture="MixtralForCausalLM",
    fields=(
        *COMMON, KV_HEADS, *SWIGLU, *WIDTHS, rope(1e6), one_window(None),
        equal("num_local_experts", "moe.experts"),
        equal("num_experts_per_tok", "moe.top_k"), implied(**{"moe.router": "softmax_chosen"}),
    ),
    block={**NORMS, **ATTENTION, **router("block_sparse_moe.gate")},
    experts=feed_forward("block_sparse_moe.experts.{expert}", names=("w1", "w3", "w2")),
)  # fmt: skip


def _sparse_layers() -> Field:
    """Which layers of a Qwen mixture are dense."""

    def read(hub: Json) -> Settings:
        dense, step = hub.get("mlp_only_layers") or [], hub.get("decoder_sparse_step", 1)
        if dense != [*range(len(dense))] or (dense and step != 1):
            raise ConfigError(
                f"config.json: mlp_only_layers {dense} with decoder_sparse_step {step}: dense layers can only come "
                "first, or regularly"
            )
        return {"moe.first_dense": len(dense), "moe.every": step}

    def write(model: ModelConfig) -> Json:
        return {"mlp_only_layers": [*range(model.moe.first_dense)], "decoder_sparse_step": model.moe.every}

    return Field(("mlp_only_layers", "decoder_sparse_step"), read, write)


def _router(scores: str) -> Field:
    return one_of("norm_topk_prob", "moe.router", {True: f"{scores}_chosen", False: scores})


QWEN3_MOE = replace(
    LLAMA, name="qwen3_moe", architecture="Qwen3MoeForCausalLM",
    fields=(
        *COMMON, KV_HEADS, *SWIGLU, *WIDTHS, BIASED, QK_NORM, rope(10_000.0),
        fixed("use_sliding_window", False), implied(windows=[None]),
        equal(("num_experts", "num_local_experts"), "moe.experts"),
        equal("num_experts_per_tok", "moe.top_k"), equal("moe_intermediate_size", "moe.d_ff"), _router("softmax"),
        _sparse_layers(),
    ),
    block={**NORMS, **ATTENTION, **feed_forward("mlp"), **router("mlp.gate")},
    experts=feed_forward("mlp.experts.{expert}"),
    ignored_keys=frozenset({"sliding_window", "max_window_layers"}),
)  # fmt: skip


def _latent_scale() -> Field:
    """DeepSeek multiplies the attention scale by the square of YaRN's mscale, in addition to what RoPE does."""

    def read(hub: Json) -> Settings:
        rope_settings = rope_parameters(hub)
        if not rope_settings.get("mscale_all_dim"):
            return {"attention_scale": None}
        width = hub["qk_nope_head_dim"] + hub["qk_rope_head_dim"]
        mscale = yarn_mscale(rope_settings["factor"], rope_settings["mscale_all_dim"])
        return {"attention_scale": mscale**2 / math.sqrt(width)}

    def write(model: ModelConfig) -> Json:
        if model.attention_scale is None or model.rope.factor <= 1:
            return {}
        mscale = math.sqrt(model.attention_scale * math.sqrt(model.width_of_head + model.mla.rope_dim))
        return {"rope_scaling": {"mscale_all_dim": (mscale - 1) / (0.1 * math.log(model.rope.factor))}}

    return Field((), read, write)


DEEPSEEK_V3 = replace(
    LLAMA, name="deepseek_v3", architecture="DeepseekV3ForCausalLM",
    fields=(
        *COMMON, equal("num_key_value_heads", "n_kv_heads", None), *SWIGLU, FF_WIDTH, rope(10_000.0),
        implied(windows=[None]),
        fixed("attention_bias", False), fixed("rope_interleave", True), equal("qk_nope_head_dim", "head_dim"),
        equal("qk_rope_head_dim", "mla.rope_dim"), _latent_scale(), equal("v_head_dim", "mla.v_dim"),
        equal("kv_lora_rank", "mla.kv_rank"),
        Field(
            ("q_lora_rank",), lambda hub: {"mla.q_rank": required(hub, "q_lora_rank") or 0},
            lambda model: {"q_lora_rank": model.mla.q_rank or None},
        ),
        equal("n_routed_experts", "moe.experts"), equal("n_shared_experts", "moe.shared"),
        equal("num_experts_per_tok", "moe.top_k"), equal("moe_intermediate_size", "moe.d_ff"),
        equal("first_k_dense_replace", "moe.first_dense"), equal("moe_layer_freq", "moe.every", 1),
        equal("routed_scaling_factor", "moe.scale"), equal("n_group", "moe.groups"),
        equal("topk_group", "moe.top_groups"), fixed("scoring_func", "sigmoid"), fixed("topk_method", "noaux_tc"),
        _router("sigmoid"),
        equal("num_nextn_predict_layers", "mtp", 0),
        # The bias is imported with the weights and stays constant until a rate is set.
        implied(**{"moe.bias_rate": 0.0}),
    ),
    block={
        **NORMS, **LATENT, **feed_forward("mlp"), **router("mlp.gate"),
        **feed_forward("mlp.shared_experts", "mlp/shared"),
        "mlp/router/correction": tensor(LAYER + "mlp.gate.e_score_correction_bias", "X"),
    },
    experts=feed_forward("mlp.experts.{expert}"),
    mtp={
        "embed_norm/scale": tensor(LAYER + "enorm.weight", "D"),
        "hidden_norm/scale": tensor(LAYER + "hnorm.weight", "D"),
        "project/weight": tensor(LAYER + "eh_proj.weight", "D,I", "ID"),
        "norm/scale": tensor(LAYER + "shared_head.norm.weight", "D"),
    },
    copies={
        **LLAMA.copies, LAYER + "embed_tokens.weight": "model.embed_tokens.weight",
        LAYER + "shared_head.head.weight": "lm_head.weight",
    },
    ignored_keys=frozenset({"head_dim", "qk_head_dim", "ep_size", "aux_loss_alpha", "seq_aux"}),
)  # fmt: skip
GPT_OSS = replace(
    LLAMA, name="gpt_oss", architecture="GptOssForCausalLM",
    fields=(
        *COMMON, KV_HEADS, FF_WIDTH, equal("head_dim", "head_dim", 64),
        equal("attention_bias", ("qkv_bias", "out_bias"), True), fixed("hidden_act", "silu", "swish"),
        fixed("swiglu_limit", 7.0),
        fixed("swiglu_alpha", 1.702),
        implied(activation="swiglu_oss", attention_sinks=True, mlp_bias=True, **{"moe.router": "softmax_chosen"}),
        rope(150_000.0, complete=True), layer_windows(switch=False, default=128),
        equal(("num_local_experts", "num_experts"), "moe.experts"),
        equal(("num_experts_per_tok", "experts_per_token"), "moe.top_k"),
    ),
    block={
        **NORMS, **ATTENTION, **router("mlp.router"), "mlp/router/bias": tensor(LAYER + "mlp.router.bias", "X"),
        "attention/sinks": tensor(LAYER + "self_attn.sinks", "H"),
    },
    experts={
        "mlp/gate/weight": tensor(LAYER + "mlp.experts.gate_up_proj", "X,D,FP", "XDF", 0, 2),
        "mlp/up/weight": tensor(LAYER + "mlp.experts.gate_up_proj", "X,D,FP", "XDF", 1, 2),
        "mlp/gate/bias": tensor(LAYER + "mlp.experts.gate_up_proj_bias", "X,FP", "XF", 0, 2),
        "mlp/up/bias": tensor(LAYER + "mlp.experts.gate_up_proj_bias", "X,FP", "XF", 1, 2),
        "mlp/down/weight": tensor(LAYER + "mlp.experts.down_proj", "X,F,D", "XFD"),
        "mlp/down/bias": tensor(LAYER + "mlp.experts.down_proj_bias", "X,D", "XD"),
    },
    ignored_keys=frozenset({"initial_context_length"}),
)  # fmt: skip

H = "transformer.h.{layer}."
GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    base="transformer.",
    fields=(
        equal("vocab_size", "vocab_size"), equal("n_embd", "d_model"), equal("n_layer", "n_layers"),
        equal("n_head", "n_heads"), equal("n_positions", "max_seq_len"), equal("layer_norm_epsilon", "norm_eps"),
        equal("initializer_range", "init_std", 0.02), equal("tie_word_embeddings", "tied_head", True),
        Field(
            ("n_inner",), lambda hub: {"d_ff": hub.get("n_inner") or 4 * hub["n_embd"]},
            lambda model: {"n_inner": model.d_ff},
        ),
        one_of("activation_function", "activation", {
            "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu": "gelu",
            "gelu_python": "gelu", "relu2": "relu2",
        }, "gelu_new"),
        fixed("scale_attn_weights", True), fixed("scale_attn_by_inverse_layer_idx", False),
        fixed("add_cross_attention", False),
        implied(norm="layernorm", positions="learned", qkv_bias=True, out_bias=True, mlp_bias=True, windows=[None]),
    ),
    outer={
        "embed/tokens": tensor("transformer.wte.weight", "V,D"),
        "embed/positions": tensor("transformer.wpe.weight", "L,D"),
        "norm/scale": tensor("transformer.ln_f.weight", "D"),
        "norm/bias": tensor("transformer.ln_f.bias", "D"),
        "head/weight": tensor("lm_head.weight", "V,D", "DV"),
    },
    block={
        "attention_norm/scale": tensor(H + "ln_1.weight", "D"),
        "attention_norm/bias": tensor(H + "ln_1.bias", "D"),
        "mlp_norm/scale": tensor(H + "ln_2.weight", "D"),
        "mlp_norm/bias": tensor(H + "ln_2.bias", "D"),
        # A Conv1D weight is [in, out]; queries, keys and values are concatenated along its outputs.
        "attention/query/weight": tensor(H + "attn.c_attn.weight", "D,PHE", "DHE", 0, 3),
        "attention/key/weight": tensor(H + "attn.c_attn.weight", "D,PHE", "DHE", 1, 3),
        "attention/value/weight": tensor(H + "attn.c_attn.weight", "D,PHE", "DHE", 2, 3),
        "attention/query/bias": tensor(H + "attn.c_attn.bias", "PHE", "HE", 0, 3),
        "attention/key/bias": tensor(H + "attn.c_attn.bias", "PHE", "HE", 1, 3),
        "attention/value/bias": tensor(H + "attn.c_attn.bias", "PHE", "HE", 2, 3),
        "attention/out/weight": tensor(H + "attn.c_proj.weight", "HE,D", "HED"),
        "attention/out/bias": tensor(H + "attn.c_proj.bias", "D"),
        "mlp/up/weight": tensor(H + "mlp.c_fc.weight", "D,F"),
        "mlp/up/bias": tensor(H + "mlp.c_fc.bias", "F"),
        "mlp/down/weight": tensor(H + "mlp.c_proj.weight", "F,D"),
        "mlp/down/bias": tensor(H + "mlp.c_proj.bias", "D"),
    },
    experts={},
    mtp={},
    copies={"lm_head.weight": "transformer.wte.weight"},
    buffers=("*.attn.bias", "*.attn.masked_bias"),
    ignored_keys=frozenset({"reorder_and_upcast_attn", "n_ctx"}),
)  # fmt: skip

FAMILIES = {
    family.name: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, GPT2, MIXTRAL, QWEN3_MOE, DEEPSEEK_V3, GPT_OSS)
}


def family_of(model_type: object) -> Family:
    """The family of config.json's model_type; raises ConfigError if it has no table."""
    if model_type not in FAMILIES:
        raise ConfigError(f"config.json: model_type {model_type!r} has no table: use one of {', '.join(FAMILIES)}")
    return FAMILIES[str(model_type)]
