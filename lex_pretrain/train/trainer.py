"""The engine with its data, and what one step does."""

import logging
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed

from lex_pretrain.config import Config, Precision
from lex_pretrain.data.loader import Loader
from lex_pretrain.data.order import derive_key
from lex_pretrain.errors import RequestError, SharedJobError
from lex_pretrain.hardware import device_of_rank
from lex_pretrain.ranks import Ranks
from lex_pretrain.train.engine import make_engine
from lex_pretrain.train.finite import GRADIENT, LOSS, GradientWatch, spread_fault
from lex_pretrain.train.schedule import learning_rate
from lex_pretrain.train.watchdog import Watchdog

logger = logging.getLogger("lex_pretrain")


@dataclass(frozen=True)
class Fault:
    """A loss or a gradient of one rank that is not finite."""

    rank: int
    micro_step: int
    what: str


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step reports, equal on all ranks."""

    loss: float
    grad_norm: float
    learning_rate: float
    skipped: bool
    stop_requested: bool
    save_is_written: bool
    faults: tuple[Fault, ...] = ()

    def is_non_finite(self, precision: Precision) -> bool:
        """Whether a step was left out for a number that is not finite; in fp16 most often the loss scale was tried."""
        return bool(self.faults) or (self.skipped and precision != "fp16")


class Trainer:
    """The engine with its data: everything that a step needs."""

    def __init__(self, config: Config, ranks: Ranks, loader: Loader, load_universal: bool) -> None:
        self.config = config
        self.ranks = ranks
        self.device = device_of_rank(ranks.local_rank)
        self.loader = loader
        self.load_universal = load_universal
        eod_id = loader.datasets[0].manifest.tokenizer.eod_id
        self.decoder, self.engine = make_engine(config, ranks, load_universal, eod_id)
        self._muon_ratio = config.optimizer.muon_learning_rate / config.optimizer.learning_rate
        self.watchdog = Watchdog(ranks, config.train.step_timeout_seconds)
        self.gradients = GradientWatch(self.engine.module)
        self.micro_batch_size = int(self.engine.train_micro_batch_size_per_gpu())

    def train_step(
        self, step: int, first_sample: int, stop_requested: bool, save_is_written: bool = False
    ) -> StepResult:
        """One optimizer step over a global batch of samples from `first_sample` on.

        The result says whether any rank was asked to stop, and whether all have written their part of a checkpoint.
        Where a loss or gradient of any rank is not finite, no rank's weights or optimizer state change.
        """
        rate = learning_rate(step, self.config)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate * self._muon_ratio if group.get("use_muon") else rate
        self.engine.set_train_batch_size(self.config.train.batches.size(step))
        # DeepSpeed counts micro steps through the run, and would end this step early where the last one had others.
        self.engine.micro_steps = 0
        num_micro_steps = int(self.engine.gradient_accumulation_steps())
        self.engine.train()
        losses, gradients = [], []
        for micro_step in range(num_micro_steps):
            self._seed_dropout(step, micro_step)
            self.watchdog.progress(f"reading the samples of step {step + 1}, micro step {micro_step}")
            samples = self.samples(first_sample, micro_step, self.ranks.rank)
            tokens, next_tokens = self.loader.micro_batch(samples, self.device)
            self.watchdog.progress(f"computing step {step + 1}, micro step {micro_step}")
            loss = self.engine(tokens, next_tokens)
            self.engine.backward(spread_fault(loss))
            self.engine.step()
            losses.append(loss.detach().double())
            gradients.append(self.gradients.take().to(self.device).double())
        applied = bool(self.engine.was_step_applied())
        flags = torch.tensor([stop_requested, save_is_written], device=self.device, dtype=torch.float64)
        mine = torch.cat([torch.stack([*losses, *gradients]), flags])
        self.watchdog.progress(f"sharing the loss of step {step + 1}")
        # One exchange carries what all ranks must agree on: the mean loss, what is not finite, and the flags.
        everyone = [torch.empty_like(mine) for _ in range(self.ranks.world_size)]
        torch.distributed.all_gather(everyone, mine)
        reports = torch.stack(everyone).tolist()
        faults = self._faults(reports, num_micro_steps)
        if faults and applied:
            raise SharedJobError(
                f"step {step + 1}: the {faults[0].what} of rank {faults[0].rank} is not finite, and the weights were "
                "updated all the same: a setting in the deepspeed section keeps DeepSpeed from checking. "
                "Remove it and run the same command again"
            )
        return StepResult(
            loss=sum(sum(report[:num_micro_steps]) for report in reports) / (len(reports) * num_micro_steps),
            grad_norm=float(self.engine.get_global_grad_norm() or 0.0),
            learning_rate=rate,
            skipped=not applied,
            stop_requested=any(report[-2] for report in reports),
            save_is_written=all(report[-1] for report in reports),
            faults=faults,
        )

    def samples(self, first_sample: int, micro_step: int, rank: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Global sample indices of a rank's micro batch. Which rank takes which never changes the set of a step."""
        first = first_sample + (micro_step * self.ranks.world_size + rank) * self.micro_batch_size
        return np.arange(first, first + self.micro_batch_size, dtype=np.int64)

    def _faults(self, reports: list[list[float]], num_micro_steps: int) -> tuple[Fault, ...]:
        """Each rank's first loss or gradient that is not finite."""
        faults = []
        for rank, report in enumerate(reports):
            for micro_step in range(num_micro_steps):
                loss, gradient = report[micro_step], report[num_micro_steps + micro_step]
                what = LOSS if not math.isfinite(loss) else GRADIENT if not math.isfinite(gradient) else None
                # In fp16 gradients go beyond its range whenever the loss scale is tried higher.
                if what == LOSS or (what == GRADIENT and self.config.train.precision != "fp16"):
                    faults.append(Fault(rank, micro_step, what))
                    break
        return tuple(faults)

    def _seed_dropout(self, step: int, micro_step: int) -> None:
        if self.config.model.dropout > 0:
            key = derive_key(self.config.run.seed, "dropout", step, micro_step, self.ranks.rank)
            torch.manual_seed(key)


def resolve_vocab_size(config: Config, data_vocab_size: int) -> Config:
    """The config with the data's vocabulary. RequestError when it names a smaller one."""
    vocab_size = config.model.vocab_size
    if vocab_size is not None and vocab_size < data_vocab_size:
        raise RequestError(
            f"model.vocab_size {vocab_size} is smaller than the {data_vocab_size} pieces of the data's tokenizer"
        )
    model = config.model.model_copy(update={"vocab_size": vocab_size or data_vocab_size})
    return config.model_copy(update={"model": model})
