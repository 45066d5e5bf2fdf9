"""Every setting of a run: typed, documented in one line, validated.

A run is one `RunConfig`, made of sections. Each section is frozen and refuses unknown keys. A check of one section is
a validator of that section; a check across sections is a validator of `RunConfig`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, field_validator, model_validator

from jaxtrain.config.data import DataConfig
from jaxtrain.config.model import ModelConfig
from jaxtrain.config.paths import url_fault
from jaxtrain.config.section import Section

Axis = Literal["data", "pipe", "tensor", "seq", "expert"]
AXES: tuple[Axis, ...] = ("data", "pipe", "tensor", "seq", "expert")
Axes = Axis | list[Axis] | None


class MeshConfig(Section):
    """Sizes of the five mesh axes; one of them may be -1, which takes the remaining devices."""

    data: int = -1
    """Data parallelism: replicas or FSDP shards, each with its own part of the global batch."""
    pipe: int = 1
    """Pipeline stages."""
    tensor: int = 1
    """Tensor parallelism: heads, feed-forward width and vocabulary are sharded."""
    seq: int = 1
    """Context parallelism: positions of a sequence are sharded, also inside attention."""
    expert: int = 1
    """Expert parallelism; outside expert layers this axis shards the batch."""
    allow_cross_domain: list[Literal["tensor", "expert"]] = []
    """Axes whose groups may span fast domains on purpose."""

    @property
    def sizes(self) -> dict[Axis, int]:
        """Axis name -> configured size, in mesh order; -1 stays -1."""
        return {axis: getattr(self, axis) for axis in AXES}

    @model_validator(mode="after")
    def _sizes_are_legal(self) -> MeshConfig:
        for axis, size in self.sizes.items():
            if size == 0 or size < -1:
                raise ValueError(f"mesh.{axis} is {size}: use a positive size, or -1 for the remaining devices")
        free = [axis for axis, size in self.sizes.items() if size == -1]
        if len(free) > 1:
            raise ValueError(f"mesh.{' and mesh.'.join(free)} are both -1: give all but one a size")
        return self


class ClusterConfig(Section):
    """The hardware: devices of a node, fast domains, bandwidths, memory."""

    name: str = "local"
    """Name printed in tables."""
    nodes: PositiveInt | None = None
    """Nodes of a described cluster; null is the devices that jax finds."""
    devices_per_node: PositiveInt | None = None
    """Devices of one node of a described cluster."""
    domain_size: PositiveInt | None = None
    """Devices of a fast domain (NVLink, ICI); null is one node."""
    device: str | None = None
    """Name of the accelerator, from which peak FLOP/s and memory follow."""
    memory_gb: float | None = Field(None, gt=0)
    """Memory of a device in GB (10^9 bytes)."""
    domain_gb_per_s: float | None = Field(None, gt=0)
    """Bandwidth of the fast links, in GB/s that one device sends (one direction)."""
    network_gb_per_s: float | None = Field(None, gt=0)
    """Bandwidth of the network between domains, in GB/s that one device sends (one direction)."""
    target: str | None = None
    """File with the GpuTargetConfig text of the GPU compiler, for a card that jaxtrain does not know."""


class RulesConfig(Section):
    """Sharding rules, logical dimension name -> mesh axes: presets in order, then the entries set here."""

    preset: Annotated[list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)] = ["ddp"]
    """Named tables, later ones win: see jaxtrain.mesh.rules.PRESETS."""
    batch: Axes = None
    """Activations: sequences of a batch."""
    seq_len: Axes = None
    """Activations: positions inside attention and feed-forward layers."""
    residual_seq: Axes = None
    """Activations: positions in the residual stream and norms; [seq, tensor] is Megatron's sequence parallelism."""
    hidden: Axes = None
    """Activations: width of the residual stream."""
    embed: Axes = None
    """Parameters: the d_model dimension of weight matrices; data is ZeRO-3/FSDP."""
    norm: Axes = None
    """Parameters: scales and biases of length d_model."""
    heads: Axes = None
    """Query heads."""
    kv_heads: Axes = None
    """Key/value heads; replicated where the axis is larger than their number."""
    head_dim: Axes = None
    """Width of one head."""
    mlp: Axes = None
    """Width of the feed-forward layer."""
    vocab: Axes = None
    """Vocabulary dimension of embedding and head."""
    positions: Axes = None
    """Position dimension of learned positions."""
    layers: Axes = None
    """Stacked layers; pipe splits them into stages."""
    experts: Axes = None
    """Experts of a mixture."""
    optimizer: Axes = None
    """Extra axes that shard optimizer state and separate master parameters: data is ZeRO-1."""
    gradients: Axes = None
    """Extra axes that shard reduced gradients: data, with optimizer: data, is ZeRO-2."""
    replicated_limit: PositiveInt = 1_000_000
    """Largest number of elements of a parameter that a sharding preset may leave replicated."""
    allow: list[str] = []
    """Findings that are accepted, as 'kind:parameter-or-name' globs; the error message prints the entry to add."""


class TrainConfig(Section):
    """The run's length and its batch."""

    steps: PositiveInt = 100
    """Optimizer steps of the run."""
    global_batch: PositiveInt = 16
    """Sequences per optimizer step, over all replicas and microbatches."""
    microbatch: PositiveInt | None = None
    """Sequences of one microbatch on one replica; null: follows from the other two."""
    accumulation: PositiveInt | None = None
    """Microbatches per optimizer step; null: follows from the other two; both null: 1."""
    seed: int = Field(0, ge=0)
    """Seed of initialisation and data order."""
    z_loss: float = Field(0.0, ge=0)
    """Weight of the z-loss, the mean square of logsumexp of the logits (PaLM); 0 is none."""
    loss: str = "cross_entropy"
    """Loss of the scored tokens: cross_entropy, or one that user code registered in jaxtrain.LOSSES."""
    metrics: list[str] = []
    """Additional metrics of each step, registered in jaxtrain.METRICS; rows hold their means over scored tokens."""
    sample_prompt: str = "def "
    """Prompt of the sample generated at the end of the run; empty for none."""
    sample_tokens: PositiveInt = 96
    """Tokens of that sample."""
    sample_temperature: float = Field(0.7, ge=0)
    """Softmax temperature of that sample; 0 is greedy."""


class AttentionConfig(Section):
    """How attention is computed; the model section says what is computed."""

    backend: Literal["auto", "dense", "xla", "tokamax", "cudnn"] = "auto"
    """Kernel; auto chooses the fastest one that supports the model on the devices, and logs the reason."""
    context_parallel: Literal["ring", "all_gather", "ulysses"] = "ring"
    """Method of context parallelism: keys passed around a ring, keys gathered, or heads exchanged for positions."""


class PipelineConfig(Section):
    """Pipeline parallelism over the pipe axis."""

    schedule: str = "1f1b"
    """gpipe, 1f1b, interleaved, zero_bubble, or a CSV file with another schedule."""
    microbatches: PositiveInt | None = None
    """Microbatches per optimizer step; null is train.accumulation."""
    chunks: PositiveInt | None = None
    """Chunks of consecutive layers per stage; null is 2 for interleaved, else 1."""
    stages: Literal["auto"] | list[PositiveInt] = "auto"
    """Layers of each stage (of each chunk in order); auto balances cost, embedding and head included."""


class PrecisionConfig(Section):
    """Dtypes of computation and of reductions; dynamic loss scale of float16."""

    compute: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of matmul inputs and activations; master parameters and accumulation stay float32."""
    reduce: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which devices add up the gradients of weights; with bfloat16 sums over tokens stay in float32."""
    recipe: Literal["float8", "float8_rowwise", "mxfp8"] | None = None
    """8-bit matmuls, with current scales: one a tensor (float8) or a row (float8_rowwise), both from Hopper on; one for
    32 values (mxfp8, Blackwell). null: all matmuls in the compute dtype. Checkpoints do not depend on it."""
    recipe_kinds: tuple[Literal["attention", "mlp"], ...] = ("attention", "mlp")
    """Which matmuls follow the recipe: projections of attention, feed-forward layers (shared experts included). Head,
    embedding, router, routed experts and norms never do."""
    recipe_skip_first: int = Field(0, ge=0)
    """First layers of the model whose matmuls stay in the compute dtype."""
    recipe_skip_last: int = Field(0, ge=0)
    """Last layers of the model whose matmuls stay in the compute dtype; multi-token prediction follows the recipe."""
    recipe_gradients: Literal["e5m2", "e4m3fn"] | None = None
    """Values of cotangents in the recipe's matmuls; null: the recipe's own (float8: e5m2, mxfp8: e4m3fn)."""
    scale_init: float = Field(2.0**15, gt=0)
    """float16: first loss scale."""
    scale_growth_every: PositiveInt = 2000
    """float16: consecutive finite steps before the loss scale doubles."""
    scale_max: float = Field(2.0**24, gt=0)
    """float16: largest loss scale."""
    max_skipped: PositiveInt = 50
    """Consecutive skipped steps after which the run ends with an error."""

    @field_validator("recipe", mode="before")
    @classmethod
    def _recipe_exists(cls, value: Any) -> Any:
        if value == "nvfp4":
            raise ValueError(
                "precision.recipe nvfp4 is not available: training in it needs stochastic rounding and Hadamard "
                "transforms of gradients (arXiv:2509.25149), and jax rounds NVFP4 to nearest: use mxfp8"
            )
        return value

    @field_validator("recipe_kinds", mode="before")
    @classmethod
    def _kinds_exist(cls, value: Any) -> Any:
        refused = set(value) & {"experts", "head", "embed", "router", "norm"} if isinstance(value, list | tuple) else ()
        if refused:
            raise ValueError(
                f"precision.recipe_kinds has {', '.join(sorted(refused))}: a recipe is for attention and mlp. Routed "
                "experts have a grouped kernel without a product of two 8-bit operands; the others stay exact"
            )
        return value

    @model_validator(mode="after")
    def _scale_fits(self) -> PrecisionConfig:
        if self.scale_init > self.scale_max:
            raise ValueError(
                f"precision.scale_init {self.scale_init} exceeds precision.scale_max {self.scale_max}: "
                "start at or below the largest loss scale"
            )
        return self


class GuardConfig(Section):
    """What protects a run from spikes and from devices that compute wrong bits."""

    spike: float | None = Field(None, gt=0)
    """A step is a spike if its loss or gradient norm exceeds median + spike x deviation of the last `window` applied
    steps; the deviation is the median absolute deviation, at least 1 % of the median. A spike is not applied. null: no
    step is one."""
    window: int = Field(128, ge=8)
    """Applied steps that a step is compared with; before there are as many, no step is a spike."""
    action: Literal["skip", "rollback"] = "skip"
    """After a spike: go on with the next batch; or restore the newest good checkpoint first, so that the steps since
    then are lost and their batches skipped. rollback reads each step's metrics before the next step begins."""
    max_rollbacks: PositiveInt = 3
    """Rollbacks of a run after which the next one ends it with an error."""
    replay_every: PositiveInt | None = None
    """Steps between replays: a step is computed twice and its results compared on all devices before it is saved, which
    costs memory for a second state; null for none."""


class RematConfig(Section):
    """Rematerialisation: activations that the backward pass recomputes."""

    policy: Literal["none", "full", "offload", "dots", "names"] = "none"
    """Saved: none all, full block inputs, offload block inputs in host memory, dots matmul outputs, names `names`."""
    names: list[str] = []
    """Values saved under policy names: see jaxtrain.numerics.remat.NAMES."""
    every: PositiveInt = 1
    """Blocks per checkpointed segment; must divide model.n_layers."""


class OptimizerConfig(Section):
    """Optimizer and learning-rate schedule."""

    name: str = "adamw"
    """Optimizer: adamw, lion, adafactor, muon, or one that user code registered in jaxtrain.OPTIMIZERS."""
    learning_rate: float = Field(3e-4, gt=0)
    """Peak learning rate."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment (momentum for lion and muon); adafactor has none."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the second moment; adafactor uses 1 - t^-0.8 instead."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment (adamw, and the AdamW part of muon)."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay of parameters with two or more dimensions (the layer dimension not counted)."""
    clip_norm: float | None = Field(1.0, gt=0)
    """Gradients are clipped to this global norm; null: not clipped."""
    schedule: str = "cosine"
    """Shape after warm-up: cosine, linear, wsd (constant, linear over the last `decay` units), constant, or one of
    jaxtrain.LEARNING_RATES."""
    unit: Literal["steps", "tokens"] = "steps"
    """Unit of warmup, decay and total: optimizer steps or scored tokens."""
    warmup: int = Field(0, ge=0)
    """Units of linear warm-up."""
    decay: int = Field(0, ge=0)
    """wsd: units of the final decay."""
    total: PositiveInt | None = None
    """Units until the end of the schedule; null is train.steps; required if unit is tokens."""
    final_ratio: float = Field(0.1, ge=0, le=1)
    """Final learning rate, as a fraction of the peak."""

    @model_validator(mode="after")
    def _schedule_is_whole(self) -> OptimizerConfig:
        if self.unit == "tokens" and self.total is None and self.schedule != "constant":
            raise ValueError("optimizer.unit is tokens: set optimizer.total, the scored tokens until the schedule ends")
        return self


class LocalTierConfig(Section):
    """Checkpoints on each node's local disk, with copies in other nodes, between durable ones (emergency tier)."""

    directory: str | None = None
    """Folder on the local disk of every node, such as /local/nvme/ckpt; variables of the environment ($TMPDIR) are
    those of each process; null for no local checkpoints."""
    every: PositiveInt = 10
    """Steps between local checkpoints."""
    keep: PositiveInt = 2
    """Number of newest local checkpoints that are kept; one more is there while it is written."""
    peers: int = Field(1, ge=0)
    """Other nodes that hold a copy of each shard: so many nodes may be lost. Data-parallel replicas in other nodes
    count, and cost nothing."""

    @field_validator("directory")
    @classmethod
    def _directory_is_local(cls, directory: str | None) -> str | None:
        if directory is not None and (fault := url_fault(directory, "checkpoint.local.directory")):
            raise ValueError(fault)
        return directory


class CheckpointConfig(Section):
    """Saving and restoring."""

    every: PositiveInt | None = 50
    """Steps between checkpoints; the last step is always saved; null for none by steps."""
    every_minutes: PositiveFloat | None = None
    """Minutes between checkpoints by the clock of process 0, beside checkpoint.every; null for none by time."""
    keep: PositiveInt = 2
    """Number of newest checkpoints that are kept. One of a skipped step does not count and displaces no other."""
    keep_every: PositiveInt | None = None
    """Checkpoints of steps that are multiples of this are kept for ever; null for none."""
    keep_best: PositiveInt | None = None
    """Number of checkpoints with the lowest held-out loss that are kept as well; null for none."""
    asynchronous: bool = True
    """Write checkpoints in the background while training continues."""
    local: LocalTierConfig = LocalTierConfig()
    """Checkpoints on the local disks of the nodes."""


class EvalConfig(Section):
    """Loss on held-out documents."""

    every: PositiveInt | None = 50
    """Steps between evaluations; also before the first step and after the last; null for none."""
    batches: PositiveInt = 8
    """Global batches per evaluation."""


class ObserveConfig(Section):
    """Outputs of metrics."""

    tensorboard: bool = True
    """Write TensorBoard event files to RUN/tensorboard."""
    wandb_project: str | None = None
    """Weights & Biases project; needs the wandb package."""
    progress: bool = True
    """Show a progress bar on a terminal."""


class WatchdogConfig(Section):
    """When `launch` takes a rank for stuck, prints all stacks, and starts the job again."""

    factor: float | None = Field(2.0, ge=1)
    """A rank is stuck after this multiple of its own longest recent time in a phase; null: no rank ever is."""
    floors: dict[
        Literal[
            "start", "join", "data", "restore", "compile", "input", "step", "evaluation", "checkpoint", "barrier", "end"
        ],
        PositiveFloat,
    ] = {}  # fmt: skip
    """Seconds that a rank may always be in a phase, such as {step: 120}; phases left out have the defaults of the
    page on clusters."""


class RunConfig(Section):
    """All settings of a run."""

    model: ModelConfig = ModelConfig()
    mesh: MeshConfig = MeshConfig()
    cluster: ClusterConfig = ClusterConfig()
    rules: RulesConfig = RulesConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    attention: AttentionConfig = AttentionConfig()
    pipeline: PipelineConfig = PipelineConfig()
    precision: PrecisionConfig = PrecisionConfig()
    guard: GuardConfig = GuardConfig()
    remat: RematConfig = RematConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    observe: ObserveConfig = ObserveConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    xla: dict[str, bool | int | float | str] = {}
    """XLA compiler options of the train step only, as xla_name: value; checked before use."""

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
                    f"the number of learned positions: shorten {name} or enlarge model.max_seq_len"
                )
        if tokenizer.path is None and tokenizer.vocab_size > model.token_rows:
            padding = "" if model.unpadded_vocab_size is None else " without its padding"
            raise ValueError(
                f"data.tokenizer.vocab_size {tokenizer.vocab_size} exceeds model.vocab_size "
                f"{model.token_rows}{padding}: lower the first or raise the second, "
                "the embedding needs an entry for each token"
            )
        if model.n_layers % self.remat.every:
            raise ValueError(f"remat.every {self.remat.every} does not divide model.n_layers {model.n_layers}: use 1")
        return self
