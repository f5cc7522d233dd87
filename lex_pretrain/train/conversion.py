"""Checkpoints of another number of processes or another ZeRO stage, by DeepSpeed's universal checkpoint."""

import contextlib
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lex_pretrain.errors import JobError

# Stages between which DeepSpeed converts: universal checkpoints of 1 and 2 are alike, those of 3 are of another form.
# Stage 0 has none and needs none, since every process holds everything.
STAGES_ALIKE = {0: (0,), 1: (1, 2), 2: (1, 2), 3: (3,)}

logger = logging.getLogger("lex_pretrain")


def convert_to_universal(source: Path, destination: Path) -> None:
    """Write DeepSpeed's files in `source` (ZeRO 1 to 3) into `destination` in the form that any layout loads.

    A process of its own: the converter starts workers, which must not inherit this one's process group.
    Raises JobError with the converter's last words when it fails.
    """
    logger.info("converting %s for this number of processes and ZeRO stage", source.parent.name)
    command = [
        *(sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"),
        *("--input_folder", str(source), "--output_folder", str(destination)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last_words = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise JobError(f"DeepSpeed could not convert {source} to a universal checkpoint:\n{last_words}")


@contextlib.contextmanager
def optimizer_kept_apart(engine: Any) -> Iterator[None]:
    """Undo what loading a universal checkpoint at ZeRO-3 does to an optimizer with several parameter groups.

    DeepSpeed 0.19 gives all groups the settings of the first, weight decay among them, and lets all parameters share
    one step counter, which then counts once for each of them.
    """
    optimizer = engine.optimizer.optimizer
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    yield
    for group, kept in zip(optimizer.param_groups, settings, strict=True):
        group.update(kept)
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()
