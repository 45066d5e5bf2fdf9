"""The families' tables against files written by transformers: every tensor is mapped, config.json round-trips."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from folders import DENSE, MIXTURES, ROOT, opened, tensors_in

from jaxtrain.config import ConfigError, MlaConfig, ModelConfig, MoeConfig, RopeConfig, load_config
from jaxtrain.hub.families import FAMILIES, family_of
from jaxtrain.hub.family import (
    architecture,
    check_tensors,
    map_params,
    model_of,
    read_model,
    tensors_of,
    write_model,
)
from jaxtrain.mesh.layout import flatten_paths
from jaxtrain.ops.rope import scaled


@pytest.mark.parametrize("name", [*DENSE, *MIXTURES])
def test_every_tensor_is_mapped_exactly_once(name: str) -> None:
    family, model, vocabulary = opened(ROOT / name)
    params = map_params(family, model, vocabulary)
    tensors = {key: array.shape for key, array in tensors_in(ROOT / name).items()}
    check_tensors(family, params, tensors)
    mapped = tensors_of(params)
    assert mapped.keys() == tensors.keys()
    # Parameters that share a tensor are its parts, each once.
    for parts in mapped.values():
        assert sorted(param.mapping.part for param, _ in parts) == [*range(parts[0][0].mapping.parts)]
    assert flatten_paths(model.params).keys() == params.keys()
    numbers = json.loads((ROOT / name / "reference.json").read_text())
    untrained = sum(param.param.size for path, param in params.items() if path.endswith("correction"))
    assert model.count() - untrained == numbers["parameters"]


SPELLINGS = {"num_experts": "num_local_experts"}
# Keys that other keys or the tensors override: null for 4 x width, the first window beside layer_types, 1 for none.
OVERRIDDEN = {"n_inner", "max_window_layers", "num_nextn_predict_layers"}


@pytest.mark.parametrize("name", [*DENSE, *MIXTURES])
def test_config_round_trips(name: str) -> None:
    family, model, vocabulary = opened(ROOT / name)
    before = json.loads((ROOT / name / "config.json").read_text())
    written = write_model(family, model.config, vocabulary)
    keys = {key for field in family.fields for key in field.keys} - {"rope_scaling", "rope_parameters", "rope_theta"}
    for key in keys & written.keys():
        spelled = key if key in before else SPELLINGS.get(key, key)
        if spelled not in before or key in OVERRIDDEN:
            continue
        assert written[key] == before[spelled], key
    again = model_of(read_model(family, written))
    assert architecture(again) == architecture(model.config)


def test_settings_of_the_reference_models() -> None:
    """Expected values copied from config.json."""
    model = opened(ROOT / "llama3_rope")[1].config
    assert (model.vocab_size, model.d_model, model.n_layers, model.n_heads, model.kv_heads) == (192, 64, 3, 4, 2)
    assert (model.width_of_head, model.d_ff, model.max_seq_len, model.norm_eps, model.tied_head) == (
        16, 128, 256, 1e-6, True,
    )  # fmt: skip
    assert model.rope == RopeConfig(
        theta=500_000, scaling="llama3", factor=8, low_freq_factor=1, high_freq_factor=4, original_seq_len=64
    )
    assert opened(ROOT / "mistral")[1].config.windows == [16]
    assert opened(ROOT / "qwen2")[1].config.windows == [None, 16, 16]
    gpt_oss = opened(ROOT / "gpt_oss_yarn")[1].config
    assert (gpt_oss.windows, gpt_oss.rope.scaling, gpt_oss.rope.original_seq_len) == ([16, None], "yarn_unrounded", 32)
    deepseek = opened(ROOT / "deepseek_v3")[1].config
    assert deepseek.mla == MlaConfig(kv_rank=32, q_rank=48, rope_dim=8, v_dim=16)
    assert deepseek.moe == MoeConfig(
        experts=8, top_k=3, d_ff=32, shared=1, first_dense=1, router="sigmoid_chosen", scale=2.5, groups=4,
        top_groups=2, bias_rate=0.0,
    )  # fmt: skip
    assert deepseek.width_of_head == 16 and deepseek.mtp == 0


# Published config.json files, without keys that do not describe the model, against the shipped structures. Their
# parameter counts are tested elsewhere.
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama3_8b": {
        "model_type": "llama", "attention_bias": False, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 8192,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 500000.0, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 128256,
    },
    "mistral_7b": {
        "model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 32000,
    },
    "qwen3_8b": {
        "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 12288, "max_position_embeddings": 40960,
        "max_window_layers": 36, "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
        "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
    },
    "gpt2": {
        "model_type": "gpt2", "activation_function": "gelu_new", "attn_pdrop": 0.1, "embd_pdrop": 0.1,
        "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "n_ctx": 1024, "n_embd": 768, "n_head": 12,
        "n_layer": 12, "n_positions": 1024, "resid_pdrop": 0.1, "vocab_size": 50257,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_seq_len": 50}},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_the_shipped_structures(name: str) -> None:
    hub = PUBLISHED[name]
    shipped = load_config(f"models/{name}.yaml", ["data.tokenizer.vocab_size=258"]).model
    read = model_of(read_model(family_of(hub["model_type"]), hub))
    assert architecture(read) == architecture(shipped)
    assert read.vocab_size == shipped.vocab_size


def test_yarn_of_deepseek_round_trips() -> None:
    hub = json.loads((ROOT / "deepseek_v3" / "config.json").read_text()) | {
        "rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": {
            "type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
            "original_max_position_embeddings": 4096,
        },
    }  # fmt: skip
    family = family_of("deepseek_v3")
    model = model_of(read_model(family, hub))
    # From the published formula: mscale / mscale = 1; (0.1 ln 40 + 1)^2 / sqrt(24).
    assert model.rope.attention_factor == pytest.approx(1.0)
    assert model.attention_scale == pytest.approx((0.1 * math.log(40) + 1) ** 2 / math.sqrt(24))
    assert model.rope.scaling == "yarn"
    again = architecture(model_of(read_model(family, write_model(family, model, 192))))
    for key, value in architecture(model).items():
        assert again[key] == (pytest.approx(value) if isinstance(value, float) else value), key


def test_multi_token_prediction_has_deepseeks_names() -> None:
    """Names of the published DeepSeek-V3's last layer; its embedding and head are copies of the model's."""
    family, model, vocabulary = opened(ROOT / "deepseek_v3", mtp=1)
    params = map_params(family, model, vocabulary)
    names = {name for name in tensors_of(params) if name.startswith("model.layers.3.")}
    assert {
        "enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight", "input_layernorm.weight",
        "self_attn.kv_b_proj.weight", "mlp.experts.7.down_proj.weight", "mlp.gate.e_score_correction_bias",
        "mlp.shared_experts.up_proj.weight",
    } <= {name.removeprefix("model.layers.3.") for name in names}  # fmt: skip
    shapes = {key: array.shape for key, array in tensors_in(ROOT / "deepseek_v3").items()}
    for name in names:
        source = name.replace("layers.3.", "layers.2.")
        shape_of = {"eh_proj.weight": (64, 128)}
        shapes[name] = shape_of.get(name.removeprefix("model.layers.3."), shapes.get(source, (64,)))
    shapes |= {"model.layers.3.embed_tokens.weight": (192, 64), "model.layers.3.shared_head.head.weight": (192, 64)}
    assert check_tensors(family, params, shapes) == {
        "model.layers.3.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.3.shared_head.head.weight": "lm_head.weight",
    }


YARN = {"rope_type": "yarn", "factor": 4.0}
LENGTH = "original_max_position_embeddings"


@pytest.mark.parametrize(
    ("changes", "needle"),
    [
        ({"model_type": "gemma2"}, "'gemma2' has no table"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "twist": 1}}, "twist"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "depend on the length of each text"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_type is 'longrope'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "linear have no factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "2"}}, "factor of the rope parameters is '2'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "no low_freq_factor, high_freq_factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"factor": 4.0}}, "differ: remove one"),
        ({"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e4}}, "rope_theta is 1000000"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
            "differ by layer",
        ),
        ({"original_max_position_embeddings": 32, "rope_parameters": YARN | {LENGTH: 64}}, "both 32 and 64"),
        ({"rope_parameters": "yarn"}, "are 'yarn', not an object"),
        ({"sliding_window_pattern": 6}, "sliding_window_pattern 6"),
        (
            {
                "model_type": "qwen2",
                "use_sliding_window": True,
                "layer_types": ["full_attention"],
                "attention_bias": None,
            },
            "1 entries for num_h",
        ),
        ({"model_type": "qwen2"}, "attention_bias False"),
        ({"logit_scale": 0.5}, "--ignore logit_scale"),
        # A family may compute by default what false or 0 switches off.
        ({"use_rope": False}, "use_rope False.*--ignore use_rope"),
        ({"no_rope_layer_interval": 0}, "--ignore no_rope_layer_interval"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config .unknown."),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8. says that the weights are quantized"),
        ({"hidden_size": None}, "d_model"),
    ],
)
def test_unsupported_settings_are_named(changes: dict[str, Any], needle: str) -> None:
    hub = json.loads((ROOT / "llama" / "config.json").read_text()) | changes
    with pytest.raises(ConfigError, match=needle):
        model_of(read_model(family_of(hub["model_type"]), hub))


def _hub(family: str = "llama", without: tuple[str, ...] = (), **changes: Any) -> dict[str, Any]:
    hub = json.loads((ROOT / family / "config.json").read_text()) | changes
    return {key: value for key, value in hub.items() if key not in without}


def test_the_original_length_of_a_scaled_rope_is_the_longest_position_unless_given() -> None:
    """NVIDIA-NeMo/Automodel#2652; transformers sets it so for yarn, llama3 (standardize_rope_params)."""
    longest = {"max_position_embeddings": 96}
    for kind in (YARN, {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}):
        for hub, expected in (
            (_hub(rope_parameters=kind, **longest), 96),
            (_hub(rope_parameters=kind | {LENGTH: 64}, **longest), 64),
            (_hub(rope_parameters=kind, **longest, **{LENGTH: 48}), 48),
        ):
            assert read_model(FAMILIES["llama"], hub)["rope.original_seq_len"] == expected
    # Its frequencies by the closed form of the paper: pairs of 16 dims, 96 positions, 32 rotations to 1.
    model = model_of(read_model(FAMILIES["llama"], _hub(rope_parameters=YARN | {"rope_theta": 1e4}, **longest)))
    got, magnitude = scaled(16, model.rope)
    low = max(math.floor(16 * math.log(96 / (32 * 2 * math.pi)) / (2 * math.log(1e4))), 0)
    high = math.ceil(16 * math.log(96 / (2 * math.pi)) / (2 * math.log(1e4)))
    for i, frequency in enumerate(got):
        ramp = min(max((i - low) / (high - low), 0), 1)
        assert frequency == pytest.approx(1e4 ** (-i / 8) * (1 - ramp + ramp / 4), rel=1e-6)
    assert magnitude == pytest.approx(0.1 * math.log(4) + 1)


def test_rope_parameters_are_read_wherever_they_stand() -> None:
    spellings = [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5, "twist": None}},
        {"rope_theta": 5e5, "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}},
        {"rope_theta": 5e5, "partial_rotary_factor": 1.0, "rope_parameters": {"type": "linear", "factor": 2.0}},
    ]
    places = ("rope_theta", "rope_scaling", "rope_parameters")
    for spelling in spellings:
        rope = model_of(read_model(FAMILIES["llama"], _hub(without=places) | spelling)).rope
        assert (rope.theta, rope.scaling, rope.factor) == (5e5, "linear", 2.0), spelling
    unrounded = _hub(rope_parameters=YARN | {"truncate": False, "beta_fast": None, "beta_slow": 0})
    rope = model_of(read_model(FAMILIES["llama"], unrounded)).rope
    assert (rope.scaling, rope.beta_fast, rope.beta_slow) == ("yarn_unrounded", 32, 1)


@pytest.mark.parametrize(
    ("family", "key", "setting", "expected"),
    [
        ("llama", "num_key_value_heads", "n_kv_heads", None),
        ("llama", "tie_word_embeddings", "tied_head", False),
        ("gpt2", "tie_word_embeddings", "tied_head", True),
        ("qwen3", "head_dim", "head_dim", 128),
        ("gpt_oss", "head_dim", "head_dim", 64),
        ("gpt_oss", "attention_bias", "qkv_bias", True),
        ("gpt_oss", "sliding_window", "windows", [128, None]),
        ("mistral", "sliding_window", "windows", [4096]),
        ("mixtral", "sliding_window", "windows", [None]),
        ("mistral", "num_key_value_heads", None, None),
        ("gpt_oss", "rope_parameters", None, None),
        ("deepseek_v3", "q_lora_rank", None, None),
    ],
)
def test_a_missing_key_has_the_familys_default_or_is_named(
    family: str, key: str, setting: str | None, expected: Any
) -> None:
    """Defaults of transformers' configuration classes, which differ by family; no setting: the key is required."""
    hub = _hub(family, without=(key,))
    if setting is None:
        with pytest.raises(ConfigError, match=key):
            read_model(FAMILIES[family], hub)
    else:
        assert read_model(FAMILIES[family], hub)[setting] == expected


def test_a_missing_key_is_an_error_and_an_ignored_one_is_not() -> None:
    hub = json.loads((ROOT / "llama" / "config.json").read_text())
    assert read_model(FAMILIES["llama"], hub | {"logit_scale": 0.5}, ["logit_scale"])["d_model"] == 64
    # null is not set, and features that no family has are off.
    assert read_model(FAMILIES["llama"], hub | {"use_rope": None, "is_encoder_decoder": False, "pruned_heads": {}})
    del hub["hidden_size"]
    with pytest.raises(ConfigError, match=r"config\.json has no hidden_size"):
        read_model(FAMILIES["llama"], hub)


@pytest.mark.parametrize(
    ("family", "changes", "needle"),
    [
        ("llama", {"windows": [16]}, "windows"),
        ("llama", {"qk_norm": True}, "qk_norm"),
        ("llama", {"qkv_bias": True}, "out_bias"),
        ("llama", {"activation": "gelu", "norm": "layernorm"}, "norm 'layernorm'.*activation 'gelu'"),
        ("llama", {"logit_softcap": 30.0}, "logit_softcap"),
        ("mistral", {"windows": [16, None]}, "windows"),
        ("qwen3", {"windows": [16, 8], "qk_norm": True}, "windows"),
        ("gpt2", {"activation": "gelu"}, "norm 'rmsnorm'"),
        ("gpt2", {}, "activation 'swiglu' is none of 'gelu_tanh', 'gelu'"),
    ],
)
def test_settings_that_a_family_cannot_express_are_named(family: str, changes: dict[str, Any], needle: str) -> None:
    with pytest.raises(ConfigError, match=needle):
        write_model(FAMILIES[family], ModelConfig(**changes), 100)


def test_missing_unknown_and_misshapen_tensors_are_all_named() -> None:
    family, model, vocabulary = opened(ROOT / "llama")
    shapes = {key: array.shape for key, array in tensors_in(ROOT / "llama").items()}
    shapes["model.layers.0.mlp.gate_proj.weights"] = shapes.pop("model.layers.0.mlp.gate_proj.weight")
    shapes["model.norm.weight"] = (63,)
    with pytest.raises(ConfigError) as caught:
        check_tensors(family, map_params(family, model, vocabulary), shapes)
    text = str(caught.value)
    assert "model.layers.0.mlp.gate_proj.weight is missing" in text
    assert "gate_proj.weights [128, 64] is unknown (did you mean model.layers.0.mlp.gate_proj.weight?)" in text
    assert "model.norm.weight has shape [63], parameter norm/scale [64] needs [64]" in text


def test_a_parameter_without_a_tensor_is_an_error() -> None:
    _, model, vocabulary = opened(ROOT / "qwen3")
    with pytest.raises(ConfigError, match=r"gpt2 has no tensor for .*layers/mlp/gate/weight"):
        map_params(FAMILIES["gpt2"], model, vocabulary)
