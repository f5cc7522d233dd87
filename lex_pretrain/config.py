"""Every setting of a run: typed, described, validated, frozen.

Units are in the names; `null` means that the value is derived, as its description says.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lex_pretrain.batches import Batches

PositionScheme = Literal["xpos", "rope", "alibi", "sinusoidal", "learned", "none"]
AttentionMode = Literal["causal", "blockwise", "sliding", "sinks"]
Precision = Literal["bf16", "fp16", "fp32"]

DEFAULT_WARMUP_STEPS = 750

PositiveInt = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Base of every section: unknown keys are refused and nothing changes after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, protected_namespaces=())


class RunSection(Section):
    """Where a run writes and what seeds it."""

    output_dir: str = Field(description="folder that receives config.yaml, metrics.jsonl and checkpoints/")
    seed: int = Field(default=1, ge=0, lt=2**63, description="seed of the initial weights, the data order and dropout")


class SourceSection(Section):
    """One dataset of a mixture."""

    path: str = Field(description="dataset folder made by `lex-pretrain prepare`")
    weight: float = Field(default=1.0, gt=0, description="share of the samples, relative to the other weights")


class DataSection(Section):
    """What to train on: one dataset folder, or several with weights."""

    path: str | None = Field(default=None, description="one dataset folder made by `lex-pretrain prepare`")
    sources: tuple[SourceSection, ...] = Field(default=(), description="several dataset folders with weights")
    temperature: float | None = Field(
        default=None, gt=0, description="T: sources count by weight * tokens^(1/T), 1 = by size; null = by weight alone"
    )
    windows: Literal["stream", "documents"] = Field(
        default="stream", description="lay windows over the stream of all documents, or within single documents"
    )
    validation_split: str = Field(default="validation", description="split that validation reads")

    @model_validator(mode="after")
    def _one_of_path_and_sources(self) -> "DataSection":
        if (self.path is None) == (not self.sources):
            raise ValueError("give either path (one dataset folder) or sources (a list of path and weight)")
        return self

    @property
    def resolved_sources(self) -> tuple[SourceSection, ...]:
        return self.sources or (SourceSection(path=self.path or ""),)


class ModelSection(Section):
    """Architecture of the decoder. Defaults follow the paper's code where it states a value."""

    position: PositionScheme = Field(default="xpos", description="position scheme")
    num_layers: PositiveInt = Field(description="number of decoder layers")
    hidden_size: PositiveInt = Field(description="width of the residual stream")
    num_heads: PositiveInt = Field(description="attention heads a layer")
    num_key_value_heads: PositiveInt | None = Field(
        default=None, description="key and value heads (grouped-query attention); null = num_heads"
    )
    feed_forward_size: PositiveInt | None = Field(
        default=None, description="inner width of the feed-forward layers; null = 4 * hidden_size"
    )
    sequence_length: PositiveInt = Field(description="training length in tokens")
    vocab_size: PositiveInt | None = Field(default=None, description="vocabulary; null = the tokenizer of the data")
    block_size: PositiveInt | None = Field(
        default=None, description="block of blockwise attention in tokens; null = sequence_length / 2"
    )
    window_size: PositiveInt | None = Field(
        default=None, description="keys a query sees in sliding and sinks attention; null = sequence_length"
    )
    num_sinks: int = Field(
        default=4, ge=0, description="first tokens of a document that sinks attention always sees, part of its window"
    )
    xpos_gamma: float = Field(default=0.4, gt=0, description="γ of xPos: larger decays less")
    xpos_scale_base: float | None = Field(
        default=None, gt=0, description="tokens over which xPos decays once; null = sequence_length / 2"
    )
    xpos_shared_decay: bool = Field(
        default=False, description="ablation: all dimensions decay alike, by the mean of xPos's log decays"
    )
    rotary_theta: float = Field(default=10000.0, gt=1, description="base of the rotation angles (xpos, rope)")
    rope_scaling: Literal["none", "linear", "ntk", "yarn"] = Field(
        default="none", description="how rope is stretched past the training length, at evaluation"
    )
    rope_scaling_factor: float = Field(default=1.0, ge=1, description="times the training length that rope is fit to")
    norm: Literal["layernorm", "rmsnorm"] = Field(default="layernorm", description="normalisation layer")
    sub_layer_norm: bool = Field(
        default=False, description="sub-LN (Magneto): a second norm before each output projection"
    )
    activation: Literal["gelu", "relu", "swiglu"] = Field(default="gelu", description="feed-forward activation")
    bias: bool = Field(default=True, description="biases in linear layers and norms")
    tie_embeddings: bool = Field(default=True, description="share the input embedding with the output layer")
    scale_embeddings: bool = Field(default=True, description="multiply embeddings by sqrt(hidden_size)")
    dropout: Fraction = Field(default=0.0, description="dropout on embeddings, attention and residual branches")
    init: Literal["xavier", "gpt2"] = Field(
        default="xavier", description="initialisation: the paper's code (xavier) or GPT-2's"
    )

    @model_validator(mode="after")
    def _shapes_fit(self) -> "ModelSection":
        faults = []
        if self.hidden_size % self.num_heads:
            faults.append(f"hidden_size {self.hidden_size} is not divisible by num_heads {self.num_heads}")
        elif self.position in ("xpos", "rope") and self.head_size % 2:
            faults.append(
                f"hidden_size / num_heads = {self.head_size} is odd; {self.position} rotates pairs of dimensions"
            )
        if self.num_heads % self.resolved_num_key_value_heads:
            faults.append(
                f"num_heads {self.num_heads} is not divisible by num_key_value_heads {self.num_key_value_heads}"
            )
        if self.block_size is not None and self.block_size > self.sequence_length:
            faults.append(
                f"block_size {self.block_size} is longer than sequence_length {self.sequence_length}: "
                "blockwise attention would reach distances that training never saw"
            )
        if self.resolved_window_size > self.sequence_length:
            faults.append(
                f"window_size {self.window_size} is longer than sequence_length {self.sequence_length}: "
                "sliding and sinks attention would reach distances that training never saw"
            )
        if self.num_sinks >= self.resolved_window_size:
            faults.append(f"num_sinks {self.num_sinks} leaves no window of the {self.resolved_window_size} keys in all")
        if self.rope_scaling != "none" and self.position != "rope":
            faults.append(f"rope_scaling {self.rope_scaling} needs position rope, not {self.position}")
        if faults:
            raise ValueError("; ".join(faults))
        return self

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def resolved_num_key_value_heads(self) -> int:
        return self.num_key_value_heads or self.num_heads

    @property
    def resolved_feed_forward_size(self) -> int:
        return self.feed_forward_size or 4 * self.hidden_size

    @property
    def resolved_block_size(self) -> int:
        return self.block_size or max(1, self.sequence_length // 2)

    @property
    def resolved_window_size(self) -> int:
        return self.window_size or self.sequence_length

    @property
    def resolved_xpos_scale_base(self) -> float:
        return self.xpos_scale_base or self.sequence_length / 2


class TrainSection(Section):
    """Length, batch and precision of the training."""

    num_steps: PositiveInt | None = Field(default=None, description="optimizer steps; null = by num_tokens")
    num_tokens: PositiveInt | None = Field(
        default=None, description="length in tokens instead, rounded up to whole steps; null = by num_steps"
    )
    global_batch_size: PositiveInt = Field(description="sequences a step, over all processes")
    initial_batch_size: PositiveInt | None = Field(
        default=None, description="sequences of the first steps, from where the batch grows; null = no growth"
    )
    batch_ramp_steps: int = Field(
        default=0, ge=0, description="steps over which the batch grows, in rises of initial_batch_size"
    )
    micro_batch_size: PositiveInt | None = Field(
        default=None, description="sequences a forward pass on one process; null = as large as divides"
    )
    precision: Precision = Field(default="bf16", description="number format of forward and backward passes")
    gradient_clipping: float = Field(default=1.0, ge=0, description="largest gradient norm; 0 = no clipping")
    activation_checkpointing: int = Field(
        default=0,
        ge=0,
        description="k = every k-th layer recomputes its activations in the backward pass to save memory; 0 = none",
    )
    compile_layers: bool = Field(
        default=False, description="fuse each layer's operations with torch.compile; the first step takes minutes"
    )
    z_loss: float = Field(
        default=0.0, ge=0, description="weight of the squared log normaliser, part of the loss that training reports"
    )
    separate_documents: bool = Field(
        default=False, description="tokens see no other document of their window; for modes causal and blockwise"
    )
    max_bad_steps: PositiveInt = Field(
        default=5,
        description="steps in a row with a loss or gradient that is not finite, after which the run goes back to its "
        "last checkpoint and passes over the samples since then",
    )
    spike_threshold: float | None = Field(
        default=None,
        gt=0,
        description="robust standard deviations above the recent losses at which a loss is a spike, after which the "
        "run goes back as well; null = none is; 20 leaves ordinary noise alone",
    )
    spike_window_steps: int = Field(default=128, ge=8, description="recent losses that a loss is compared with")
    max_rewinds: int = Field(default=3, ge=0, description="times a run goes back to the same checkpoint before it ends")
    step_timeout_seconds: float | None = Field(
        default=None,
        gt=0,
        description="seconds without progress (a micro step, a validation, a save) after which the job ends with the "
        "stacks of all ranks; null = none",
    )
    validate_every_steps: PositiveInt | None = Field(default=None, description="steps between validations; null = none")
    validation_num_sequences: PositiveInt = Field(default=64, description="sequences of one validation")

    @model_validator(mode="after")
    def _one_length(self) -> "TrainSection":
        if (self.num_steps is None) == (self.num_tokens is None):
            raise ValueError("give either num_steps or num_tokens (the length in tokens), and null for the other")
        return self

    @model_validator(mode="after")
    def _ramp_is_whole(self) -> "TrainSection":
        if (self.initial_batch_size is None) != (self.batch_ramp_steps == 0):
            raise ValueError("a batch that grows needs both initial_batch_size and batch_ramp_steps")
        if self.initial_batch_size and self.global_batch_size % self.initial_batch_size:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} is not a multiple of initial_batch_size "
                f"{self.initial_batch_size}, in rises of which the batch grows"
            )
        return self

    @property
    def batches(self) -> Batches:
        return Batches(self.smallest_batch_size, self.global_batch_size, self.batch_ramp_steps)

    @property
    def smallest_batch_size(self) -> int:
        """Sequences of the first step, a divisor of those of every other."""
        return self.initial_batch_size or self.global_batch_size


class OptimizerSection(Section):
    """AdamW, whose defaults are the paper's, or Muon for the hidden matrices with AdamW for everything else."""

    name: Literal["adamw", "muon"] = Field(
        default="adamw", description="optimizer; muon is for the layers' matrices, beside adamw for all other weights"
    )
    learning_rate: float = Field(default=3e-4, gt=0, description="peak learning rate of adamw")
    muon_learning_rate: float = Field(default=0.02, gt=0, description="peak learning rate of muon's matrices")
    muon_momentum: Fraction = Field(default=0.95, description="decay of muon's momentum")
    beta1: Fraction = Field(default=0.9, description="decay of the first moment")
    beta2: Fraction = Field(default=0.98, description="decay of the second moment")
    epsilon: float = Field(default=1e-6, gt=0, description="added to the denominator")
    weight_decay: float = Field(
        default=0.01, ge=0, description="decoupled weight decay; not on norms, biases and embeddings"
    )


class ScheduleSection(Section):
    """Learning rate over the steps: linear warm-up, then a decay."""

    decay: Literal["polynomial", "cosine", "constant", "wsd"] = Field(
        default="polynomial",
        description="shape of the decay after the warm-up; wsd stays at the peak and decays over the last steps only",
    )
    power: float = Field(default=1.0, gt=0, description="power of the decay of polynomial and wsd; 1 is linear")
    decay_fraction: float = Field(default=0.2, gt=0, le=1, description="share of train.num_steps over which wsd decays")
    warmup_steps: int | None = Field(
        default=None, ge=0, description="steps of linear warm-up from 0; null = by warmup_tokens, 750 without those"
    )
    warmup_tokens: int | None = Field(
        default=None, ge=0, description="warm-up in tokens instead, rounded up to whole steps; null = by warmup_steps"
    )
    final_fraction: Fraction = Field(default=0.0, description="last learning rate as a share of the peak")

    @model_validator(mode="after")
    def _one_warmup(self) -> "ScheduleSection":
        if self.warmup_steps is not None and self.warmup_tokens is not None:
            raise ValueError("give either warmup_steps or warmup_tokens, and null for the other")
        return self


class ZeroSection(Section):
    """DeepSpeed's ZeRO: what is partitioned over the processes."""

    stage: Literal[0, 1, 2, 3] = Field(
        default=1, description="0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters"
    )
    offload_optimizer: bool = Field(default=False, description="keep optimizer state in CPU memory (GPU runs)")
    offload_parameters: bool = Field(default=False, description="keep partitioned parameters in CPU memory; stage 3")
    overlap_comm: bool = Field(default=True, description="overlap gradient reduction with the backward pass")


class CheckpointSection(Section):
    """When checkpoints are written and how many stay."""

    every_steps: PositiveInt = Field(default=1000, description="steps between checkpoints")
    keep_last: PositiveInt = Field(default=2, description="newest checkpoints that are kept")
    keep_every_steps: PositiveInt | None = Field(
        default=None, description="checkpoints at multiples of this step are kept for good; null = none"
    )
    in_background: bool = Field(
        default=True,
        description="train on while a copy in memory is written; false waits for each, and needs no memory for a copy",
    )


class MonitorSection(Section):
    """What is reported while training."""

    log_every_steps: PositiveInt = Field(default=10, description="steps between console lines")
    wandb_mode: Literal["online", "offline", "disabled"] = Field(
        default="offline", description="online sends to wandb, offline writes its files locally"
    )
    wandb_project: str = Field(default="lex-pretrain", description="wandb project")


class Config(Section):
    """The whole configuration of a training run."""

    run: RunSection
    data: DataSection
    model: ModelSection
    train: TrainSection
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    schedule: ScheduleSection = Field(default_factory=ScheduleSection)
    zero: ZeroSection = Field(default_factory=ZeroSection)
    checkpoint: CheckpointSection = Field(default_factory=CheckpointSection)
    monitor: MonitorSection = Field(default_factory=MonitorSection)
    deepspeed: dict[str, Any] = Field(
        default_factory=dict, description="raw DeepSpeed settings, merged into the derived ones"
    )

    @model_validator(mode="after")
    def _steps_and_batches_fit(self) -> "Config":
        faults = []
        micro, total = self.train.micro_batch_size, self.train.smallest_batch_size
        if micro is not None and total % micro:
            key = "initial" if self.train.initial_batch_size else "global"
            faults.append(f"train.{key}_batch_size {total} is not divisible by train.micro_batch_size {micro}")
        if self.train.precision == "bf16" and self.zero.stage == 0:
            faults.append(
                "train.precision bf16 needs zero.stage 1 to 3: without ZeRO, DeepSpeed trains bf16 weights directly "
                "and keeps no float32 ones, which small updates need"
            )
        if self.optimizer.name == "muon" and (
            (self.zero.stage, self.train.precision) != (1, "bf16") or self.zero.offload_optimizer
        ):
            faults.append(
                "optimizer.name muon needs zero.stage 1, train.precision bf16 and zero.offload_optimizer false: "
                "elsewhere DeepSpeed clips muon's finished updates, and not the gradients"
            )
        if self.zero.offload_parameters and self.zero.stage != 3:
            faults.append(
                f"zero.offload_parameters needs zero.stage 3, not {self.zero.stage}: below it every process computes "
                "with whole parameters"
            )
        if self.zero.offload_optimizer and self.zero.stage == 0:
            faults.append("zero.offload_optimizer needs zero.stage 1 to 3: without ZeRO, DeepSpeed offloads nothing")
        warmup = _as_given("schedule.warmup", self.schedule.warmup_tokens, self.warmup_steps)
        length = _as_given("train.num", self.train.num_tokens, self.num_steps)
        if self.train.batch_ramp_steps > self.num_steps:
            faults.append(f"train.batch_ramp_steps {self.train.batch_ramp_steps} is longer than {length}")
        if self.warmup_steps > self.num_steps:
            faults.append(f"{warmup} is longer than {length}")
        num_decay_steps = round(self.schedule.decay_fraction * self.num_steps)
        if self.schedule.decay == "wsd" and self.warmup_steps + num_decay_steps > self.num_steps:
            faults.append(
                f"{warmup} and the decay over {num_decay_steps} steps (schedule.decay_fraction) are more than {length}"
            )
        if faults:
            raise ValueError("; ".join(faults))
        return self

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step with the whole batch."""
        return self.train.global_batch_size * self.model.sequence_length

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run, also where its length is given in tokens."""
        return self.train.num_steps or self._steps_of(self.train.num_tokens or 0)

    @property
    def warmup_steps(self) -> int:
        """Steps of the warm-up, also where it is given in tokens."""
        if self.schedule.warmup_tokens is not None:
            return self._steps_of(self.schedule.warmup_tokens)
        return DEFAULT_WARMUP_STEPS if self.schedule.warmup_steps is None else self.schedule.warmup_steps

    def in_steps(self) -> "Config":
        """The same run with its length and warm-up in steps, however they were given."""
        train = self.train.model_copy(update={"num_steps": self.num_steps, "num_tokens": None})
        schedule = self.schedule.model_copy(update={"warmup_steps": self.warmup_steps, "warmup_tokens": None})
        return self.model_copy(update={"train": train, "schedule": schedule})

    def tokens_before(self, step: int) -> int:
        """Tokens of all steps before `step`, counted from 0."""
        return self.train.batches.before(step) * self.model.sequence_length

    def _steps_of(self, num_tokens: int) -> int:
        return self.train.batches.num_steps(-(-num_tokens // self.model.sequence_length))


def _as_given(key: str, num_tokens: int | None, num_steps: int) -> str:
    """How a length was given, for a message."""
    return f"{key}_steps {num_steps}" if num_tokens is None else f"{key}_tokens {num_tokens} ({num_steps} steps)"
