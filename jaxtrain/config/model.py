"""The settings of a model: one decoder, described by data."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from jaxtrain.config.section import Section


class RopeConfig(Section):
    """Rotary position embedding (Su et al. 2021), optionally scaled for longer context."""

    theta: float = Field(10_000.0, gt=0)
    """Base of the geometric series of wavelengths."""
    scaling: Literal["none", "linear", "llama3", "yarn", "yarn_unrounded"] = "none"
    """Scaling of frequencies for longer context; yarn_unrounded does not round the borders of its ramp (gpt-oss)."""
    factor: float = Field(8.0, gt=0)
    """linear: all frequencies are divided by this; llama3, yarn: low frequencies."""
    low_freq_factor: float = Field(1.0, gt=0)
    """llama3: wavelengths above original_seq_len / low_freq_factor are scaled fully."""
    high_freq_factor: float = Field(4.0, gt=0)
    """llama3: wavelengths below original_seq_len / high_freq_factor are not scaled."""
    original_seq_len: PositiveInt = 8192
    """llama3, yarn: sequence length that the model was first trained with."""
    beta_fast: float = Field(32.0, gt=0)
    """yarn: pairs with more rotations than this within original_seq_len are not scaled."""
    beta_slow: float = Field(1.0, gt=0)
    """yarn: frequencies of pairs with fewer rotations than this are divided by factor."""
    attention_factor: float | None = Field(None, gt=0)
    """yarn: multiplies cosines and sines; null is 0.1 ln(factor) + 1."""


class MoeConfig(Section):
    """Mixture of experts in place of the feed-forward layer (Shazeer et al. 2017); experts 0 is none."""

    experts: int = Field(0, ge=0)
    """Routed experts per layer."""
    top_k: PositiveInt = 2
    """Routed experts per token."""
    d_ff: PositiveInt | None = None
    """Feed-forward width of one expert; null is model.d_ff."""
    shared: int = Field(0, ge=0)
    """Experts that process every token, computed as one feed-forward layer of width shared x d_ff (DeepSeek)."""
    first_dense: int = Field(0, ge=0)
    """First layers that have a dense feed-forward layer of width model.d_ff."""
    every: PositiveInt = 1
    """After the first dense layers, one layer in `every` is a mixture and the others are dense."""
    router: Literal["softmax", "softmax_chosen", "sigmoid", "sigmoid_chosen"] = "softmax_chosen"
    """Scores of experts; _chosen: the weights of the chosen experts are normalised to a sum of 1."""
    scale: float = Field(1.0, gt=0)
    """Factor on the weights of the chosen experts (DeepSeek's routed_scaling_factor)."""
    groups: PositiveInt = 1
    """Groups of experts (of a device or node); a token is sent to experts of at most top_groups groups."""
    top_groups: PositiveInt = 1
    """Groups that a token may be sent to: those with the highest sums of their two best scores."""
    balance: Literal["batch", "sequence"] = "batch"
    """Extent of the balancing loss: the global batch (Switch Transformer) or each sequence (DeepSeek)."""
    balance_weight: float = Field(0.0, ge=0)
    """Weight of the balancing loss, a mean over tokens and layers; 0 is none."""
    z_weight: float = Field(0.0, ge=0)
    """Weight of the router z-loss, the mean square of logsumexp of its logits (ST-MoE); 0 is none."""
    bias_rate: float | None = Field(None, ge=0)
    """Step size of a correction bias on the scores that choose experts (loss-free balancing); null is no bias."""
    capacity: float | None = Field(None, gt=0)
    """Tokens that an expert accepts, as a multiple of its even share; later tokens are dropped and counted; null: no
    limit."""
    buffer: float | None = Field(None, gt=0)
    """Tokens that a device can receive if capacity is null, as a multiple of its even share; more are dropped and
    counted; null is the worst case."""

    @model_validator(mode="after")
    def _routing_is_possible(self) -> MoeConfig:
        if self.experts and self.top_k > self.experts:
            raise ValueError(
                f"model.moe.top_k {self.top_k} exceeds model.moe.experts {self.experts}: lower model.moe.top_k"
            )
        if self.experts and self.experts % self.groups:
            raise ValueError(
                f"model.moe.groups {self.groups} does not divide model.moe.experts {self.experts}: "
                "each group holds a whole number of experts"
            )
        if self.top_groups > self.groups:
            raise ValueError(
                f"model.moe.top_groups {self.top_groups} exceeds model.moe.groups {self.groups}: "
                "lower model.moe.top_groups"
            )
        if self.experts and self.top_k > self.top_groups * (self.experts // self.groups):
            raise ValueError(
                f"model.moe.top_k {self.top_k} exceeds the experts of model.moe.top_groups {self.top_groups} groups "
                f"({self.top_groups * (self.experts // self.groups)}): raise model.moe.top_groups"
            )
        return self


class MlaConfig(Section):
    """Multi-head latent attention (DeepSeek-V2): keys and values from a latent vector; kv_rank 0 is none.

    model.head_dim is the width of the part of a head without rotary position; rope_dim is added to it.
    """

    kv_rank: int = Field(0, ge=0)
    """Width of the latent vector of keys and values."""
    q_rank: int = Field(0, ge=0)
    """Width of the latent vector of queries; 0: queries are projected directly."""
    rope_dim: PositiveInt = 64
    """Width of the rotary part of a head; its key is shared by all heads."""
    v_dim: PositiveInt | None = None
    """Width of a value head; null is model.head_dim."""


class ModelConfig(Section):
    """A decoder, described by data."""

    vocab_size: PositiveInt = 8192
    """Entries of the embedding table; at least the size of the tokenizer."""
    unpadded_vocab_size: PositiveInt | None = None
    """Entries that are tokens; later ones are padding: never in a softmax, a loss or a sample; null is vocab_size."""
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
    """Longest sequence; the number of learned positions."""
    norm: str = "rmsnorm"
    """Normalisation before attention, feed-forward layer and head: rmsnorm, layernorm, or one of jaxtrain.NORMS."""
    norm_eps: float = Field(1e-5, gt=0)
    """Added to the variance in the normalisation."""
    activation: str = "swiglu"
    """Feed-forward nonlinearity: swiglu (gated), gelu, gelu_tanh, relu2 (relu squared), swiglu_oss (clipped swiglu of
    gpt-oss), or one that user code registered in jaxtrain.ACTIVATIONS."""
    positions: Literal["rope", "learned", "none"] = "rope"
    """Position encoding: rotary, a learned vector per position, or none."""
    rope: RopeConfig = RopeConfig()
    """Rotary position embedding, used if positions is rope."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections."""
    out_bias: bool = False
    """Bias on the attention output projection."""
    mlp_bias: bool = False
    """Biases in the feed-forward layer."""
    tied_head: bool = False
    """The output head is the transposed embedding."""
    qk_norm: bool = False
    """RMSNorm per head of queries and keys, before RoPE (Qwen 3)."""
    windows: list[PositiveInt | None] = Field([None], min_length=1)
    """Sliding windows, repeated over layers: visible tokens, the query's own included; null is all."""
    attention_scale: float | None = Field(None, gt=0)
    """Factor on attention scores; null is 1 / sqrt(width of a head)."""
    attention_sinks: bool = False
    """One learned score per head that enters the denominator of the softmax only (gpt-oss)."""
    attention_softcap: float | None = Field(None, gt=0)
    """Scores become cap * tanh(scores / cap) (Gemma 2)."""
    logit_softcap: float | None = Field(None, gt=0)
    """Logits become cap * tanh(logits / cap) (Gemma 2)."""
    moe: MoeConfig = MoeConfig()
    """Mixture of experts, used if moe.experts is not 0."""
    mla: MlaConfig = MlaConfig()
    """Latent attention, used if mla.kv_rank is not 0."""
    mtp: int = Field(0, ge=0)
    """Multi-token prediction: extra blocks, one per additional token predicted in training (DeepSeek-V3)."""
    mtp_weight: float = Field(0.3, ge=0)
    """Weight of the mean loss of multi-token prediction."""
    init_std: float = Field(0.02, gt=0)
    """Standard deviation of initial weights; of output projections, divided by sqrt(2 n_layers)."""

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads, the default applied."""
        return self.n_kv_heads or self.n_heads

    @property
    def width_of_head(self) -> int:
        """Width of a head, the default applied."""
        return self.head_dim or self.d_model // self.n_heads

    @property
    def token_rows(self) -> int:
        """Entries of the embedding table that are tokens, the default applied."""
        return self.unpadded_vocab_size or self.vocab_size

    @model_validator(mode="after")
    def _shapes_agree(self) -> ModelConfig:
        if self.token_rows > self.vocab_size:
            raise ValueError(
                f"model.unpadded_vocab_size {self.unpadded_vocab_size} exceeds model.vocab_size {self.vocab_size}: "
                "raise model.vocab_size, which counts the padding too"
            )
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
