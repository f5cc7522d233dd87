"""The DeepSpeed dict of a run, made in one pure function from its config."""

import copy
from typing import Any

from lex_pretrain.config import Config
from lex_pretrain.errors import RequestError

# Keys of a user's `deepspeed:` section that would contradict ours, and what to set instead.
OWNED_KEYS = {
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "train.global_batch_size and train.micro_batch_size, which give it",
    "gradient_clipping": "train.gradient_clipping",
    "bf16": "train.precision",
    "fp16": "train.precision",
    "optimizer": "the optimizer section",
    "scheduler": "the schedule section",
    "zero_optimization.stage": "zero.stage",
    "zero_optimization.offload_optimizer": "zero.offload_optimizer",
    "zero_optimization.offload_param": "zero.offload_parameters",
}

# ZeRO++ (arXiv 2306.10209): its keys in `zero_optimization` with the values that leave it off.
PARTITIONS_KEY = "zero_hpz_partition_size"
QUANTIZED_KEYS = ("zero_quantized_weights", "zero_quantized_gradients")
ZERO_PLUS_PLUS_OFF: dict[str, int] = {PARTITIONS_KEY: 1, **dict.fromkeys(QUANTIZED_KEYS, False)}


def micro_batch_size(config: Config, world_size: int) -> int:
    """Sequences a forward pass on one process. RequestError when the global batch cannot be made of them."""
    total, micro = config.train.smallest_batch_size, config.train.micro_batch_size
    key = "train.initial_batch_size" if config.train.initial_batch_size else "train.global_batch_size"
    if total % world_size:
        divisors = [n for n in range(1, total + 1) if total % n == 0]
        raise RequestError(
            f"{key} {total} is not divisible by {world_size} processes; "
            f"process counts that fit: {', '.join(map(str, divisors))}"
        )
    share = total // world_size
    if micro is None:
        return share
    if share % micro:
        fitting = [n for n in range(1, share + 1) if share % n == 0]
        raise RequestError(
            f"train.micro_batch_size {micro} times {world_size} processes does not divide {key} "
            f"{total}; micro batch sizes that fit: {', '.join(map(str, fitting))}"
        )
    return micro


def trains_without_deepspeed_optimizer(config: Config) -> bool:
    """Whether DeepSpeed steps the optimizer that it is given as it is: then clipping and checking are that one's."""
    return config.zero.stage == 0 and config.train.precision == "fp32"


def make_deepspeed_config(config: Config, world_size: int, load_universal: bool = False) -> dict[str, Any]:
    """What `deepspeed.initialize` gets; `load_universal` for a run that begins from a universal checkpoint.

    Raises RequestError when the user's `deepspeed:` section sets a key that is ours.
    """
    micro = micro_batch_size(config, world_size)
    zero: dict[str, Any] = {"stage": config.zero.stage, "overlap_comm": config.zero.overlap_comm}
    if config.zero.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if config.zero.offload_parameters:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    derived: dict[str, Any] = {
        "train_batch_size": config.train.global_batch_size,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": config.train.global_batch_size // (micro * world_size),
        "gradient_clipping": 0.0 if trains_without_deepspeed_optimizer(config) else config.train.gradient_clipping,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": load_universal},
        "steps_per_print": 2**31,
        "wall_clock_breakdown": False,
    }
    if config.train.precision == "bf16":
        derived["bf16"] = {"enabled": True}
        # Micro batches and ranks are summed in float32, so that their number does not change the result.
        derived["data_types"] = {"grad_accum_dtype": "fp32"}
        derived["communication_data_type"] = "fp32"
    elif config.train.precision == "fp16":
        derived["fp16"] = {"enabled": True}
    faults = [
        f"deepspeed.{key} is derived from this config; set {instead}"
        for key, instead in OWNED_KEYS.items()
        if _has(config.deepspeed, key)
    ]
    faults += _zero_plus_plus_faults(config, world_size)
    merged = _merge(derived, config.deepspeed)
    sent_as = merged.get("communication_data_type") or config.train.precision
    if merged["zero_optimization"].get("zero_quantized_gradients") and sent_as != "fp16":
        # Its kernel takes whatever it is given for float16 (ds_swizzle_quant in csrc/quantization/pt_binding.cpp).
        faults.append(
            f"deepspeed.zero_optimization.zero_quantized_gradients would send wrong gradients: DeepSpeed 0.19 reads "
            f"them as fp16, and these are {sent_as}; leave it out, or set train.precision=fp16"
        )
    if faults:
        raise RequestError("\n".join(faults))
    return merged


def _zero_plus_plus_faults(config: Config, world_size: int) -> list[str]:
    """Why the ZeRO++ keys of a user's section cannot be met, where DeepSpeed would ignore them or fail late."""
    section = config.deepspeed.get("zero_optimization") or {}
    faults = [
        f"deepspeed.zero_optimization.{key} needs zero.stage 3, not {config.zero.stage}: it is about how partitioned "
        "parameters are gathered and their gradients reduced"
        for key, off in ZERO_PLUS_PLUS_OFF.items()
        if section.get(key, off) != off and config.zero.stage != 3
    ]
    size = section.get(PARTITIONS_KEY, 1)
    if not isinstance(size, int) or size < 1 or world_size % size:
        fitting = [n for n in range(1, world_size + 1) if world_size % n == 0]
        faults.append(
            f"deepspeed.zero_optimization.{PARTITIONS_KEY} {size} does not divide {world_size} processes; "
            f"sizes that fit: {', '.join(map(str, fitting))} (the number of GPUs of a host is meant)"
        )
    return faults


def _has(section: dict[str, Any], dotted_key: str) -> bool:
    node: Any = section
    for part in dotted_key.split("."):
        if not isinstance(node, dict) or part not in node:
            return False
        node = node[part]
    return True


def _merge(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(base)
    for key, value in extra.items():
        nested = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if nested else copy.deepcopy(value)
    return merged
