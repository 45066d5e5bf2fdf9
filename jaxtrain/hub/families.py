"""The tables: one row a tensor, one field a setting. What two families share stands once."""

from __future__ import annotations

import math
from dataclasses import replace

from jaxtrain.config import ConfigError, ModelConfig
from jaxtrain.hub.family import Family
from jaxtrain.hub.fields import (
    Field,
    Json,
    Settings,
    choice,
    given,
    layer_windows,
    one_window,
    rope,
    same,
    says,
    yarn_growth,
)
from jaxtrain.hub.rows import TensorRow, at

LAYER = "model.layers.{layer}."

SIZES = (
    same("vocab_size", "vocab_size"),
    same("hidden_size", "d_model"),
    same("num_hidden_layers", "n_layers"),
    same("num_attention_heads", "n_heads"),
    same("num_key_value_heads", "n_kv_heads", None),
    same("max_position_embeddings", "max_seq_len"),
    same("rms_norm_eps", "norm_eps"),
    same("initializer_range", "init_std", 0.02),
    same("tie_word_embeddings", "tied_head", False),
    given(norm="rmsnorm", positions="rope"),
)
SWIGLU = (says("hidden_act", "silu"), given(activation="swiglu"))
WIDTHS = (same("intermediate_size", "d_ff"), same("head_dim", "head_dim", None))
BIASED = same("attention_bias", ("qkv_bias", "out_bias"), False)
QK_NORM = given(qk_norm=True)

OUTER = {
    "embed/tokens": at("model.embed_tokens.weight", "V,D"),
    "norm/scale": at("model.norm.weight", "D"),
    "head/weight": at("lm_head.weight", "V,D", "DV"),
}
NORMS = {
    "attention_norm/scale": at(LAYER + "input_layernorm.weight", "D"),
    "mlp_norm/scale": at(LAYER + "post_attention_layernorm.weight", "D"),
}
ATTENTION = {
    "attention/query/weight": at(LAYER + "self_attn.q_proj.weight", "HE,D", "DHE"),
    "attention/query/bias": at(LAYER + "self_attn.q_proj.bias", "HE"),
    "attention/key/weight": at(LAYER + "self_attn.k_proj.weight", "KE,D", "DKE"),
    "attention/key/bias": at(LAYER + "self_attn.k_proj.bias", "KE"),
    "attention/value/weight": at(LAYER + "self_attn.v_proj.weight", "KE,D", "DKE"),
    "attention/value/bias": at(LAYER + "self_attn.v_proj.bias", "KE"),
    "attention/query_norm/scale": at(LAYER + "self_attn.q_norm.weight", "E"),
    "attention/key_norm/scale": at(LAYER + "self_attn.k_norm.weight", "E"),
    "attention/out/weight": at(LAYER + "self_attn.o_proj.weight", "D,HE", "HED"),
    "attention/out/bias": at(LAYER + "self_attn.o_proj.bias", "D"),
}
LATENT = {
    "attention/query/weight": at(LAYER + "self_attn.q_proj.weight", "HE,D", "DHE", turned="E"),
    "attention/query_down/weight": at(LAYER + "self_attn.q_a_proj.weight", "R,D", "DR"),
    "attention/query_latent_norm/scale": at(LAYER + "self_attn.q_a_layernorm.weight", "R"),
    "attention/query_up/weight": at(LAYER + "self_attn.q_b_proj.weight", "HE,R", "RHE", turned="E"),
    "attention/kv_down/weight": at(LAYER + "self_attn.kv_a_proj_with_mqa.weight", "R,D", "DR", turned="R"),
    "attention/kv_latent_norm/scale": at(LAYER + "self_attn.kv_a_layernorm.weight", "R"),
    "attention/kv_up/weight": at(LAYER + "self_attn.kv_b_proj.weight", "HE,R", "RHE"),
    "attention/out/weight": at(LAYER + "self_attn.o_proj.weight", "D,HE", "HED"),
}


def feed_forward(
    place: str, ours: str = "mlp", names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, TensorRow]:
    """Rows of a gated feed-forward layer that the hub keeps as three linear layers under `place`."""
    gate, up, down = names
    return {
        f"{ours}/gate/weight": at(f"{LAYER}{place}.{gate}.weight", "F,D", "DF"),
        f"{ours}/gate/bias": at(f"{LAYER}{place}.{gate}.bias", "F"),
        f"{ours}/up/weight": at(f"{LAYER}{place}.{up}.weight", "F,D", "DF"),
        f"{ours}/up/bias": at(f"{LAYER}{place}.{up}.bias", "F"),
        f"{ours}/down/weight": at(f"{LAYER}{place}.{down}.weight", "D,F", "FD"),
        f"{ours}/down/bias": at(f"{LAYER}{place}.{down}.bias", "D"),
    }


def router(place: str) -> dict[str, TensorRow]:
    """The row of a router's weight."""
    return {"mlp/router/weight": at(f"{LAYER}{place}.weight", "X,D", "DX")}


LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    base="model.",
    fields=(
        *SIZES, *SWIGLU, *WIDTHS, BIASED, same("mlp_bias", "mlp_bias", False), rope(10_000.0), given(windows=[None]),
    ),
    outer=OUTER,
    block={**NORMS, **ATTENTION, **feed_forward("mlp")},
    mixture={},
    ahead={},
    copies={"lm_head.weight": "model.embed_tokens.weight"},
    buffers=("*.rotary_emb.inv_freq",),
    inert=frozenset(),
)  # fmt: skip
MISTRAL = replace(
    LLAMA, name="mistral", architecture="MistralForCausalLM",
    fields=(*SIZES, *SWIGLU, *WIDTHS, rope(10_000.0), one_window()),
)  # fmt: skip
QWEN2 = replace(
    LLAMA, name="qwen2", architecture="Qwen2ForCausalLM",
    fields=(*SIZES, *SWIGLU, *WIDTHS, given(qkv_bias=True), rope(10_000.0), layer_windows(switch=True)),
)  # fmt: skip
QWEN3 = replace(
    LLAMA, name="qwen3", architecture="Qwen3ForCausalLM",
    fields=(*SIZES, *SWIGLU, *WIDTHS, BIASED, QK_NORM, rope(10_000.0), layer_windows(switch=True)),
)  # fmt: skip
MIXTRAL = replace(
    LLAMA, name="mixtral", architecture="MixtralForCausalLM",
    fields=(
        *SIZES, *SWIGLU, *WIDTHS, rope(1e6), one_window(), same("num_local_experts", "moe.experts"),
        same("num_experts_per_tok", "moe.top_k"), given(**{"moe.router": "softmax_chosen"}),
    ),
    block={**NORMS, **ATTENTION, **router("block_sparse_moe.gate")},
    mixture=feed_forward("block_sparse_moe.experts.{expert}", names=("w1", "w3", "w2")),
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
    return choice("norm_topk_prob", "moe.router", {True: f"{scores}_chosen", False: scores})


QWEN3_MOE = replace(
    LLAMA, name="qwen3_moe", architecture="Qwen3MoeForCausalLM",
    fields=(
        *SIZES, *SWIGLU, *WIDTHS, BIASED, QK_NORM, rope(10_000.0), says("use_sliding_window", False),
        given(windows=[None]), same(("num_experts", "num_local_experts"), "moe.experts"),
        same("num_experts_per_tok", "moe.top_k"), same("moe_intermediate_size", "moe.d_ff"), _router("softmax"),
        _sparse_layers(),
    ),
    block={**NORMS, **ATTENTION, **feed_forward("mlp"), **router("mlp.gate")},
    mixture=feed_forward("mlp.experts.{expert}"),
    inert=frozenset({"sliding_window", "max_window_layers"}),
)  # fmt: skip


def _latent_scale() -> Field:
    """DeepSeek sharpens attention by the square of YaRN's growth, beside what rotary positions do."""

    def read(hub: Json) -> Settings:
        said = (hub.get("rope_scaling") or {}) | (hub.get("rope_parameters") or {})
        if not said.get("mscale_all_dim"):
            return {"attention_scale": None}
        width = hub["qk_nope_head_dim"] + hub["qk_rope_head_dim"]
        return {"attention_scale": yarn_growth(said["factor"], said["mscale_all_dim"]) ** 2 / math.sqrt(width)}

    def write(model: ModelConfig) -> Json:
        if model.attention_scale is None or model.rope.factor <= 1:
            return {}
        growth = math.sqrt(model.attention_scale * math.sqrt(model.width_of_head + model.mla.rope_dim))
        return {"rope_scaling": {"mscale_all_dim": (growth - 1) / (0.1 * math.log(model.rope.factor))}}

    return Field((), read, write)


DEEPSEEK_V3 = replace(
    LLAMA, name="deepseek_v3", architecture="DeepseekV3ForCausalLM",
    fields=(
        *SIZES, *SWIGLU, same("intermediate_size", "d_ff"), rope(10_000.0), given(windows=[None]), _latent_scale(),
        says("attention_bias", False), says("rope_interleave", True), same("qk_nope_head_dim", "head_dim"),
        same("qk_rope_head_dim", "mla.rope_dim"), same("v_head_dim", "mla.v_dim"), same("kv_lora_rank", "mla.kv_rank"),
        Field(
            ("q_lora_rank",), lambda hub: {"mla.q_rank": hub["q_lora_rank"] or 0},
            lambda model: {"q_lora_rank": model.mla.q_rank or None},
        ),
        same("n_routed_experts", "moe.experts"), same("n_shared_experts", "moe.shared"),
        same("num_experts_per_tok", "moe.top_k"), same("moe_intermediate_size", "moe.d_ff"),
        same("first_k_dense_replace", "moe.first_dense"), same("moe_layer_freq", "moe.every", 1),
        same("routed_scaling_factor", "moe.scale"), same("n_group", "moe.groups"),
        same("topk_group", "moe.top_groups"), says("scoring_func", "sigmoid"), says("topk_method", "noaux_tc"),
        _router("sigmoid"),
        same("num_nextn_predict_layers", "mtp", 0),
        # The bias comes with the weights and stays as it is, until a rate is set.
        given(**{"moe.bias_rate": 0.0}),
    ),
    block={
        **NORMS, **LATENT, **feed_forward("mlp"), **router("mlp.gate"),
        **feed_forward("mlp.shared_experts", "mlp/shared"),
        "mlp/router/correction": at(LAYER + "mlp.gate.e_score_correction_bias", "X"),
    },
    mixture=feed_forward("mlp.experts.{expert}"),
    ahead={
        "embed_norm/scale": at(LAYER + "enorm.weight", "D"),
        "hidden_norm/scale": at(LAYER + "hnorm.weight", "D"),
        "project/weight": at(LAYER + "eh_proj.weight", "D,I", "ID"),
        "norm/scale": at(LAYER + "shared_head.norm.weight", "D"),
    },
    copies={
        **LLAMA.copies, LAYER + "embed_tokens.weight": "model.embed_tokens.weight",
        LAYER + "shared_head.head.weight": "lm_head.weight",
    },
    inert=frozenset({"head_dim", "qk_head_dim", "ep_size", "aux_loss_alpha", "seq_aux"}),
)  # fmt: skip
GPT_OSS = replace(
    LLAMA, name="gpt_oss", architecture="GptOssForCausalLM",
    fields=(
        *SIZES, *WIDTHS, BIASED, says("hidden_act", "silu"), says("swiglu_limit", 7.0), says("swiglu_alpha", 1.702),
        given(activation="swiglu_oss", attention_sinks=True, mlp_bias=True, **{"moe.router": "softmax_chosen"}),
        rope(150_000.0), layer_windows(switch=False), same(("num_local_experts", "num_experts"), "moe.experts"),
        same(("num_experts_per_tok", "experts_per_token"), "moe.top_k"),
    ),
    block={
        **NORMS, **ATTENTION, **router("mlp.router"), "mlp/router/bias": at(LAYER + "mlp.router.bias", "X"),
        "attention/sinks": at(LAYER + "self_attn.sinks", "H"),
    },
    mixture={
        "mlp/gate/weight": at(LAYER + "mlp.experts.gate_up_proj", "X,D,FP", "XDF", 0, 2),
        "mlp/up/weight": at(LAYER + "mlp.experts.gate_up_proj", "X,D,FP", "XDF", 1, 2),
        "mlp/gate/bias": at(LAYER + "mlp.experts.gate_up_proj_bias", "X,FP", "XF", 0, 2),
        "mlp/up/bias": at(LAYER + "mlp.experts.gate_up_proj_bias", "X,FP", "XF", 1, 2),
        "mlp/down/weight": at(LAYER + "mlp.experts.down_proj", "X,F,D", "XFD"),
        "mlp/down/bias": at(LAYER + "mlp.experts.down_proj_bias", "X,D", "XD"),
    },
    inert=frozenset({"initial_context_length"}),
)  # fmt: skip

H = "transformer.h.{layer}."
GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    base="transformer.",
    fields=(
        same("vocab_size", "vocab_size"), same("n_embd", "d_model"), same("n_layer", "n_layers"),
        same("n_head", "n_heads"), same("n_positions", "max_seq_len"), same("layer_norm_epsilon", "norm_eps"),
        same("initializer_range", "init_std", 0.02), same("tie_word_embeddings", "tied_head", True),
        Field(
            ("n_inner",), lambda hub: {"d_ff": hub.get("n_inner") or 4 * hub["n_embd"]},
            lambda model: {"n_inner": model.d_ff},
        ),
        choice("activation_function", "activation", {
            "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu2": "relu2",
        }, "gelu_new"),
        says("scale_attn_weights", True), says("scale_attn_by_inverse_layer_idx", False),
        says("add_cross_attention", False),
        given(norm="layernorm", positions="learned", qkv_bias=True, out_bias=True, mlp_bias=True, windows=[None]),
    ),
    outer={
        "embed/tokens": at("transformer.wte.weight", "V,D"),
        "embed/positions": at("transformer.wpe.weight", "L,D"),
        "norm/scale": at("transformer.ln_f.weight", "D"),
        "norm/bias": at("transformer.ln_f.bias", "D"),
        "head/weight": at("lm_head.weight", "V,D", "DV"),
    },
    block={
        "attention_norm/scale": at(H + "ln_1.weight", "D"),
        "attention_norm/bias": at(H + "ln_1.bias", "D"),
        "mlp_norm/scale": at(H + "ln_2.weight", "D"),
        "mlp_norm/bias": at(H + "ln_2.bias", "D"),
        # A Conv1D holds [in, out]; queries, keys and values lie side by side in its outputs.
        "attention/query/weight": at(H + "attn.c_attn.weight", "D,PHE", "DHE", 0, 3),
        "attention/key/weight": at(H + "attn.c_attn.weight", "D,PHE", "DHE", 1, 3),
        "attention/value/weight": at(H + "attn.c_attn.weight", "D,PHE", "DHE", 2, 3),
        "attention/query/bias": at(H + "attn.c_attn.bias", "PHE", "HE", 0, 3),
        "attention/key/bias": at(H + "attn.c_attn.bias", "PHE", "HE", 1, 3),
        "attention/value/bias": at(H + "attn.c_attn.bias", "PHE", "HE", 2, 3),
        "attention/out/weight": at(H + "attn.c_proj.weight", "HE,D", "HED"),
        "attention/out/bias": at(H + "attn.c_proj.bias", "D"),
        "mlp/up/weight": at(H + "mlp.c_fc.weight", "D,F"),
        "mlp/up/bias": at(H + "mlp.c_fc.bias", "F"),
        "mlp/down/weight": at(H + "mlp.c_proj.weight", "F,D"),
        "mlp/down/bias": at(H + "mlp.c_proj.bias", "D"),
    },
    mixture={},
    ahead={},
    copies={"lm_head.weight": "transformer.wte.weight"},
    buffers=("*.attn.bias", "*.attn.masked_bias"),
    inert=frozenset({"reorder_and_upcast_attn", "n_ctx"}),
)  # fmt: skip

FAMILIES = {
    family.name: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, GPT2, MIXTRAL, QWEN3_MOE, DEEPSEEK_V3, GPT_OSS)
}


def family_of(name: object) -> Family:
    """The table of config.json's model_type; raises ConfigError where there is none."""
    if name not in FAMILIES:
        raise ConfigError(f"config.json: model_type {name!r} has no table; families: {', '.join(FAMILIES)}")
    return FAMILIES[str(name)]
