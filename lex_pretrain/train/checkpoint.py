"""Checkpoints that are complete or invisible.

A checkpoint is copied into memory, and from there written under a temporary name while training goes on. Every file is
flushed and listed in `files.json` with its size and SHA-256, then the folder is renamed to `step-XXXXXXXX` and `latest`
moves. A folder with its final name is therefore whole, unless the disk broke it later; that shows when it is verified.

Inside: `deepspeed/` (DeepSpeed's own files), `model.safetensors` (the weights that forward passes use),
`config.yaml`, `tokenizer.model`, `state.json`, `files.json`.
"""

import contextlib
import dataclasses
import itertools
import logging
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed
from safetensors import SafetensorError
from safetensors.torch import save_file

from lex_pretrain.config import Config
from lex_pretrain.config_io import save_config
from lex_pretrain.data.order import ORDER_VERSION
from lex_pretrain.errors import JobError, RequestError, SharedJobError
from lex_pretrain.files import read_json, sync_folder, write_json, write_text
from lex_pretrain.model.decoder import Decoder
from lex_pretrain.ranks import Ranks, gather_lists
from lex_pretrain.run_folder import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    LISTING_FILE,
    STATE_FILE,
    TOKENIZER_FILE,
    WEIGHTS_FILE,
    faults_of,
    read_listing,
    step_folder,
    step_folders,
    write_listing,
)
from lex_pretrain.train.conversion import convert_on_first_rank
from lex_pretrain.train.distributed import quiet_deepspeed
from lex_pretrain.train.engine import optimizer_kept
from lex_pretrain.train.health import SampleRange
from lex_pretrain.train.room import checkpoint_bytes, lack_of_room
from lex_pretrain.train.snapshot import deepspeed_files, gather_weights, start_thread, write_files
from lex_pretrain.train.state import TrainState, sample_ranges

DEEPSPEED_TAG = "deepspeed"
LATEST_FILE = "latest"
PASSED_OVER_FILE = "passed_over.json"
ABANDONED_PREFIX = "abandoned-"
_WRITTEN_SUFFIX, _REMOVED_SUFFIX = ".tmp", ".removed"
_OWN_LEFTOVER = re.compile(r"\.step-\d{8,}(\.tmp|\.removed)")

logger = logging.getLogger("lex_pretrain")


@dataclasses.dataclass(frozen=True)
class LoadPlan:
    """A folder that DeepSpeed loads, and whether it is in the universal form."""

    folder: Path
    is_universal: bool


@dataclasses.dataclass(frozen=True)
class PendingSave:
    """A checkpoint that is being written: `entries` are this rank's files, once they are on the disk."""

    step: int
    temporary: Path
    final: Path
    entries: "Future[list[dict[str, Any]]]"
    waited_seconds: float


@dataclasses.dataclass(frozen=True)
class Saved:
    """A checkpoint that is on the disk, and how long training waited for it in all."""

    step: int
    folder: Path
    waited_seconds: float


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, config: Config, ranks: Ranks, tokenizer_file: Path) -> None:
        self.config = config
        self.ranks = ranks
        self.tokenizer_file = tokenizer_file
        self.folder = Path(config.run.output_dir) / CHECKPOINTS_FOLDER
        self._pending: PendingSave | None = None

    def check_room(self) -> None:
        """Raises SharedJobError where the next checkpoint finds no room, by the last one's size or the parameters."""
        lacking = None
        if self.ranks.rank == 0:
            sizes = [_listed_bytes(folder) for folder in step_folders(self.folder).values()]
            num_bytes = sizes[-1] if sizes else checkpoint_bytes(self.config, self.config.zero.stage)
            lacking = lack_of_room(self.folder, num_bytes)
        if lacking := gather_lists([lacking], self.ranks)[0]:
            raise SharedJobError(lacking)

    def begin_save(self, engine: Any, decoder: Decoder, state: TrainState) -> None:
        """Copy the checkpoint of `state.step` into memory and begin to write it, on all ranks together.

        One at a time: `finish_save` comes before the next. With `checkpoint.in_background` false, DeepSpeed's files are
        written here, without a copy. Raises SharedJobError where its folder cannot be made.
        """
        started = time.perf_counter()
        final = step_folder(self.folder, state.step)
        temporary = self.folder / f".{final.name}{_WRITTEN_SUFFIX}"
        main = self.ranks.rank == 0
        with self._all_or_none(temporary):
            if main:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
        with self._all_or_none(temporary), quiet_deepspeed():
            files = deepspeed_files(engine, temporary, DEEPSPEED_TAG, self.config.checkpoint.in_background)
        weights = gather_weights(decoder, keep=main)
        if main:
            files[WEIGHTS_FILE] = partial(save_file, weights)
            files[CONFIG_FILE] = partial(save_config, self.config)
            files[TOKENIZER_FILE] = partial(shutil.copyfile, self.tokenizer_file)
            files[STATE_FILE] = lambda file: write_json(file, dataclasses.asdict(state))
        written = start_thread(partial(write_files, temporary, files))
        self._pending = PendingSave(state.step, temporary, final, written, time.perf_counter() - started)

    @property
    def is_written(self) -> bool:
        """Whether this rank's files of the checkpoint that was begun are all on the disk, or have failed."""
        return self._pending is not None and self._pending.entries.done()

    def finish_save(self) -> Saved | None:
        """Wait for the checkpoint that was begun, on all ranks together, and make it visible; None where none was.

        Those no longer kept are removed then. Raises SharedJobError when a file could not be written, as on a full
        disk; what was written of it is removed.
        """
        if self._pending is None:
            return None
        started = time.perf_counter()
        pending, self._pending = self._pending, None
        with self._all_or_none(pending.temporary):
            entries = pending.entries.result()
        listed = gather_lists(entries, self.ranks)
        with self._all_or_none(pending.temporary):
            if self.ranks.rank == 0:
                write_listing(pending.temporary, listed, pending.step)
                self._publish(pending.temporary, pending.final)
                self._remove_old(newest=pending.step)
        return Saved(pending.step, pending.final, pending.waited_seconds + time.perf_counter() - started)

    @contextlib.contextmanager
    def _all_or_none(self, temporary: Path) -> Iterator[None]:
        """A part of a save, after which all ranks go on or all fail alike: none waits for one that could not write."""
        faults: list[str] = []
        try:
            yield
        except (OSError, SafetensorError) as error:
            faults.append(str(error))
        faults = gather_lists(faults, self.ranks)
        if not faults:
            return
        if self.ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        kept = [path.name for path in step_folders(self.folder).values()]
        raise SharedJobError(
            f"the checkpoint {temporary.name[1:-4]} could not be written: {faults[0]}. Make room in {self.folder} "
            f"({shutil.disk_usage(self.folder.parent).free / 1e6:,.0f} MB are free) and run the same command again; it "
            f"goes on from {kept[-1] if kept else 'the start'}"
        )

    def newest_good(self, before_step: int | None = None) -> tuple[Path, TrainState] | None:
        """The newest checkpoint whose files are all as listed; a broken one is passed over with a warning.

        With `before_step`, one to go back to: an earlier one, saved when all was well, in the order of this run.
        """
        candidates = reversed(step_folders(self.folder).items())
        any_broken = False
        for step, candidate in candidates:
            if before_step is not None and step >= before_step:
                continue
            faults = self.verify(candidate)
            if not faults:
                state = self.read_state(candidate)
                if before_step is None or (state.num_bad_steps == 0 and state.order_version == ORDER_VERSION):
                    return candidate, state
                continue
            any_broken = True
            if self.ranks.rank == 0:
                logger.warning("checkpoint %s is broken and passed over: %s", candidate, "; ".join(faults))
        if any_broken:
            raise JobError(
                f"every checkpoint in {self.folder} is broken; restore one from a copy, "
                "or train anew into another run.output_dir"
            )
        return None

    def verify(self, checkpoint: Path) -> list[str]:
        """Faults of a checkpoint's files against `files.json`, found by all ranks together, each in a part of them."""
        faults = faults_of(checkpoint, part=self.ranks.rank, num_parts=self.ranks.world_size)
        if not faults and self.ranks.rank == 0:
            paths = [file.path for file in read_listing(checkpoint).files]
            if STATE_FILE not in paths or not any(path.startswith(f"{DEEPSPEED_TAG}/") for path in paths):
                faults = [f"{LISTING_FILE} does not name {STATE_FILE} and DeepSpeed's files"]
        return list(dict.fromkeys(gather_lists(faults, self.ranks)))

    def set_aside_newer(self, start: Path, step: int) -> None:
        """Move the checkpoints that a run leaves behind by starting at `start`, of step `step`, into one folder.

        Otherwise a later restart would take the newest of them for the run's. They stay whole where they are moved to.
        """
        if self.ranks.rank != 0:
            return
        there = step_folders(self.folder)
        left = [folder for number, folder in there.items() if number >= step and not folder.samefile(start)]
        if not left:
            return
        aside = next(folder for folder in self._abandoned_folders() if not folder.exists())
        aside.mkdir()
        for folder in left:
            folder.rename(aside / folder.name)
        sync_folder(aside)
        sync_folder(self.folder)
        kept = [folder.name for folder in there.values() if folder not in left]
        if kept:
            write_text(self.folder / LATEST_FILE, kept[-1] + "\n")
        else:
            (self.folder / LATEST_FILE).unlink(missing_ok=True)
        logger.warning(
            "the run goes on from step %d, so what it had saved from there on is set aside in %s: %s. Nothing of it is "
            "removed or used unasked; --resume PATH goes back to it",
            *(step, aside, ", ".join(folder.name for folder in left)),
        )

    def set_aside(self) -> list[Path]:
        """The checkpoints that were set aside."""
        folders = sorted(self.folder.glob(f"{ABANDONED_PREFIX}*"))
        return [checkpoint for folder in folders for checkpoint in step_folders(folder).values()]

    def _abandoned_folders(self) -> Iterator[Path]:
        return (self.folder / f"{ABANDONED_PREFIX}{number}" for number in itertools.count(1))

    def read_state(self, checkpoint: Path) -> TrainState:
        return TrainState.from_json(read_json(checkpoint / STATE_FILE))

    def pass_over(self, ranges: tuple[SampleRange, ...]) -> None:
        """Note samples to pass over before the next checkpoint can: a restart from an older one must do so too."""
        if self.ranks.rank == 0:
            write_json(self.folder / PASSED_OVER_FILE, ranges)

    def passed_over(self, state: TrainState) -> tuple[SampleRange, ...]:
        """The ranges of a state and those noted since it was saved."""
        file = self.folder / PASSED_OVER_FILE
        noted = sample_ranges(read_json(file)) if file.is_file() else ()
        return tuple(sorted({*noted, *state.passed_over}))

    def plan_load(self, checkpoint: Path, state: TrainState) -> LoadPlan:
        """Where this run's engine can load a verified checkpoint from, converted where its layout is another.

        Raises RequestError where DeepSpeed has no conversion between the ZeRO stages, or none of the optimizer's state.
        """
        here = self.config.zero.stage
        # At stage 0 every process holds everything, and DeepSpeed has no universal form of that.
        if (here == 0) != (state.zero_stage == 0):
            raise RequestError(
                f"{checkpoint} was saved at ZeRO stage {state.zero_stage}, and this run has stage {here}; DeepSpeed "
                f"converts between the stages 1, 2 and 3 only: set zero.stage={state.zero_stage}"
            )
        if here == 0 or (state.zero_stage, state.world_size) == (here, self.ranks.world_size):
            return LoadPlan(checkpoint, is_universal=False)
        if self.config.optimizer.name == "muon":
            raise RequestError(
                f"{checkpoint} is of {state.world_size} processes, and this run has {self.ranks.world_size}; DeepSpeed "
                "does not convert muon's momentum to another number of them (optimizer.name)"
            )
        converted = self.folder / ".universal"
        source, destination = checkpoint / DEEPSPEED_TAG, converted / DEEPSPEED_TAG
        convert_on_first_rank(source, destination, state.zero_stage, here, self.ranks)
        return LoadPlan(converted, is_universal=True)

    def load(self, engine: Any, plan: LoadPlan) -> None:
        """Fill the engine, which was made for `plan.is_universal`."""
        # An engine that began from a universal checkpoint may go back to one of its own, which is not.
        engine._config.load_universal_checkpoint = plan.is_universal
        with quiet_deepspeed(), optimizer_kept(engine.basic_optimizer):
            loaded, _ = engine.load_checkpoint(str(plan.folder), tag=DEEPSPEED_TAG)
        if loaded is None:
            raise JobError(f"DeepSpeed found no checkpoint in {plan.folder / DEEPSPEED_TAG}")
        torch.distributed.barrier()
        if plan.is_universal and self.ranks.rank == 0:
            shutil.rmtree(plan.folder)

    def _publish(self, temporary: Path, final: Path) -> None:
        sync_folder(temporary)
        if final.exists():
            # Only a broken checkpoint can stand here: a good one would have been resumed from.
            _remove_folder(final)
        temporary.rename(final)
        sync_folder(self.folder)
        write_text(self.folder / LATEST_FILE, final.name + "\n")

    def _remove_old(self, newest: int) -> None:
        settings = self.config.checkpoint
        steps = [step for step in step_folders(self.folder) if step <= newest]
        for step in steps[: -settings.keep_last]:
            if settings.keep_every_steps and step % settings.keep_every_steps == 0:
                continue
            # Renamed first, so that a removal cut short leaves no half checkpoint under a good name.
            folder = step_folder(self.folder, step)
            _remove_folder(folder.rename(folder.with_name(f".{folder.name}{_REMOVED_SUFFIX}")))
        for leftover in self.folder.glob(".step-*"):
            # Its own alone: people and their tools leave things here too.
            if _OWN_LEFTOVER.fullmatch(leftover.name) and leftover.is_dir():
                _remove_folder(leftover)


def _remove_folder(folder: Path) -> None:
    """Remove it, or the link alone where somebody has put the folder elsewhere and linked it here."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)


def _listed_bytes(checkpoint: Path) -> int:
    try:
        return read_listing(checkpoint).num_bytes
    except RequestError:
        return 0
