"""One training run: what a step does, and the loop over steps."""

import logging
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed

from lex_pretrain.config import Config, Precision
from lex_pretrain.config_io import save_config
from lex_pretrain.data.loader import Loader, mixture_weights, open_sources
from lex_pretrain.data.order import derive_key
from lex_pretrain.errors import JobError, RequestError, StoppedError
from lex_pretrain.hardware import check_precision, device_of_rank, measure_matmul_flops
from lex_pretrain.model.flops import training_flops_per_token
from lex_pretrain.model.loading import CONFIG_FILE, TOKENIZER_FILE
from lex_pretrain.monitor.metrics import StepMetrics
from lex_pretrain.monitor.monitor import Monitor
from lex_pretrain.ranks import Ranks, leave_process_group
from lex_pretrain.train.checkpoint import Checkpoints, TrainState
from lex_pretrain.train.distributed import init_distributed
from lex_pretrain.train.engine import make_engine
from lex_pretrain.train.finite import GRADIENT, LOSS, GradientWatch, spread_fault
from lex_pretrain.train.resume import check_same_run, find_start
from lex_pretrain.train.schedule import learning_rate
from lex_pretrain.train.stop import StopRequest
from lex_pretrain.train.validation import Validation

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
        eod_id = loader.datasets[0].manifest.tokenizer.eod_id
        self.decoder, self.engine = make_engine(config, ranks, load_universal, eod_id)
        self.gradients = GradientWatch(self.engine.module)
        self.micro_batch_size = int(self.engine.train_micro_batch_size_per_gpu())
        self.num_micro_steps = int(self.engine.gradient_accumulation_steps())

    def train_step(self, step: int, stop_requested: bool) -> StepResult:
        """One optimizer step over the global batch of samples step * G .. (step + 1) * G - 1.

        Where a loss or gradient of any rank is not finite, no rank's weights or optimizer state change.
        """
        rate = learning_rate(step, self.config)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        self.engine.train()
        losses, gradients = [], []
        for micro_step in range(self.num_micro_steps):
            self._seed_dropout(step, micro_step)
            tokens, next_tokens = self.loader.micro_batch(self.samples(step, micro_step, self.ranks.rank), self.device)
            loss = self.engine(tokens, next_tokens)
            self.engine.backward(spread_fault(loss))
            self.engine.step()
            losses.append(loss.detach().double())
            gradients.append(self.gradients.take().to(self.device).double())
        applied = bool(self.engine.was_step_applied())
        mine = torch.stack([*losses, *gradients, torch.tensor(float(stop_requested), device=self.device).double()])
        # One exchange carries what all ranks must agree on: the mean loss, what is not finite, and whether to stop.
        everyone = [torch.empty_like(mine) for _ in range(self.ranks.world_size)]
        torch.distributed.all_gather(everyone, mine)
        reports = torch.stack(everyone).tolist()
        faults = self._faults(reports)
        if faults and applied:
            raise JobError(
                f"step {step + 1}: the {faults[0].what} of rank {faults[0].rank} is not finite, and the weights were "
                "updated all the same: a setting in the deepspeed section keeps DeepSpeed from checking. "
                "Remove it and run the same command again"
            )
        return StepResult(
            loss=sum(sum(report[: self.num_micro_steps]) for report in reports) / (len(reports) * self.num_micro_steps),
            grad_norm=float(self.engine.get_global_grad_norm() or 0.0),
            learning_rate=rate,
            skipped=not applied,
            stop_requested=any(report[-1] for report in reports),
            faults=faults,
        )

    def samples(self, step: int, micro_step: int, rank: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Global sample indices of a rank's micro batch. Which rank takes which never changes the set of a step."""
        per_micro_step = self.micro_batch_size * self.ranks.world_size
        first = step * self.config.train.global_batch_size + micro_step * per_micro_step
        first += rank * self.micro_batch_size
        return np.arange(first, first + self.micro_batch_size, dtype=np.int64)

    def _faults(self, reports: list[list[float]]) -> tuple[Fault, ...]:
        """Each rank's first loss or gradient that is not finite."""
        faults = []
        for rank, report in enumerate(reports):
            for micro_step in range(self.num_micro_steps):
                loss, gradient = report[micro_step], report[self.num_micro_steps + micro_step]
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


def train(config: Config, resume: str | None = None) -> None:
    """Run or go on with the training that `config` describes, on every rank of the job.

    `resume` is None to go on where the output folder stands, "never", a step number, or a checkpoint's path.
    Raises StoppedError after a stop signal, once a checkpoint is saved.
    """
    check_precision(config.train.precision)
    output_dir = Path(config.run.output_dir)
    stop = StopRequest()
    ranks = init_distributed()
    main = ranks.rank == 0
    datasets = open_sources(config.data, split="train")
    config = resolve_vocab_size(config, datasets[0].manifest.tokenizer.vocab_size)
    weights = mixture_weights(config.data, datasets)
    within_documents = config.data.windows == "documents"
    loader = Loader(datasets, weights, config.model.sequence_length, config.run.seed, within_documents)
    check_same_run(config, output_dir, resume)
    checkpoints = Checkpoints(config, ranks, datasets[0].folder / TOKENIZER_FILE)
    fingerprint = "+".join(dataset.manifest.fingerprint for dataset in datasets)
    state = TrainState(0, 0, 0, ranks.world_size, config.zero.stage, fingerprint)
    start = find_start(checkpoints, resume, fingerprint)
    plan = None if start is None else checkpoints.plan_load(*start)
    trainer = Trainer(config, ranks, loader, load_universal=plan is not None and plan.is_universal)
    if start is not None and plan is not None:
        checkpoints.load(trainer.engine, plan)
        _, saved = start
        state = replace(
            state, step=saved.step, samples=saved.samples, tokens=saved.tokens, wandb_run_id=saved.wandb_run_id
        )
    if main:
        output_dir.mkdir(parents=True, exist_ok=True)
        save_config(config, output_dir / CONFIG_FILE)
        describe(trainer, state)
    torch.distributed.barrier()
    monitor = Monitor(config, output_dir, main, state.step, state.wandb_run_id)
    try:
        if start is not None:
            monitor.event("resumed", step=state.step, checkpoint=start[0].name)
        run_steps(trainer, checkpoints, monitor, replace(state, wandb_run_id=monitor.wandb_run_id), stop)
    finally:
        monitor.close()
    leave_process_group()


def run_steps(
    trainer: Trainer, checkpoints: Checkpoints, monitor: Monitor, state: TrainState, stop: StopRequest
) -> None:
    """The loop: step, report, validate, save."""
    config, ranks = trainer.config, trainer.ranks
    tokens_per_step = config.train.global_batch_size * config.model.sequence_length
    flops_per_token = training_flops_per_token(config.model)
    peak_flops = measure_matmul_flops(trainer.device, config.train.precision) * ranks.world_size
    validation = Validation(config, ranks, trainer.device)
    while state.step < config.train.num_steps:
        started = time.perf_counter()
        result = trainer.train_step(state.step, stop.received is not None)
        seconds = time.perf_counter() - started
        state = replace(
            state,
            step=state.step + 1,
            samples=state.samples + config.train.global_batch_size,
            tokens=state.tokens + tokens_per_step,
        )
        monitor.step(
            StepMetrics(
                step=state.step,
                samples=state.samples,
                tokens=state.tokens,
                loss=result.loss,
                lr=result.learning_rate,
                grad_norm=result.grad_norm,
                tokens_per_second=tokens_per_step / seconds,
                mfu=flops_per_token * tokens_per_step / seconds / peak_flops,
                step_seconds=seconds,
                skipped=result.skipped,
            )
        )
        done = state.step == config.train.num_steps
        if validation.due(state.step) or (done and validation.enabled):
            monitor.event("validation", step=state.step, **validation.run(trainer.engine))
        if result.is_non_finite(config.train.precision):
            report_non_finite(trainer, monitor, state.step, result)
        if done or result.stop_requested or state.step % config.checkpoint.every_steps == 0:
            folder = checkpoints.save(trainer.engine, trainer.decoder, state)
            monitor.event("saved", step=state.step, checkpoint=folder.name)
        if result.stop_requested and not done:
            raise StoppedError(
                f"stopped on a signal after saving step {state.step} of {config.train.num_steps}; "
                "the same command goes on from there"
            )


def report_non_finite(trainer: Trainer, monitor: Monitor, step: int, result: StepResult) -> None:
    """Name each rank at fault with the documents it read; of several ranks' finite gradients the sum may not be."""
    for fault in result.faults:
        samples = trainer.samples(step - 1, fault.micro_step, fault.rank)
        documents = trainer.loader.documents(samples) if trainer.ranks.rank == 0 else []
        monitor.event(
            "non_finite",
            step=step,
            rank=fault.rank,
            what=fault.what,
            micro_step=fault.micro_step,
            documents=documents,
        )
    if not result.faults:
        monitor.event("non_finite", step=step, what="sum of the ranks' gradients")


def describe(trainer: Trainer, state: TrainState) -> None:
    """Say what is about to run, so that a wrong setting shows before it costs anything."""
    config, ranks = trainer.config, trainer.ranks
    num_parameters = sum(
        math.prod(getattr(parameter, "ds_shape", parameter.shape)) for parameter in trainer.decoder.parameters()
    )
    where = f"{trainer.device.type.upper()}, {config.train.precision}, ZeRO stage {config.zero.stage}"
    logger.info(
        "%s of %.2f M parameters on %d process%s (%s, %d thread%s each)",
        config.model.position,
        num_parameters / 1e6,
        ranks.world_size,
        "" if ranks.world_size == 1 else "es",
        where,
        torch.get_num_threads(),
        "" if torch.get_num_threads() == 1 else "s",
    )
    epochs = trainer.loader.order.epochs(config.train.num_steps * config.train.global_batch_size)
    for source, (dataset, num_epochs) in enumerate(zip(trainer.loader.datasets, epochs, strict=True)):
        passed_over = ""
        if config.data.windows == "documents":
            share = trainer.loader.share_passed_over(source)
            passed_over = f"; {share:.1%} of them fill no window within a document and are passed over"
        logger.info(
            "%s: %s tokens, read %.2f times%s", dataset.folder, f"{dataset.num_tokens:,}", num_epochs, passed_over
        )
    tokens_per_step = config.train.global_batch_size * config.model.sequence_length
    logger.info(
        "steps %d to %d of %s tokens (%d sequences of %d; micro batch %d, %d accumulated)",
        state.step + 1,
        config.train.num_steps,
        f"{tokens_per_step:,}",
        config.train.global_batch_size,
        config.model.sequence_length,
        trainer.micro_batch_size,
        trainer.num_micro_steps,
    )
