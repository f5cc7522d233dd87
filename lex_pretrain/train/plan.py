"""What a run takes before it is started: memory, floating-point operations, traffic, disk and time, from its config.

A pure function of the config: nothing is built, no device and no data are needed, and neither torch nor DeepSpeed is
imported.
"""

from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from lex_pretrain.config import Config
from lex_pretrain.data.manifest import Manifest
from lex_pretrain.errors import RequestError
from lex_pretrain.model.activations import activation_bytes
from lex_pretrain.model.flops import training_flops_per_token
from lex_pretrain.train.deepspeed_config import micro_batch_size
from lex_pretrain.train.memory import Placement, Settings, state_bytes
from lex_pretrain.train.room import checkpoint_bytes, copied_bytes
from lex_pretrain.train.traffic import Links, step_traffic

# Every placement, from the cheapest to run to the dearest as long as messages cost the same.
PLACEMENTS = (
    *(Placement(stage) for stage in (0, 1, 2, 3)),
    *(Placement(stage, offload_optimizer=True) for stage in (1, 2, 3)),
    Placement(3, offload_optimizer=True, offload_parameters=True),
)
# Of a GPU's memory; the rest is for CUDA, NCCL and fragmentation, which no formula here counts.
USABLE_SHARE = 0.9
# Eight H100s a host: NVLink's 450 GB/s in one direction, and a network card of 400 Gb/s each.
DEFAULT_LINKS = Links(devices_per_host=8, device_bytes_per_second=450e9, network_bytes_per_second=400e9)
_SECONDS_PER_DAY = 86_400


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PlacementPlan(Record):
    """Bytes of one process at its peak, what it sends in one optimizer step, and what its host sends to others.

    `cpu_peak_bytes` is the peak of a process on a CPU, whose memory is taken as it is written: no bucket is filled
    beyond the model's gradients. `copied_bytes` of host memory a save takes until it is written, `first_copied_bytes`
    in the first process.
    `communication_seconds` is the time of that alone. Efficiency is the share of a step that is computation: `best` if
    messages travel while devices compute, `worst` if these wait for them.
    """

    zero_stage: int
    offload_optimizer: bool
    offload_parameters: bool
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    buffers_bytes: int
    peak_bytes: int
    cpu_peak_bytes: int
    host_bytes: int
    copied_bytes: int
    first_copied_bytes: int
    sent_bytes_per_step: int
    network_bytes_per_step: int
    communication_seconds: float
    best_efficiency: float
    worst_efficiency: float
    checkpoint_bytes: int
    is_configured: bool
    fits: bool | None

    @property
    def name(self) -> str:
        if self.offload_parameters:
            return f"{self.zero_stage} offload {'all' if self.offload_optimizer else 'parameters'}"
        return f"{self.zero_stage}{' offload' if self.offload_optimizer else ''}"


class Plan(Record):
    """The whole plan; `placements` are all that the config's precision and optimizer allow."""

    num_parameters: int
    world_size: int
    precision: str
    micro_batch_size: int
    num_micro_steps: int
    tokens_per_step: int
    num_steps: int
    activation_checkpointing: int
    activation_bytes: int
    flops_per_step: float
    peak_tflops: float
    mfu: float
    step_seconds: float
    days: float
    num_checkpoints_kept: int
    gpu_memory_bytes: int | None
    usable_share: float
    cheapest_that_fits: int | None
    placements: tuple[PlacementPlan, ...]


def make_plan(
    config: Config,
    world_size: int,
    mfu: float,
    peak_tflops: float,
    gpu_memory_gib: float | None,
    links: Links = DEFAULT_LINKS,
) -> Plan:
    """Plan `config` on `world_size` processes of one device each.

    `mfu` is the share of `peak_tflops` (10^12 operations a second of one device) that the model's own operations
    reach; recomputed activations are no part of them. `cheapest_that_fits` is an index into `placements`: the one
    that keeps most on the device, then the one that sends least. Raises RequestError when the vocabulary is open or
    the global batch does not fit the number of processes.
    """
    config = with_vocabulary(config)
    settings = Settings.of(config, world_size)
    filled = replace(settings, reduce_bucket=min(settings.reduce_bucket, settings.num_parameters))
    micro = micro_batch_size(config, world_size)
    activations = activation_bytes(config, micro).peak
    gpu_memory = None if gpu_memory_gib is None else int(gpu_memory_gib * 2**30)
    configured = _configured(config)
    tokens_per_step = config.tokens_per_step
    flops_per_step = training_flops_per_token(config.model) * tokens_per_step
    step_seconds = flops_per_step / (world_size * peak_tflops * 1e12 * mfu)
    placements = []
    for placement in dict.fromkeys((*PLACEMENTS, configured)):
        if placement.stage == 0 and config.train.precision == "bf16":
            continue  # Config refuses it: DeepSpeed would keep no float32 weights.
        if config.optimizer.name == "muon" and placement != configured:
            continue  # Config allows one placement.
        states = state_bytes(settings, placement)
        peak = states.peak(activations)
        traffic = step_traffic(settings, placement.stage, links.devices_per_host)
        communication = traffic.seconds(world_size, links)
        first_copied, copied = copied_bytes(config, placement.stage, world_size)
        placements.append(
            PlacementPlan(
                zero_stage=placement.stage,
                offload_optimizer=placement.offload_optimizer,
                offload_parameters=placement.offload_parameters,
                weights_bytes=states.weights,
                gradients_bytes=states.gradients,
                optimizer_bytes=states.optimizer,
                buffers_bytes=states.buffers,
                peak_bytes=peak,
                cpu_peak_bytes=state_bytes(filled, placement).peak(activations),
                host_bytes=states.host,
                copied_bytes=copied,
                first_copied_bytes=first_copied,
                sent_bytes_per_step=traffic.sent_bytes,
                network_bytes_per_step=traffic.network_bytes(world_size, links),
                communication_seconds=communication,
                best_efficiency=step_seconds / max(step_seconds, communication),
                worst_efficiency=step_seconds / (step_seconds + communication),
                checkpoint_bytes=checkpoint_bytes(config, placement.stage),
                is_configured=placement == configured,
                fits=None if gpu_memory is None else peak <= USABLE_SHARE * gpu_memory,
            )
        )
    return Plan(
        num_parameters=settings.num_parameters,
        world_size=world_size,
        precision=config.train.precision,
        micro_batch_size=micro,
        num_micro_steps=settings.num_micro_steps,
        tokens_per_step=tokens_per_step,
        num_steps=config.num_steps,
        activation_checkpointing=config.train.activation_checkpointing,
        activation_bytes=activations,
        flops_per_step=flops_per_step,
        peak_tflops=peak_tflops,
        mfu=mfu,
        step_seconds=step_seconds,
        days=step_seconds * config.tokens_before(config.num_steps) / tokens_per_step / _SECONDS_PER_DAY,
        num_checkpoints_kept=_num_checkpoints_kept(config),
        gpu_memory_bytes=gpu_memory,
        usable_share=USABLE_SHARE,
        cheapest_that_fits=_cheapest(placements),
        placements=tuple(placements),
    )


def with_vocabulary(config: Config) -> Config:
    """The config with the vocabulary of its dataset where it names none. RequestError when there is none either."""
    if config.model.vocab_size is not None:
        return config
    folder = Path(config.data.resolved_sources[0].path)
    try:
        vocab_size = Manifest.load(folder).tokenizer.vocab_size
    except RequestError as error:
        raise RequestError(
            f"model.vocab_size is null, and the dataset cannot give it: {error}. "
            "Name it to plan without data, for example model.vocab_size=32000"
        ) from error
    return config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": vocab_size})})


def _configured(config: Config) -> Placement:
    return Placement(config.zero.stage, config.zero.offload_optimizer, config.zero.offload_parameters)


def _num_checkpoints_kept(config: Config) -> int:
    """At the end of the run, with the one that is being written beside those that `checkpoint` keeps."""
    settings = config.checkpoint
    saves = -(-config.num_steps // settings.every_steps)
    for_good = config.num_steps // settings.keep_every_steps if settings.keep_every_steps else 0
    return min(saves, settings.keep_last + 1 + for_good)


def _cheapest(placements: list[PlacementPlan]) -> int | None:
    fitting = [index for index, placement in enumerate(placements) if placement.fits]

    def cost(index: int) -> tuple[int, int]:
        placement = placements[index]
        return placement.offload_optimizer + placement.offload_parameters, placement.sent_bytes_per_step

    return min(fitting, key=cost, default=None)
