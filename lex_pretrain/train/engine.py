"""The decoder and the DeepSpeed engine that trains it."""

import contextlib
from collections.abc import Iterator
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
from lex_pretrain.train.loss import NextTokenLoss, hidden_matrices, parameter_groups


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
    with quiet_deepspeed():
        engine, *_ = deepspeed.initialize(model=module, optimizer=make_optimizer(config, module), config=settings)
    return decoder, engine


def make_optimizer(config: Config, module: NextTokenLoss) -> torch.optim.Optimizer:
    """The optimizer that DeepSpeed is given, over all parameters of `module`."""
    groups = parameter_groups(module, config.optimizer.weight_decay)
    if config.optimizer.name == "muon":
        return _make_muon(config, module, groups)
    optimizer_class: Any = torch.optim.AdamW
    options: dict[str, Any] = {"fused": True}
    if trains_without_deepspeed_optimizer(config):
        optimizer_class = CheckedAdamW
        options["max_norm"] = config.train.gradient_clipping
    elif config.zero.offload_optimizer:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        optimizer_class, options = DeepSpeedCPUAdam, {"adamw_mode": True}
    optimizer: torch.optim.Optimizer = optimizer_class(groups, **_adamw_settings(config), **options)
    if config.zero.offload_optimizer:
        optimizer.register_step_pre_hook(_take_powers_anew)
    return optimizer


def _take_powers_anew(optimizer: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Make the bias correction of DeepSpeed's CPU Adam depend on the step alone, as a resumed run needs it.

    DeepSpeed 0.19 takes beta^step as a running product where steps follow on each other and by `pow` elsewhere, as
    after a load or a change of betas (`IncrementStep` in csrc/includes/cpu_adam.h); the last digits differ.
    """
    nothing = [torch.zeros(1) for _ in range(4)]
    optimizer.ds_opt_adam.adam_update(optimizer.opt_id, 1, 0.0, 0.5, 0.5, 1.0, 0.0, True, *nothing)


@contextlib.contextmanager
def optimizer_kept(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep an optimizer as this run made it while DeepSpeed 0.19 loads a checkpoint into it; only its state changes.

    A checkpoint brings the groups of the optimizer that saved it, which lack settings that this one needs where only
    one of the two is offloaded; a universal one gives all groups those of the first, weight decay among them. Steps
    come as a number or a tensor, as that optimizer counts, or as one tensor that all parameters would count up.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    yield
    for group, kept in zip(optimizer.param_groups, settings, strict=True):
        group.update(kept)
    for parameter, state in optimizer.state.items():
        if "step" in state:
            step = int(state["step"])
            is_number = isinstance(optimizer, DeepSpeedCPUAdam)
            state["step"] = step if is_number else torch.tensor(float(step), device=parameter.device)


def _adamw_settings(config: Config) -> dict[str, Any]:
    settings = config.optimizer
    return {"lr": settings.learning_rate, "betas": (settings.beta1, settings.beta2), "eps": settings.epsilon}


def _make_muon(config: Config, module: NextTokenLoss, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """DeepSpeed's Muon (https://kellerjordan.github.io/posts/muon) with torch's AdamW for what is no hidden matrix."""
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    hidden = hidden_matrices(module.decoder)
    for parameter in module.parameters():
        parameter.use_muon = parameter in hidden  # type: ignore[attr-defined]
    matrices = {"lr": config.optimizer.muon_learning_rate, "momentum": config.optimizer.muon_momentum}
    split: list[dict[str, Any]] = []
    for group in groups:
        for use_muon, settings in ((True, matrices), (False, _adamw_settings(config))):
            parameters = [parameter for parameter in group["params"] if (parameter in hidden) == use_muon]
            if parameters:
                split.append({**settings, **group, "params": parameters, "use_muon": use_muon})
    muon: torch.optim.Optimizer = MuonWithAuxAdam(split, torch.optim.AdamW, {"fused": True})
    return muon
