"""Every setting of a run: typed, described, validated, frozen.

Units are in the names; `null` means that the value is derived, as its description says.
"""

import os
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from lex_pretrain.batches import Batches
from lex_pretrain.model_config import Fraction, ModelSection, PositiveInt, Section

# A folder's name as a shell would read it: YAML and `KEY=~/...` reach us with the tilde still in it.
FolderName = Annotated[str, AfterValidator(os.path.expanduser)]
Precision = Literal["bf16", "fp16", "fp32"]

DEFAULT_WARMUP_STEPS = 750


class RunSection(Section):
    """Where a run writes and what seeds it."""

    output_dir: FolderName = Field(description="folder that receives config.yaml, metrics.jsonl and checkpoints/")
    seed: int = Field(default=1, ge=0, lt=2**63, description="seed of the initial weights, the data order and dropout")


class SourceSection(Section):
    """One dataset of a mixture."""

    path: FolderName = Field(description="dataset folder made by `lex-pretrain prepare`")
    weight: float = Field(default=1.0, gt=0, description="share of the samples, relative to the other weights")


class DataSection(Section):
    """What to train on: one dataset folder, or several with weights."""

    path: FolderName | None = Field(default=None, description="one dataset folder made by `lex-pretrain prepare`")
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
        description="train on while a copy in memory is written; false waits for the disk, with a copy of the weights "
        "on rank 0 alone",
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
