"""Memory of a process for weights, gradients and optimizer state under each placement of DeepSpeed, by formula.

"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (arXiv 1910.02054, section 3.1) counts 2 bytes
of weights, 2 of gradients and 12 of optimizer state a parameter, and divides by the number of processes what a stage
partitions (section 5). What is counted here is what DeepSpeed 0.19 holds for the settings of `deepspeed_config.py`,
which differs from the paper in three places. Gradients are summed in float32 where weights are bf16, so they take
4 bytes. Stage 1 in bf16 keeps those float32 sums whole, beside the bf16 gradients of the pass under way. Gradients
travel through buckets that are allocated at their full size, however small the model.

Checked against real engines for bf16 and fp32 in `tests/test_plan_engine.py`. For fp16, which needs a GPU, the
formulas follow DeepSpeed's code alone.
"""

from dataclasses import dataclass
from typing import Any

from lex_pretrain.config import Config
from lex_pretrain.errors import RequestError
from lex_pretrain.model.activations import BYTES_PER_ELEMENT
from lex_pretrain.model.parameters import ParameterTensor, parameter_tensors
from lex_pretrain.train.deepspeed_config import make_deepspeed_config
from lex_pretrain.train.room import MOMENTS_BYTES, elements_with_one_moment

_FP32_BYTES = 4
# DeepSpeed's own defaults, in elements: gradients reduced and weights gathered together, and those of stage 3.
_REDUCE_BUCKET = 500_000_000
_GATHER_BUCKET = 500_000_000
_PERSISTENCE_THRESHOLD = 100_000
_MAX_LIVE = 1_000_000_000
_MAX_REUSE_DISTANCE = 1_000_000_000
_SUB_GROUP = 1_000_000_000
# Elements to which the first address of a partition is aligned.
_ALIGNMENT = 2


@dataclass(frozen=True)
class Placement:
    """Which states are partitioned (ZeRO stage) and which live in host memory."""

    stage: int
    offload_optimizer: bool = False
    offload_parameters: bool = False


@dataclass(frozen=True)
class StateBytes:
    """Bytes of one process: on the device, except `host`.

    `buffers` are buckets and gathered parameters that exist during a pass, `step` what exists only between the last
    backward pass and the end of the optimizer step, when no activations are left.
    """

    weights: int
    gradients: int
    optimizer: int
    buffers: int
    step: int
    host: int = 0

    @property
    def held(self) -> int:
        """On the device from the first step to the last."""
        return self.weights + self.gradients + self.optimizer

    def peak(self, activations: int) -> int:
        """On the device at its fullest, with the bytes of a pass's activations."""
        return self.held + max(self.buffers + activations, self.step)


@dataclass(frozen=True)
class Settings:
    """What a config makes DeepSpeed hold: bytes of an element by use, and limits in elements.

    `secondary_group` processes share ZeRO++'s second copy of the weights; 1 is none. `with_one_moment` elements of all
    have Muon's one moment and not AdamW's two.
    """

    tensors: list[ParameterTensor]
    world_size: int
    precision: str
    weight_bytes: int
    sum_bytes: int
    message_bytes: int
    num_micro_steps: int
    num_buckets: int
    reduce_bucket: int
    persistence_threshold: int
    max_live: int
    max_reuse_distance: int
    sub_group: int
    gather_bucket: int
    secondary_group: int
    quantizes_weights: bool
    quantizes_gradients: bool
    with_one_moment: int

    @staticmethod
    def of(config: Config, world_size: int) -> "Settings":
        """Raises RequestError where the global batch does not fit the number of processes, or a raw key is unknown."""
        derived = make_deepspeed_config(config, world_size)
        zero: dict[str, Any] = derived["zero_optimization"]
        precision = config.train.precision
        return Settings(
            tensors=parameter_tensors(config.model),
            world_size=world_size,
            precision=precision,
            weight_bytes=BYTES_PER_ELEMENT[precision],
            sum_bytes=_bytes_of(derived, "data_types.grad_accum_dtype", precision),
            message_bytes=_bytes_of(derived, "communication_data_type", precision),
            num_micro_steps=derived["gradient_accumulation_steps"],
            num_buckets=2 if zero["overlap_comm"] else 1,
            reduce_bucket=int(zero.get("reduce_bucket_size", _REDUCE_BUCKET)),
            persistence_threshold=int(zero.get("stage3_param_persistence_threshold", _PERSISTENCE_THRESHOLD)),
            max_live=int(zero.get("stage3_max_live_parameters", _MAX_LIVE)),
            max_reuse_distance=int(zero.get("stage3_max_reuse_distance", _MAX_REUSE_DISTANCE)),
            sub_group=int(zero.get("sub_group_size", _SUB_GROUP)),
            gather_bucket=int(zero.get("allgather_bucket_size", _GATHER_BUCKET)),
            secondary_group=min(world_size, int(zero.get("zero_hpz_partition_size", 1))),
            quantizes_weights=bool(zero.get("zero_quantized_weights", False)),
            quantizes_gradients=bool(zero.get("zero_quantized_gradients", False)),
            with_one_moment=elements_with_one_moment(config),
        )

    @property
    def num_parameters(self) -> int:
        return sum(tensor.num_elements * tensor.num_tensors for tensor in self.tensors)

    @property
    def largest_tensor(self) -> int:
        return max(tensor.num_elements for tensor in self.tensors)

    @property
    def groups(self) -> tuple[int, int]:
        """Elements of the parameter groups: with and without weight decay."""
        decayed = sum(tensor.num_elements * tensor.num_tensors for tensor in self.tensors if tensor.decays)
        return decayed, self.num_parameters - decayed

    @property
    def flat_partition(self) -> int:
        """Elements that one process updates at stages 1 and 2, where each group is cut into equal parts."""
        return sum(_ALIGNMENT * -(-group // (_ALIGNMENT * self.world_size)) for group in self.groups)

    @property
    def tensor_partition(self) -> int:
        """Elements that one process updates at stage 3, where each tensor is cut into equal parts."""
        return sum(-(-tensor.num_elements // self.world_size) * tensor.num_tensors for tensor in self.tensors)

    @property
    def persistent_tensors(self) -> list[ParameterTensor]:
        """The small tensors that every process keeps whole at stage 3."""
        return [tensor for tensor in self.tensors if tensor.num_elements <= self.persistence_threshold]

    @property
    def persistent(self) -> int:
        """Elements of all of them."""
        return sum(tensor.num_elements * tensor.num_tensors for tensor in self.persistent_tensors)

    @property
    def secondary_partition(self) -> int:
        """Elements of ZeRO++'s second copy of the large tensors that one process keeps during a step at stage 3."""
        if self.secondary_group == 1:
            return 0
        return -(-(self.num_parameters - self.persistent) // self.secondary_group)

    @property
    def quantized_gradients(self) -> int:
        """Elements of the matrices whose gradients ZeRO++ can send in four bits: in two equal parts a process."""
        if not self.quantizes_gradients:
            return 0
        matrices = (tensor for tensor in self.tensors if len(tensor.shape) > 1)
        fitting = (tensor for tensor in matrices if tensor.num_elements % (2 * self.world_size) == 0)
        return sum(tensor.num_elements * tensor.num_tensors for tensor in fitting)

    @property
    def most_live(self) -> int:
        """Elements gathered at a time at stage 3."""
        return min(self.num_parameters - self.persistent, self.max_live)


def _bytes_of(derived: dict[str, Any], dotted_key: str, precision: str) -> int:
    """Size of an element in the number format that a DeepSpeed key names; in that of the weights where it does not."""
    node: Any = derived
    for part in dotted_key.split("."):
        node = (node or {}).get(part)
    if (name := node or precision) not in BYTES_PER_ELEMENT:
        raise RequestError(f"deepspeed.{dotted_key} {name} is unknown here; known: {', '.join(BYTES_PER_ELEMENT)}")
    return BYTES_PER_ELEMENT[name]


def state_bytes(settings: Settings, placement: Placement) -> StateBytes:
    """What one process holds. ValueError for a placement that DeepSpeed or this program does not have."""
    if placement.offload_parameters and placement.stage != 3:
        raise ValueError("parameters are offloaded at ZeRO stage 3 only")
    match placement.stage:
        case 0:
            return _replicated(settings)
        case 1 | 2:
            return _partitioned_optimizer(settings, placement)
        case _:
            return _partitioned_parameters(settings, placement)


def _replicated(settings: Settings) -> StateBytes:
    """Stage 0: every process holds everything; fp16 weights have float32 copies."""
    number, element = settings.num_parameters, settings.weight_bytes
    bucket = min(number, settings.reduce_bucket + settings.largest_tensor)
    master = _FP32_BYTES if element < _FP32_BYTES else 0
    return StateBytes(
        weights=element * number,
        gradients=element * number,
        optimizer=(master + MOMENTS_BYTES) * number,
        buffers=0,
        # The bucket under reduction is a copy; the update of fp16 weights takes all gradients in float32.
        step=max(element * bucket, master * number),
    )


def _partitioned_optimizer(settings: Settings, placement: Placement) -> StateBytes:
    """Stages 1 and 2: whole weights, float32 weights and moments of the own partition."""
    own, element, sums = settings.flat_partition, settings.weight_bytes, settings.sum_bytes
    whole = own * settings.world_size
    optimizer = (_FP32_BYTES + MOMENTS_BYTES) * own
    optimizer -= MOMENTS_BYTES // 2 * -(-settings.with_one_moment // settings.world_size)
    buckets = settings.num_buckets * settings.reduce_bucket
    if placement.stage == 2:
        gradients, buffers = sums * own, element * buckets
        step = 0 if sums > element else _FP32_BYTES * own
    elif settings.precision == "bf16" and sums > element and not placement.offload_optimizer:
        # DeepSpeed's BF16_Optimizer: sums are one flat tensor a group, and messages are copies of it.
        gradients, buffers = sums * whole + element * settings.num_parameters, 0
        step = _message_copies(settings)
    else:
        gradients = element * settings.num_parameters + (sums * settings.num_parameters if sums > element else 0)
        buffers = sums * buckets
        step = max(0, (sums + _FP32_BYTES) * own - gradients)
    if not placement.offload_optimizer:
        return StateBytes(element * whole, gradients, optimizer, buffers, step)
    # On the host: the optimizer's state, its gradients, new weights under way, sums over micro batches, one tensor.
    accumulated = _FP32_BYTES * own if settings.num_micro_steps > 1 else 0
    one_tensor = element * settings.largest_tensor
    host = optimizer + (_FP32_BYTES + element) * own + accumulated + one_tensor
    on_device = gradients if placement.stage == 1 else 0
    return StateBytes(element * whole, on_device, 0, buffers + one_tensor, step=0, host=host)


def _message_copies(settings: Settings) -> int:
    """Copies of the float32 sums under reduction: joined groups, unless one fills a bucket alone, and what is sent."""
    decayed, undecayed = settings.groups
    converted = settings.message_bytes if settings.message_bytes != settings.sum_bytes else 0
    if decayed > settings.reduce_bucket:
        return converted * max(decayed, undecayed)
    return (settings.sum_bytes + converted) * (decayed + undecayed)


def _partitioned_parameters(settings: Settings, placement: Placement) -> StateBytes:
    """Stage 3: partitions of everything, small tensors whole, and what is gathered for the layers at work."""
    own, element, sums = settings.tensor_partition, settings.weight_bytes, settings.sum_bytes
    optimizer = (_FP32_BYTES + MOMENTS_BYTES) * own
    # A process alone uses its partitions as they are, unless they must come from the host.
    gathers = settings.world_size > 1 or placement.offload_parameters
    weights, persistent = element * own, element * settings.persistent if gathers else 0
    persistent += element * settings.secondary_partition
    buffers = element * (settings.reduce_bucket + (settings.most_live if gathers else 0))
    if not placement.offload_optimizer:
        step = _FP32_BYTES * min(own, settings.sub_group)
        if not placement.offload_parameters:
            return StateBytes(weights + persistent, sums * own, optimizer, buffers, step)
        return StateBytes(persistent, sums * own, optimizer, buffers, step, host=weights)
    host = optimizer + (sums + _FP32_BYTES) * own
    if placement.offload_parameters:
        return StateBytes(persistent, 0, 0, buffers, step=0, host=host + weights)
    return StateBytes(weights + persistent, 0, 0, buffers, step=0, host=host)
