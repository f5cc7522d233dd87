"""One training run: where it starts, the loop over steps, and going back when it has gone wrong."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed

from lex_pretrain.config import Config
from lex_pretrain.config_io import save_config
from lex_pretrain.data.loader import Loader, mixture_weights, open_sources
from lex_pretrain.errors import SharedJobError, StoppedError
from lex_pretrain.hardware import check_precision, measure_matmul_flops
from lex_pretrain.held_folder import held_folder
from lex_pretrain.model.flops import training_flops_per_token
from lex_pretrain.model.parameters import count_parameters
from lex_pretrain.monitor.metrics import StepMetrics
from lex_pretrain.monitor.monitor import Monitor
from lex_pretrain.ranks import Ranks, leave_process_group
from lex_pretrain.run_folder import CONFIG_FILE, TOKENIZER_FILE
from lex_pretrain.train.checkpoint import Checkpoints
from lex_pretrain.train.distributed import init_distributed
from lex_pretrain.train.engine import check_operations
from lex_pretrain.train.finite import state_is_finite
from lex_pretrain.train.health import next_sample, remember, trouble
from lex_pretrain.train.resume import check_same_run, find_start
from lex_pretrain.train.state import TrainState
from lex_pretrain.train.stop import StopRequest
from lex_pretrain.train.trainer import StepResult, Trainer, resolve_vocab_size
from lex_pretrain.train.validation import Validation

# Ranks at fault in one step whose documents are looked up: when all are, their weights are, and not their documents.
MOST_FAULTS_TRACED = 8

logger = logging.getLogger("lex_pretrain")


def train(
    config: Config,
    resume: str | None = None,
    last_step: int | None = None,
    after_step: Callable[[int], None] = lambda step: None,
) -> None:
    """Run or go on with the training that `config` describes, on every rank of the job.

    `resume` is None to go on where the output folder stands, "never", a step number, or a checkpoint's path. The run
    ends after `last_step`, with all steps of the config if it is None; `after_step` is told of each step that is done.
    Raises StoppedError after a stop signal, once a checkpoint is saved.
    """
    check_precision(config.train.precision)
    check_operations(config)
    stop = StopRequest()
    ranks = init_distributed()
    with held_folder(Path(config.run.output_dir), ranks, "training run", "run.output_dir"):
        train_alone(config, ranks, stop, resume, last_step, after_step)
    leave_process_group()


def train_alone(
    config: Config,
    ranks: Ranks,
    stop: StopRequest,
    resume: str | None,
    last_step: int | None,
    after_step: Callable[[int], None],
) -> None:
    """`train` in an output folder that no other run writes to."""
    output_dir = Path(config.run.output_dir)
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
    checkpoints.check_room()
    trainer = Trainer(config, ranks, loader, load_universal=plan is not None and plan.is_universal)
    if start is not None and plan is not None:
        checkpoints.load(trainer.engine, plan)
        state = replace(start[1], world_size=ranks.world_size, zero_stage=config.zero.stage)
        if resume is not None:
            checkpoints.set_aside_newer(start[0], state.step)
    state = replace(state, passed_over=checkpoints.passed_over(state))
    if main:
        save_config(config, output_dir / CONFIG_FILE)
        describe(trainer, state)
    torch.distributed.barrier()
    monitor = Monitor(config, output_dir, main, state.step, state.wandb_run_id)
    try:
        if start is not None:
            monitor.event("resumed", step=state.step, checkpoint=start[0].name)
        if start is not None and resume is not None and main:
            logger.info("to go on later, leave --resume out; with it the command starts from step %d again", state.step)
        state = replace(state, wandb_run_id=monitor.wandb_run_id)
        with trainer.watchdog.watching():
            for step in run_steps(trainer, checkpoints, monitor, state, stop, last_step or config.num_steps):
                after_step(step)
    except SharedJobError:
        # All ranks are here, and what was begun before the fault is good.
        with contextlib.suppress(SharedJobError):
            finish_save(checkpoints, monitor)
        raise
    finally:
        monitor.close()


def run_steps(
    trainer: Trainer,
    checkpoints: Checkpoints,
    monitor: Monitor,
    state: TrainState,
    stop: StopRequest,
    last_step: int,
) -> Iterator[int]:
    """The loop: step, report, validate, save. Yields each step when all of this is done."""
    config, ranks = trainer.config, trainer.ranks
    peak_flops = measure_matmul_flops(trainer.device, config.train.precision) * ranks.world_size
    validation = Validation(config, ranks, trainer.device)
    while state.step < last_step:
        started = time.perf_counter()
        first_sample = next_sample(state.samples, state.passed_over)
        result = trainer.train_step(state.step, first_sample, stop.received is not None, checkpoints.is_written)
        seconds = time.perf_counter() - started
        non_finite = result.is_non_finite(config.train.precision)
        before, batch_size = state, config.train.batches.size(state.step)
        state = replace(
            state,
            step=state.step + 1,
            samples=first_sample + batch_size,
            tokens=state.tokens + batch_size * config.model.sequence_length,
            recent_losses=remember(state.recent_losses, result.loss, config.train),
            num_bad_steps=state.num_bad_steps + 1 if non_finite else 0,
        )
        monitor.step(step_metrics(state, result, seconds, config, peak_flops))
        if non_finite:
            report_non_finite(trainer, monitor, state.step, first_sample, result)
        if result.save_is_written:
            finish_save(checkpoints, monitor)
        done = state.step == last_step
        # In the midst of bad steps none is written unasked: keep_last might drop the last good one for it.
        regular = state.step % config.checkpoint.every_steps == 0 and state.num_bad_steps == 0
        due = done or result.stop_requested or regular
        reason = trouble(result.loss, before.recent_losses, state.num_bad_steps, config.train)
        if reason is None and due and not state_is_finite(trainer.engine):
            reason = "weights or optimizer state are not finite"
        if reason is not None:
            trainer.watchdog.progress(f"going back from step {state.step}")
            state = go_back(trainer, checkpoints, monitor, state, reason)
            continue
        if validation.due(state.step) or (done and validation.enabled):
            trainer.watchdog.progress(f"validating after step {state.step}")
            monitor.event("validation", step=state.step, **validation.run(trainer.engine))
        if due:
            trainer.watchdog.progress("waiting for the checkpoint before")
            finish_save(checkpoints, monitor)
            trainer.watchdog.progress(f"saving step {state.step}")
            checkpoints.check_room()
            checkpoints.begin_save(trainer.engine, trainer.decoder, state)
            if done or result.stop_requested or not config.checkpoint.in_background:
                trainer.watchdog.progress(f"writing the checkpoint of step {state.step}")
                finish_save(checkpoints, monitor)
        if result.stop_requested and not done:
            raise StoppedError(
                f"stopped on a signal after saving step {state.step} of {config.num_steps}; "
                "the same command goes on from there"
            )
        yield state.step


def finish_save(checkpoints: Checkpoints, monitor: Monitor) -> None:
    """Wait for the checkpoint that is being written, if there is one, and report it."""
    if saved := checkpoints.finish_save():
        monitor.event(
            "saved", step=saved.step, checkpoint=saved.folder.name, waited_seconds=round(saved.waited_seconds, 3)
        )


def step_metrics(
    state: TrainState, result: StepResult, seconds: float, config: Config, peak_flops: float
) -> StepMetrics:
    """The record of a step that led to `state`."""
    tokens_per_second = config.train.batches.size(state.step - 1) * config.model.sequence_length / seconds
    return StepMetrics(
        step=state.step,
        samples=state.samples,
        tokens=state.tokens,
        loss=result.loss,
        lr=result.learning_rate,
        grad_norm=result.grad_norm,
        tokens_per_second=tokens_per_second,
        mfu=training_flops_per_token(config.model) * tokens_per_second / peak_flops,
        step_seconds=seconds,
        skipped=result.skipped,
    )


def go_back(trainer: Trainer, checkpoints: Checkpoints, monitor: Monitor, state: TrainState, reason: str) -> TrainState:
    """Load the last good checkpoint and pass over all samples since then; returns where the run then stands.

    Raises SharedJobError when there is none, or the run has gone back to it too often.
    """
    finish_save(checkpoints, monitor)
    trainer.watchdog.progress(f"looking for a checkpoint before step {state.step}")
    found = checkpoints.newest_good(before_step=state.step)
    if found is None:
        raise SharedJobError(
            f"step {state.step}: {reason}, and there is no checkpoint to go back to; lower optimizer.learning_rate, or "
            "raise schedule.warmup_steps, and look at the documents that metrics.jsonl names"
        )
    folder, saved = found
    limit = trainer.config.train.max_rewinds
    if sum(first == saved.samples for first, _ in state.passed_over) >= limit:
        raise SharedJobError(
            f"step {state.step}: {reason}, and the run has gone back to {folder.name} {limit} times before "
            "(train.max_rewinds); lower optimizer.learning_rate, or go on from an earlier checkpoint by --resume STEP"
        )
    plan = checkpoints.plan_load(folder, saved)
    passed_over = (*state.passed_over, (saved.samples, state.samples))
    checkpoints.pass_over(passed_over)
    if plan.is_universal and not trainer.load_universal:
        raise SharedJobError(
            f"step {state.step}: {reason}. The last good checkpoint, {folder.name}, is of another number of "
            "processes or ZeRO stage; run the same command again to go on from there"
        )
    checkpoints.load(trainer.engine, plan)
    monitor.event(
        "rewound", step=state.step, reason=reason, to_step=saved.step, passed_over=[saved.samples, state.samples]
    )
    return replace(
        saved,
        world_size=state.world_size,
        zero_stage=state.zero_stage,
        wandb_run_id=state.wandb_run_id,
        passed_over=passed_over,
    )


def report_non_finite(trainer: Trainer, monitor: Monitor, step: int, first_sample: int, result: StepResult) -> None:
    """Name each rank at fault with the documents it read; of several ranks' finite gradients the sum may not be."""
    for fault in result.faults[:MOST_FAULTS_TRACED]:
        samples = trainer.samples(first_sample, fault.micro_step, fault.rank)
        monitor.event(
            "non_finite",
            step=step,
            rank=fault.rank,
            what=fault.what,
            micro_step=fault.micro_step,
            documents=trainer.loader.documents(samples) if trainer.ranks.rank == 0 else [],
        )
    if further := [fault.rank for fault in result.faults[MOST_FAULTS_TRACED:]]:
        monitor.event("non_finite", step=step, ranks=further)
    if not result.faults:
        monitor.event("non_finite", step=step, what="sum of the ranks' gradients")


def describe(trainer: Trainer, state: TrainState) -> None:
    """Say what is about to run, so that a wrong setting shows before it costs anything."""
    config, ranks = trainer.config, trainer.ranks
    where = f"{trainer.device.type.upper()}, {config.train.precision}, ZeRO stage {config.zero.stage}"
    logger.info(
        "%s of %.2f M parameters on %d process%s (%s, %d thread%s each)",
        config.model.position,
        count_parameters(config.model) / 1e6,
        ranks.world_size,
        "" if ranks.world_size == 1 else "es",
        where,
        torch.get_num_threads(),
        "" if torch.get_num_threads() == 1 else "s",
    )
    epochs = trainer.loader.order.epochs(config.train.batches.before(config.num_steps))
    for source, (dataset, num_epochs) in enumerate(zip(trainer.loader.datasets, epochs, strict=True)):
        passed_over = ""
        if config.data.windows == "documents":
            share = trainer.loader.share_passed_over(source)
            passed_over = f"; {share:.1%} of them fill no window within a document and are passed over"
        logger.info(
            "%s: %s tokens, read %.2f times%s", dataset.folder, f"{dataset.num_tokens:,}", num_epochs, passed_over
        )
    logger.info(
        "steps %d to %d of %s tokens (%d sequences of %d; micro batch %d, %d accumulated)%s",
        state.step + 1,
        config.num_steps,
        f"{config.tokens_per_step:,}",
        config.train.global_batch_size,
        config.model.sequence_length,
        trainer.micro_batch_size,
        config.train.global_batch_size // (trainer.micro_batch_size * ranks.world_size),
        f", from {config.train.initial_batch_size} sequences on over {config.train.batch_ramp_steps} steps"
        if config.train.initial_batch_size
        else "",
    )
