"""Run by tests/test_robustness.py on two processes: at each ZeRO stage, a gradient of one rank is infinite at one step.

Prints a JSON object on rank 0: what each step reported, digests of weights and optimizer state, to be compared with
those of a run that leaves the step out, and whether the state is found finite, before and after one rank's is spoiled.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from lex_pretrain.config import Config
from lex_pretrain.config_io import load_config
from lex_pretrain.data.loader import Loader, open_sources
from lex_pretrain.ending import leave
from lex_pretrain.ranks import Ranks, gather_lists
from lex_pretrain.train import trainer
from lex_pretrain.train.distributed import init_distributed
from lex_pretrain.train.finite import state_is_finite
from lex_pretrain.train.trainer import Trainer, resolve_vocab_size

CASES = (
    *(("adamw", "fp32", stage) for stage in (0, 1, 2, 3)),
    *(("adamw", "bf16", stage) for stage in (1, 2, 3)),
    ("muon", "bf16", 1),
)
NUM_STEPS = 5
BAD_STEP, BAD_MICRO_STEP, BAD_RANK = 2, 1, 1


def infinite_at(backward: int) -> Callable[[torch.Tensor], torch.Tensor | None]:
    """A gradient hook that makes one element infinite at one backward pass, counted from 0."""
    passes: Iterator[int] = iter(range(10**6))

    def spoil(gradient: torch.Tensor) -> torch.Tensor | None:
        if next(passes) != backward:
            return None
        spoiled = gradient.clone()
        spoiled.view(-1)[3] = float("inf")
        return spoiled

    return spoil


def optimizer_tensors(made: Trainer) -> list[torch.Tensor]:
    """The float32 weights that this rank updates, and its moments and step counters."""
    state = made.engine.basic_optimizer.state.items()
    values = [value for parameter, values in state for value in (parameter, *values.values())]
    return [value.detach() for value in values if isinstance(value, torch.Tensor)]


def digest(made: Trainer) -> str:
    tensors = [*optimizer_tensors(made), *(parameter.detach() for parameter in made.decoder.parameters())]
    parts = [tensor.float().numpy().tobytes() for tensor in tensors]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def finite_until_spoiled(made: Trainer, ranks: Ranks) -> list[bool]:
    """Whether the state is finite, then with one element of each kind of tensor spoiled on one rank in turn."""
    found = [state_is_finite(made.engine)]
    for tensor in [tensor for tensor in optimizer_tensors(made) if tensor.numel() > 1][:3]:
        kept = tensor.flatten()[0].item()
        if ranks.rank == BAD_RANK:
            tensor.flatten()[0] = float("nan")
        found.append(state_is_finite(made.engine))
        tensor.flatten()[0] = kept
    return found


def run(config: Config, ranks: Ranks, steps: list[int], backward: int | None) -> dict[str, Any]:
    """Train these steps, with the gradient of one weight spoiled at a backward pass of one rank."""
    datasets = open_sources(config.data, split="train")
    config = resolve_vocab_size(config, datasets[0].manifest.tokenizer.vocab_size)
    make_engine = trainer.make_engine

    def make_spoiled_engine(*arguments: Any) -> Any:
        decoder, engine = make_engine(*arguments)
        if backward is not None and ranks.rank == BAD_RANK:
            list(decoder.parameters())[5].register_hook(infinite_at(backward))
        return decoder, engine

    trainer.make_engine = make_spoiled_engine
    made = Trainer(config, ranks, Loader(datasets, [1.0], config.model.sequence_length, 1), load_universal=False)
    trainer.make_engine = make_engine
    results = [made.train_step(step, step * config.train.global_batch_size, False) for step in steps]
    faults = [[fault.rank, fault.micro_step, fault.what] for result in results for fault in result.faults]
    mine = {
        "skipped": [result.skipped for result in results],
        "faults": faults,
        "digest": digest(made),
        "finite": finite_until_spoiled(made, ranks),
    }
    everyone = gather_lists([mine], ranks)
    return {key: [report[key] for report in everyone] for key in mine}


def main() -> None:
    config = load_config(Path(sys.argv[1]))
    ranks = init_distributed()
    found = {}
    for optimizer, precision, stage in CASES:
        sections = {
            "optimizer": config.optimizer.model_copy(update={"name": optimizer}),
            "train": config.train.model_copy(update={"precision": precision}),
            "zero": config.zero.model_copy(update={"stage": stage}),
        }
        case = config.model_copy(update=sections)
        num_micro_steps = case.train.global_batch_size // ((case.train.micro_batch_size or 1) * ranks.world_size)
        steps = list(range(NUM_STEPS))
        spoiled = run(case, ranks, steps, backward=BAD_STEP * num_micro_steps + BAD_MICRO_STEP)
        left_out = run(case, ranks, [step for step in steps if step != BAD_STEP], backward=None)
        found[f"{optimizer} {precision} stage {stage}"] = {"spoiled": spoiled, "left out": left_out}
    if ranks.rank == 0:
        print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main()
    leave(0)
