"""The decoder and the DeepSpeed engine that trains it."""

from typing import Any

import torch

from lex_pretrain.config import Config
from lex_pretrain.data.order import derive_key
from lex_pretrain.errors import RequestError
from lex_pretrain.model.decoder import Decoder
from lex_pretrain.model.init import initialize
from lex_pretrain.ranks import Ranks
from lex_pretrain.train.deepspeed_config import (
    QUANTIZED_KEYS,
    make_deepspeed_config,
    trains_without_deepspeed_optimizer,
)
from lex_pretrain.train.distributed import quiet_deepspeed
from lex_pretrain.train.finite import CheckedAdamW
from lex_pretrain.train.loss import NextTokenLoss, parameter_groups


def check_operations(config: Config) -> None:
    """Raises RequestError when DeepSpeed has an operation that the config asks for on GPUs only."""
    section = config.deepspeed.get("zero_optimization") or {}
    if torch.cuda.is_available():
        return
    if quantized := [key for key in QUANTIZED_KEYS if section.get(key)]:
        raise RequestError(
            f"deepspeed.zero_optimization.{quantized[0]} needs a GPU: DeepSpeed quantises messages on no CPU; remove it"
        )


def make_engine(config: Config, ranks: Ranks, load_universal: bool, eod_id: int) -> tuple[Decoder, Any]:
    """The decoder and the DeepSpeed engine around it, with the same initial weights on every rank."""
    import deepspeed

    settings = make_deepspeed_config(config, ranks.world_size, load_universal)
    torch.manual_seed(derive_key(config.run.seed, "initial weights"))
    partitioned = config.zero.stage == 3
    with deepspeed.zero.Init(config_dict_or_path=settings, enabled=partitioned):
        decoder = Decoder(config.model, config.train.activation_checkpointing, initialize_weights=False)
    initialize(
        decoder,
        config.model,
        lambda whole: deepspeed.zero.GatheredParameters(whole, modifier_rank=0, enabled=partitioned),
    )
    if config.train.compile_layers:
        decoder.compile_layers()
    module = NextTokenLoss(decoder, config.train.z_loss, eod_id if config.train.separate_documents else None)
    groups = parameter_groups(module, config.optimizer.weight_decay)
    optimizer_class: Any = torch.optim.AdamW
    options: dict[str, Any] = {"fused": True}
    if trains_without_deepspeed_optimizer(config):
        optimizer_class = CheckedAdamW
        options["max_norm"] = config.train.gradient_clipping
    elif config.zero.offload_optimizer:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer_class, options = DeepSpeedCPUAdam, {"adamw_mode": True}
    optimizer = optimizer_class(
        groups,
        lr=config.optimizer.learning_rate,
        betas=(config.optimizer.beta1, config.optimizer.beta2),
        eps=config.optimizer.epsilon,
        **options,
    )
    with quiet_deepspeed():
        engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
    return decoder, engine
