"""The settings of a model: a decoder described by data."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from jaxtrain.config.section import Section


class RopeConfig(Section):
    """Rotary positions (Su et al. 2021), plain or scaled for longer context."""

    theta: float = Field(10_000.0, gt=0)
    """Base of the geometric series of wavelengths."""
    scaling: Literal["none", "linear", "llama3", "yarn", "yarn_unrounded"] = "none"
    """How frequencies are stretched for longer context; yarn_unrounded: its ramp may begin between pairs (gpt-oss)."""
    factor: float = Field(8.0, gt=0)
    """linear: all frequencies are divided by this; llama3, yarn: low ones."""
    low_freq_factor: float = Field(1.0, gt=0)
    """llama3: wavelengths above original_seq_len / this are scaled fully."""
    high_freq_factor: float = Field(4.0, gt=0)
    """llama3: wavelengths below original_seq_len / this are left alone."""
    original_seq_len: PositiveInt = 8192
    """llama3, yarn: context length the model was first trained on."""
    beta_fast: float = Field(32.0, gt=0)
    """yarn: pairs that turn more often than this within original_seq_len are left alone."""
    beta_slow: float = Field(1.0, gt=0)
    """yarn: pairs that turn less often than this are divided by factor."""
    attention_factor: float | None = Field(None, gt=0)
    """yarn: multiplies cosines and sines; null is 0.1 ln(factor) + 1."""


class MoeConfig(Section):
    """A mixture of experts in place of the feed-forward layer; experts 0 is none (Shazeer et al. 2017)."""

    experts: int = Field(0, ge=0)
    """Routed experts of a layer."""
    top_k: PositiveInt = 2
    """Routed experts that a token visits."""
    d_ff: PositiveInt | None = None
    """Width of one expert; null is model.d_ff."""
    shared: int = Field(0, ge=0)
    """Experts that every token visits, computed as one feed-forward layer of shared x d_ff (DeepSeek)."""
    first_dense: int = Field(0, ge=0)
    """Layers at the start that keep the dense feed-forward layer of model.d_ff."""
    every: PositiveInt = 1
    """After the first dense layers each every-th is a mixture, the others dense."""
    router: Literal["softmax", "softmax_chosen", "sigmoid", "sigmoid_chosen"] = "softmax_chosen"
    """Scores of experts; _chosen: the weights of the chosen ones are normalised to a sum of 1."""
    scale: float = Field(1.0, gt=0)
    """Multiplies the weights of the chosen experts (DeepSeek's routed_scaling_factor)."""
    groups: PositiveInt = 1
    """Groups of experts (of a device or node); a token visits experts of top_groups of them alone."""
    top_groups: PositiveInt = 1
    """Groups that a token may visit: those with the highest sum of two best scores."""
    balance: Literal["batch", "sequence"] = "batch"
    """What the balancing loss averages over: the global batch (Switch Transformer), or each document row (DeepSeek)."""
    balance_weight: float = Field(0.0, ge=0)
    """Strength of the balancing loss, a mean over layers' tokens; 0 is none."""
    z_weight: float = Field(0.0, ge=0)
    """Strength of the router's z-loss, the mean square of logsumexp of its logits (ST-MoE); 0 is none."""
    bias_rate: float | None = Field(None, ge=0)
    """A correction bias chooses experts and moves by this much an update (loss-free balancing); null is no bias."""
    capacity: float | None = Field(None, gt=0)
    """Tokens an expert takes, as a multiple of its even share of a row block; later ones are dropped and counted; null
    drops none."""
    buffer: float | None = Field(None, gt=0)
    """Rows that a device can receive from the others, as a multiple of its even share, for capacity null; more is a
    counted overflow; null is the worst case."""

    @model_validator(mode="after")
    def _routing_is_possible(self) -> MoeConfig:
        if self.experts and self.top_k > self.experts:
            raise ValueError(f"model.moe.top_k {self.top_k} exceeds model.moe.experts {self.experts}")
        if self.experts and self.experts % self.groups:
            raise ValueError(
                f"model.moe.groups {self.groups} does not divide model.moe.experts {self.experts}: "
                "each group holds a whole number of experts"
            )
        if self.top_groups > self.groups:
            raise ValueError(f"model.moe.top_groups {self.top_groups} exceeds model.moe.groups {self.groups}")
        if self.experts and self.top_k > self.top_groups * (self.experts // self.groups):
            raise ValueError(
                f"model.moe.top_k {self.top_k} exceeds the experts of model.moe.top_groups {self.top_groups} groups "
                f"({self.top_groups * (self.experts // self.groups)}): keep more groups"
            )
        return self


class MlaConfig(Section):
    """Multi-head latent attention (DeepSeek-V2): keys and values from a latent vector; kv_rank 0 is none.

    model.head_dim is the width of a head's part without position; rope_dim is added to it.
    """

    kv_rank: int = Field(0, ge=0)
    """Width of the latent vector of keys and values."""
    q_rank: int = Field(0, ge=0)
    """Width of the latent vector of queries; 0 projects queries directly."""
    rope_dim: PositiveInt = 64
    """Width of the rotary part of a head, shared by all heads of a key."""
    v_dim: PositiveInt | None = None
    """Width of a value head; null is model.head_dim."""


class ModelConfig(Section):
    """A decoder described by data."""

    vocab_size: PositiveInt = 8192
    """Rows of the embedding table; at least the tokenizer's size."""
    d_model: PositiveInt = 256
    """Width of the residual stream."""
    n_layers: PositiveInt = 4
    """Decoder blocks."""
    n_heads: PositiveInt = 4
    """Query heads."""
    n_kv_heads: PositiveInt | None = None
    """Key/value heads (grouped-query attention); null is n_heads."""
    head_dim: PositiveInt | None = None
    """Width of one head; null is d_model / n_heads."""
    d_ff: PositiveInt = 768
    """Width of the feed-forward layer."""
    max_seq_len: PositiveInt = 2048
    """Longest sequence; the number of rows of learned positions."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Normalisation before each half-block and before the head."""
    norm_eps: float = Field(1e-5, gt=0)
    """Added to the variance in the normalisation."""
    activation: Literal["swiglu", "gelu", "gelu_tanh", "relu2", "swiglu_oss"] = "swiglu"
    """Feed-forward nonlinearity; swiglu has a gate, relu2 is relu squared, swiglu_oss is the clipped one of gpt-oss."""
    positions: Literal["rope", "learned", "none"] = "rope"
    """How a token knows its place in its document."""
    rope: RopeConfig = RopeConfig()
    """Rotary settings, read when positions is rope."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections."""
    out_bias: bool = False
    """Bias on the attention output projection."""
    mlp_bias: bool = False
    """Biases in the feed-forward layer."""
    tied_head: bool = False
    """The output head is the transposed embedding."""
    qk_norm: bool = False
    """RMSNorm per head on queries and keys before RoPE (Qwen 3)."""
    windows: list[PositiveInt | None] = Field([None], min_length=1)
    """Sliding-window pattern repeated over layers: visible tokens including oneself, null is all."""
    attention_scale: float | None = Field(None, gt=0)
    """Scores are multiplied by this; null is 1 / sqrt(width of a head)."""
    attention_sinks: bool = False
    """A learned score a head that takes part in the softmax and adds nothing (gpt-oss)."""
    attention_softcap: float | None = Field(None, gt=0)
    """Scores become cap * tanh(scores / cap) (Gemma 2)."""
    logit_softcap: float | None = Field(None, gt=0)
    """Logits become cap * tanh(logits / cap) (Gemma 2)."""
    moe: MoeConfig = MoeConfig()
    """Mixture of experts, read when moe.experts is not 0."""
    mla: MlaConfig = MlaConfig()
    """Latent attention, read when mla.kv_rank is not 0."""
    mtp: int = Field(0, ge=0)
    """Further tokens that extra blocks predict in training (multi-token prediction, DeepSeek-V3)."""
    mtp_weight: float = Field(0.3, ge=0)
    """Strength of their mean loss."""
    init_std: float = Field(0.02, gt=0)
    """Standard deviation of the weights at birth; output projections are divided by sqrt(2 n_layers)."""

    @property
    def kv_heads(self) -> int:
        """Key/value heads with the default filled in."""
        return self.n_kv_heads or self.n_heads

    @property
    def width_of_head(self) -> int:
        """Head width with the default filled in."""
        return self.head_dim or self.d_model // self.n_heads

    @model_validator(mode="after")
    def _shapes_agree(self) -> ModelConfig:
        if self.head_dim is None and self.d_model % self.n_heads:
            raise ValueError(
                f"model.n_heads {self.n_heads} does not divide model.d_model {self.d_model}: "
                "choose another number of heads or set model.head_dim"
            )
        if self.n_heads % self.kv_heads:
            raise ValueError(
                f"model.n_kv_heads {self.kv_heads} does not divide model.n_heads {self.n_heads}: "
                "each key/value head serves a whole number of query heads"
            )
        if self.positions == "rope" and self.width_of_head % 2:
            raise ValueError(
                f"model.head_dim {self.width_of_head} is odd: rotary positions rotate pairs, use an even width"
            )
        return self
