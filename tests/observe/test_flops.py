"""Closed forms against published parameter counts, the built model and hand counts."""

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.config import ModelConfig, load_config
from jaxtrain.observe.flops import (
    PEAKS,
    count_parameters,
    kernel_flops,
    matmul_weights,
    peak_flops,
    training_flops,
    visible_keys,
)

LLAMA3 = {"vocab_size": 128_256, "n_kv_heads": 8, "max_seq_len": 8192}
LLAMA3_8B = ModelConfig(d_model=4096, n_layers=32, n_heads=32, d_ff=14_336, **LLAMA3)
LLAMA3_70B = ModelConfig(d_model=8192, n_layers=80, n_heads=64, d_ff=28_672, **LLAMA3)
QWEN3_8B = ModelConfig(
    vocab_size=151_936, d_model=4096, n_layers=36, n_heads=32, n_kv_heads=8, head_dim=128, d_ff=12_288, qk_norm=True
)
GPT2 = ModelConfig(
    vocab_size=50_257, d_model=768, n_layers=12, n_heads=12, d_ff=3072, max_seq_len=1024, norm="layernorm",
    activation="gelu_tanh", positions="learned", qkv_bias=True, out_bias=True, mlp_bias=True, tied_head=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "published"),
    [
        (LLAMA3_8B, 8_030_261_248),
        (LLAMA3_70B, 70_553_706_496),
        (GPT2, 124_439_808),
        (QWEN3_8B, 8_190_735_360),
    ],
)
def test_counts_are_the_published_ones(model, published):
    assert count_parameters(model) == published


@pytest.mark.parametrize(
    ("name", "total", "active", "digits", "embedding"),
    [
        # Billions as published. OpenAI and DeepSeek exclude the embedding from active parameters.
        ("mixtral_8x7b", 46.7, 12.9, 1, True),
        ("qwen3_30b_a3b", 30.5, 3.3, 1, True),
        ("qwen3_235b_a22b", 235, 22, 0, True),
        ("deepseek_v3", 671, 37, 0, False),
        ("gpt_oss_20b", 20.9, 3.6, 1, False),
        ("gpt_oss_120b", 116.8, 5.1, 1, False),
    ],
)
def test_published_sizes_of_mixtures(name, total, active, digits, embedding):
    model = load_config(f"models/{name}").model
    main = model.model_copy(update={"mtp": 0})
    assert round(count_parameters(main) / 1e9, digits) == total
    counted = count_parameters(model, active=True) - (0 if embedding else model.vocab_size * model.d_model)
    # Qwen prints 3.35 as 3.3: within a unit of the last digit.
    assert abs(counted / 1e9 - active) < 10.0**-digits


def test_deepseek_counts_by_hand():
    """Every matrix of DeepSeek-V3 (section 4.2): projections, active experts, two heads."""
    model = load_config("models/deepseek_v3").model
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    mixture = 7168 * 256 + 9 * 3 * 7168 * 2048
    by_hand = 62 * attention + 3 * 3 * 7168 * 18432 + 59 * mixture + 2 * 7168 * 7168 + 2 * 7168 * 129_280
    assert matmul_weights(model) == by_hand
    # A score and its value: (192 + 128) multiplies a key and head, over 62 blocks.
    assert training_flops(model, 4096).full == 3 * (2 * by_hand + 2 * 128 * (192 + 128) * 62 * 4096)


def test_windows_of_gpt_oss_alternate():
    model = load_config("models/gpt_oss_20b").model
    score = 3 * 4 * 64 * 64
    visible = 12 * (visible_keys(8192, 128) + visible_keys(8192, None))
    assert training_flops(model, 8192).causal == pytest.approx(6 * matmul_weights(model) + score * visible, rel=1e-12)


@settings(max_examples=15, deadline=None)
@given(
    experts=st.sampled_from([(4, 2, 12, 1), (6, 1, None, 0)]),
    order=st.sampled_from([(0, 1), (2, 1), (0, 2), (2, 2)]),
    mla=st.sampled_from([{}, {"kv_rank": 6, "q_rank": 5, "rope_dim": 2, "v_dim": 3}, {"kv_rank": 6, "rope_dim": 4}]),
    flags=st.lists(st.booleans(), min_size=5, max_size=5),
    mtp=st.integers(0, 2),
    activation=st.sampled_from(["swiglu", "relu2", "swiglu_oss"]),
)
def test_closed_form_counts_the_built_mixture(experts, order, mla, flags, mtp, activation):
    from jaxtrain.nn.model import build

    names = ("qkv_bias", "out_bias", "qk_norm", "attention_sinks")
    options = {} if mla else dict(zip(names, flags, strict=False))
    X, k, F, shared = experts
    moe = {"experts": X, "top_k": k, "d_ff": F, "shared": shared, "first_dense": order[0], "every": order[1]}
    model = ModelConfig.model_validate({
        "vocab_size": 31, "d_model": 24, "n_layers": 4, "n_heads": 4, "head_dim": 6, "d_ff": 20, "mtp": mtp,
        "activation": activation, "mlp_bias": flags[4], "mla": mla, "moe": moe | {"bias_rate": 0.1 if shared else None},
        **options,
    })  # fmt: skip
    built = build(model)
    assert count_parameters(model) == built.count()
    # k of X experts, without the blocks of multi-token prediction.
    active = sum(
        p.size * k // X if "experts" in p.names else p.size
        for path, p in jax.tree.leaves_with_path(built.params, is_leaf=lambda leaf: hasattr(leaf, "names"))
        if "mtp" not in jax.tree_util.keystr(path)
    )
    assert count_parameters(model, active=True) == active


@settings(max_examples=25, deadline=None)
@given(
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    width=st.sampled_from([None, 10]),
    flags=st.lists(st.booleans(), min_size=5, max_size=5),
    norm=st.sampled_from(["rmsnorm", "layernorm"]),
    activation=st.sampled_from(["swiglu", "gelu", "relu2"]),
    positions=st.sampled_from(["rope", "learned", "none"]),
)
def test_closed_form_counts_the_built_model(heads, width, flags, norm, activation, positions):
    from jaxtrain.nn.model import build

    names = ("qkv_bias", "out_bias", "mlp_bias", "tied_head", "qk_norm")
    model = ModelConfig(
        vocab_size=53, d_model=24, n_layers=3, n_heads=heads[0], n_kv_heads=heads[1], head_dim=width, d_ff=20,
        max_seq_len=11, norm=norm, activation=activation, positions=positions, **dict(zip(names, flags, strict=True)),
    )  # fmt: skip
    assert count_parameters(model) == build(model).count()


def test_matmul_weights_are_the_parameters_without_embedding_and_norms():
    # Llama 3 8B has no biases: what does not multiply is the embedding and 2 norms a layer and the last one.
    assert matmul_weights(LLAMA3_8B) == 8_030_261_248 - 128_256 * 4096 - (2 * 32 + 1) * 4096


def test_full_is_six_weights_and_twelve_layers_width_length():
    # PaLM appendix B: 6 N + 12 L H Q T, here with H Q = 4096.
    flops = training_flops(LLAMA3_8B, 8192)
    assert flops.full == 6 * matmul_weights(LLAMA3_8B) + 12 * 32 * 4096 * 8192
    assert flops.causal == 6 * matmul_weights(LLAMA3_8B) + 12 * 32 * 4096 * 8193 / 2


def test_kernels_contain_scores_and_routed_experts():
    model = load_config("models/deepseek_v3").model
    scores, routed = 3 * 2 * 128 * (192 + 128) * 62 * 4096, 6 * 59 * 8 * 3 * 7168 * 2048
    counts = [kernel_flops(model, 4096, *kernels) for kernels in ((False, False), (True, False), (False, True))]
    assert counts == [0, scores, routed]
    assert kernel_flops(LLAMA3_8B, 8192, True, True) == 12 * 32 * 4096 * 8192


@given(length=st.integers(1, 60), window=st.one_of(st.none(), st.integers(1, 70)))
def test_visible_keys_equal_counting_the_mask(length, window):
    visible = sum(1 for q in range(length) for k in range(length) if k <= q and (window is None or q - k < window))
    assert visible_keys(length, window) == pytest.approx(visible / length, rel=1e-12)


def test_window_pattern_repeats_over_layers():
    model = ModelConfig(n_layers=5, windows=[4, None])
    full = training_flops(ModelConfig(n_layers=5), 64)
    score = 3 * 4 * model.n_heads * model.width_of_head
    # Layers 0, 2, 4 see 4 keys at most: 3.90625 of 64 on average.
    expected = full.causal - 3 * score * (32.5 - 3.90625)
    assert training_flops(model, 64).causal == pytest.approx(expected, rel=1e-12)
    assert training_flops(model, 64).full == full.full


@pytest.mark.parametrize(
    ("kind", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA B300 SXM6 AC", 2250.0),
        ("NVIDIA L40S", 362.05),
        ("TPU v4", 275.0),
        ("TPU v5 lite", 197.0),
        ("TPU v5p", 459.0),
        ("TPU v6 lite", 918.0),
    ],
)
def test_peak_of_known_devices(kind, tera):
    assert peak_flops(kind, "bfloat16") == pytest.approx(tera * 1e12, rel=1e-12)


@pytest.mark.parametrize("kind", ["cpu", "", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA RTX A1000", "NVIDIA B2000"])
def test_an_unknown_device_has_no_peak(kind):
    assert peak_flops(kind, "bfloat16") is None


def test_float32_peak_follows_the_matmul_precision():
    assert peak_flops("NVIDIA H100 80GB HBM3", "float32") == pytest.approx(494.7e12, rel=1e-12)
    assert peak_flops("NVIDIA H100 80GB HBM3", "float32", "highest") == pytest.approx(66.9e12, rel=1e-12)
    assert peak_flops("TPU v4", "float32", "highest") is None
    assert peak_flops("Tesla V100-SXM2-16GB", "bfloat16") is None


def test_tensor_cores_halve_with_the_width():
    # In vendors' tables TF32 is half of BF16, to the digits they print, where a chip has both.
    for name, peak in PEAKS.items():
        if peak.bfloat16 and not name.startswith("TPU"):
            assert peak.tensor32 == pytest.approx(peak.bfloat16 / 2, rel=0.02), name
