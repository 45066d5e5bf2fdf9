"""Every setting of a run: typed, documented in one line, validated.

A run is one `RunConfig`, made of sections. Each section is frozen and refuses unknown keys.
Checks that need one section live on it; checks that need several live in `RunConfig`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt, field_validator, model_validator

from jaxtrain.config.data import DataConfig
from jaxtrain.config.model import ModelConfig
from jaxtrain.config.section import Section

Axis = Literal["data", "pipe", "tensor", "seq", "expert"]
AXES: tuple[Axis, ...] = ("data", "pipe", "tensor", "seq", "expert")
Axes = Axis | list[Axis] | None


class MeshConfig(Section):
    """Sizes of the five mesh axes; one of them may be -1 and takes the devices that are left."""

    data: int = -1
    """Replicas, or FSDP shards: each reads other samples."""
    pipe: int = 1
    """Pipeline stages."""
    tensor: int = 1
    """Tensor parallelism inside a block."""
    seq: int = 1
    """Context parallelism: the sequence split through attention."""
    expert: int = 1
    """Expert parallelism; outside expert layers it carries batch."""
    allow_cross_domain: list[Literal["tensor", "expert"]] = []
    """Axes whose groups may leave a fast domain on purpose."""

    @property
    def sizes(self) -> dict[Axis, int]:
        """Axis name -> configured size, in mesh order; -1 is not resolved."""
        return {axis: getattr(self, axis) for axis in AXES}

    @model_validator(mode="after")
    def _sizes_are_legal(self) -> MeshConfig:
        for axis, size in self.sizes.items():
            if size == 0 or size < -1:
                raise ValueError(f"mesh.{axis} is {size}: use a positive size, or -1 for the devices that are left")
        free = [axis for axis, size in self.sizes.items() if size == -1]
        if len(free) > 1:
            raise ValueError(f"mesh.{' and mesh.'.join(free)} are both -1: only one axis can take what is left")
        return self


class ClusterConfig(Section):
    """The machine: how many devices a node has and which of them share the fast links."""

    name: str = "local"
    """Name in tables."""
    nodes: PositiveInt | None = None
    """Nodes of a described cluster; null is what this process finds."""
    devices_per_node: PositiveInt | None = None
    """Devices of a node of a described cluster."""
    domain_size: PositiveInt | None = None
    """Devices joined by the fast links; null is a node."""
    device: str | None = None
    """Accelerator's name, for peak FLOP/s and memory."""
    memory_gb: float | None = Field(None, gt=0)
    """Memory of a device in GB (10^9 bytes)."""
    domain_gb_per_s: float | None = Field(None, gt=0)
    """Fast links: GB/s that one device sends into its domain (one direction)."""
    network_gb_per_s: float | None = Field(None, gt=0)
    """Network between domains: GB/s that one device sends (one direction)."""
    target: str | None = None
    """File with the GPU compiler's GpuTargetConfig text, for a card that jaxtrain does not know."""


class RulesConfig(Section):
    """Logical dimension names -> mesh axes: presets in order, then single entries set here."""

    preset: Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)] = ["ddp"]
    """Named tables, later ones win: see jaxtrain.mesh.rules.PRESETS."""
    batch: Axes = None
    """Activations: sequences of the batch."""
    seq_len: Axes = None
    """Activations: positions inside attention and feed-forward layers."""
    residual_seq: Axes = None
    """Activations: positions in the residual stream and norms; [seq, tensor] is Megatron sequence parallelism."""
    hidden: Axes = None
    """Activations: width of the residual stream."""
    embed: Axes = None
    """Parameters: the d_model dimension of weight matrices; data is ZeRO-3/FSDP."""
    norm: Axes = None
    """Parameters: scales and biases as wide as the model."""
    heads: Axes = None
    """Query heads."""
    kv_heads: Axes = None
    """Key/value heads; replicated when the axis is larger."""
    head_dim: Axes = None
    """Width of one head."""
    mlp: Axes = None
    """Width of the feed-forward layer."""
    vocab: Axes = None
    """Vocabulary rows of embedding and head."""
    positions: Axes = None
    """Rows of learned positions."""
    layers: Axes = None
    """Stacked layers; pipe cuts them into stages."""
    experts: Axes = None
    """Experts of a mixture."""
    optimizer: Axes = None
    """Extra axes over which optimizer state (and separate master weights) is sharded: data is ZeRO-1."""
    gradients: Axes = None
    """Extra axes over which reduced gradients are sharded: data, with optimizer, is ZeRO-2."""
    replicated_limit: PositiveInt = 1_000_000
    """Parameters of more elements than this left whole on a sharding mesh are an error under a sharding preset."""
    allow: list[str] = []
    """Findings accepted on purpose, as 'kind:parameter-or-name' globs; the error prints the entry to add."""


class TrainConfig(Section):
    """The run's length and its batch."""

    steps: PositiveInt = 100
    """Optimizer updates."""
    global_batch: PositiveInt = 16
    """Sequences an update, over all replicas and microbatches."""
    microbatch: PositiveInt | None = None
    """Sequences a replica computes at once; null follows from the others."""
    accumulation: PositiveInt | None = None
    """Microbatches an update; null follows from the others, both null is 1."""
    seed: int = Field(0, ge=0)
    """Seed of initialisation and data order."""
    z_loss: float = Field(0.0, ge=0)
    """Adds this times the mean square of logsumexp of the logits, which keeps them from drifting (PaLM); 0 is none."""
    sample_prompt: str = "def "
    """Prompt of the sample generated at the end; empty for none."""
    sample_tokens: PositiveInt = 96
    """Tokens of that sample."""
    sample_temperature: float = Field(0.7, ge=0)
    """Softmax temperature of that sample; 0 is greedy."""


class AttentionConfig(Section):
    """How attention is computed; what it computes stands in model."""

    backend: Literal["auto", "dense", "xla", "tokamax", "cudnn"] = "auto"
    """Kernel; auto takes the fastest that can do what the model asks on the devices at hand, and says why."""
    context_parallel: Literal["ring", "all_gather", "ulysses"] = "ring"
    """How attention crosses the seq axis: keys travel, keys are gathered, or heads are exchanged for positions."""


class PipelineConfig(Section):
    """How microbatches flow through the stages of the pipe axis."""

    schedule: str = "1f1b"
    """gpipe, 1f1b, interleaved, zero_bubble, or a CSV file with a schedule of one's own."""
    microbatches: PositiveInt | None = None
    """Microbatches an update; null is train.accumulation."""
    chunks: PositiveInt | None = None
    """Runs of layers that a stage holds; null is 2 for interleaved, else 1."""
    stages: Literal["auto"] | list[PositiveInt] = "auto"
    """Layers of each stage (of each chunk in order); auto balances them by cost, embedding and head counted."""


class PrecisionConfig(Section):
    """Which dtype computes, which sums."""

    compute: Literal["float32", "bfloat16", "float16"] = "float32"
    """Matmul inputs and activations; master weights and accumulation stay float32."""
    reduce: Literal["float32", "bfloat16"] = "float32"
    """Gradients on the wire between replicas."""
    scale_init: float = Field(2.0**15, gt=0)
    """float16: first loss scale."""
    scale_growth_every: PositiveInt = 2000
    """float16: finite updates before the scale doubles."""
    scale_max: float = Field(2.0**24, gt=0)
    """float16: largest loss scale."""
    max_skipped: PositiveInt = 50
    """Consecutive skipped updates that end the run with an error."""

    @model_validator(mode="after")
    def _scale_fits(self) -> PrecisionConfig:
        if self.scale_init > self.scale_max:
            raise ValueError(
                f"precision.scale_init {self.scale_init} exceeds precision.scale_max {self.scale_max}: "
                "start at or below the largest loss scale"
            )
        return self


class RematConfig(Section):
    """What the backward pass recomputes instead of keeping."""

    policy: Literal["none", "full", "offload", "dots", "names"] = "none"
    """none keeps all, full block inputs, offload those in host memory, dots matmul outputs, names `names`."""
    names: list[str] = []
    """Values kept under policy names: see jaxtrain.numerics.remat.NAMES."""
    every: PositiveInt = 1
    """Blocks of one checkpointed segment; must divide n_layers."""


class OptimizerConfig(Section):
    """Update rule and its schedule."""

    name: Literal["adamw", "lion", "adafactor", "muon"] = "adamw"
    """Update rule."""
    learning_rate: float = Field(3e-4, gt=0)
    """Peak learning rate."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """First moment's decay (momentum for lion and muon); adafactor keeps no first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Second moment's decay; adafactor has its own, 1 - t^-0.8."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment (adamw, muon's AdamW part)."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled decay of parameters with two or more dimensions (stacking not counted)."""
    clip_norm: float | None = Field(1.0, gt=0)
    """Largest global gradient norm; null does not clip."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape after warm-up; wsd holds, then falls over `decay`."""
    unit: Literal["steps", "tokens"] = "steps"
    """What warmup, decay and total count: updates or scored tokens."""
    warmup: int = Field(0, ge=0)
    """Units of linear warm-up."""
    decay: int = Field(0, ge=0)
    """wsd: units of the final fall."""
    total: PositiveInt | None = None
    """Units until the schedule's end; null is train.steps, required with tokens."""
    final_ratio: float = Field(0.1, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""

    @model_validator(mode="after")
    def _schedule_is_whole(self) -> OptimizerConfig:
        if self.unit == "tokens" and self.total is None and self.schedule != "constant":
            raise ValueError("optimizer.unit is tokens: set optimizer.total, the scored tokens until the schedule ends")
        if self.schedule == "wsd" and self.decay == 0:
            raise ValueError(
                "optimizer.schedule is wsd and optimizer.decay is 0: set optimizer.decay, the units of the final fall, "
                "or use optimizer.schedule constant"
            )
        return self


class CheckpointConfig(Section):
    """Saving and restoring."""

    every: PositiveInt = 50
    """Updates between checkpoints; the last update is always saved."""
    keep: PositiveInt = 2
    """Newest checkpoints kept."""
    asynchronous: bool = True
    """Write while training goes on."""


class EvalConfig(Section):
    """Loss on held-out documents."""

    every: PositiveInt | None = 50
    """Updates between evaluations, also before the first and after the last; null for none."""
    batches: PositiveInt = 8
    """Global batches of one evaluation."""


class ObserveConfig(Section):
    """Where metrics go."""

    tensorboard: bool = True
    """Write TensorBoard event files to RUN/tensorboard."""
    wandb_project: str | None = None
    """Weights & Biases project; needs the wandb package."""
    progress: bool = True
    """Progress bar on a terminal."""


class RunConfig(Section):
    """One run."""

    model: ModelConfig = ModelConfig()
    mesh: MeshConfig = MeshConfig()
    cluster: ClusterConfig = ClusterConfig()
    rules: RulesConfig = RulesConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    attention: AttentionConfig = AttentionConfig()
    pipeline: PipelineConfig = PipelineConfig()
    precision: PrecisionConfig = PrecisionConfig()
    remat: RematConfig = RematConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    observe: ObserveConfig = ObserveConfig()
    xla: dict[str, bool | int | float | str] = {}
    """XLA compiler options of the train step alone, as xla_name: value; checked before use."""

    @field_validator("xla", mode="before")
    @classmethod
    def _options_are_scalars(cls, options: Any) -> Any:
        for name, value in options.items() if isinstance(options, dict) else ():
            if not isinstance(value, bool | int | float | str):
                raise ValueError(f"xla.{name} is {value!r}: use true, false, a number or text")
        return options

    @model_validator(mode="after")
    def _sections_agree(self) -> RunConfig:
        model, data, tokenizer = self.model, self.data, self.data.tokenizer
        for name, length in data.seq_lens:
            if model.positions == "learned" and length > model.max_seq_len:
                raise ValueError(
                    f"{name} {length} exceeds model.max_seq_len {model.max_seq_len}, "
                    f"the rows of learned positions: shorten {name} or enlarge model.max_seq_len"
                )
        if tokenizer.path is None and tokenizer.vocab_size > model.vocab_size:
            raise ValueError(
                f"data.tokenizer.vocab_size {tokenizer.vocab_size} exceeds model.vocab_size {model.vocab_size}: "
                "token ids would lie beyond the embedding table"
            )
        if model.n_layers % self.remat.every:
            raise ValueError(f"remat.every {self.remat.every} does not divide model.n_layers {model.n_layers}")
        return self
