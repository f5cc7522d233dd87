"""Room for the next checkpoint: on disk, and in host memory while it is written."""

import shutil
from pathlib import Path

from lex_pretrain.config import Config
from lex_pretrain.model.activations import BYTES_PER_ELEMENT
from lex_pretrain.model.parameters import count_hidden_matrices, count_parameters

# A checkpoint of the same run may differ a little in size: names and numbers in its small files.
_MARGIN_BYTES = 1_000_000
# AdamW's two a parameter, in float32; Muon has one of them.
MOMENTS_BYTES = 8


def checkpoint_bytes(config: Config, zero_stage: int) -> int:
    """Bytes of one checkpoint on disk: DeepSpeed's files, and `model.safetensors` with the weights of forward passes.

    DeepSpeed saves float32 weights and moments, and below stage 3 the weights of forward passes too. Padding,
    names and the tokenizer are left out. ValueError while the vocabulary is open.
    """
    return _partitioned_bytes(config, zero_stage) + _bytes_of_first_process(config, zero_stage)


def copied_bytes(config: Config, zero_stage: int, world_size: int) -> tuple[int, int]:
    """Bytes of host memory that a save takes until it is written: in the first process, and in each other one.

    With `checkpoint.in_background` all that is saved is copied first; else only the first process copies anything, the
    gathered weights. ValueError while the vocabulary is open.
    """
    if not config.checkpoint.in_background:
        return count_parameters(config.model) * BYTES_PER_ELEMENT[config.train.precision], 0
    share = _partitioned_bytes(config, zero_stage) // world_size
    return share + _bytes_of_first_process(config, zero_stage), share


def elements_with_one_moment(config: Config) -> int:
    """Parameters that Muon trains: their optimizer state is one moment and not AdamW's two."""
    return count_hidden_matrices(config.model) if config.optimizer.name == "muon" else 0


def _partitioned_bytes(config: Config, zero_stage: int) -> int:
    """Of float32 weights and moments, of which every process saves its partition; without ZeRO there are none."""
    if zero_stage == 0:
        return 0
    missing = MOMENTS_BYTES // 2 * elements_with_one_moment(config)
    return (4 + MOMENTS_BYTES) * count_parameters(config.model) - missing


def _bytes_of_first_process(config: Config, zero_stage: int) -> int:
    """Of the weights for forward passes, gathered and below stage 3 by DeepSpeed too; without ZeRO of everything."""
    element = BYTES_PER_ELEMENT[config.train.precision]
    forward_copies = 1 if zero_stage == 3 else 2
    states = 0 if zero_stage else MOMENTS_BYTES + (0 if element == 4 else 4)
    return count_parameters(config.model) * (states + forward_copies * element)


def lack_of_room(folder: Path, num_bytes: int) -> str | None:
    """What to say when `folder`, which need not exist yet, has no room for a checkpoint of `num_bytes`; else None."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    free, needed = shutil.disk_usage(existing).free, num_bytes + _MARGIN_BYTES
    if free >= needed:
        return None
    return (
        f"{folder} has {free / 1e6:,.1f} MB free, and the next checkpoint needs about {needed / 1e6:,.1f} MB; make "
        "room (a lower checkpoint.keep_last keeps fewer) and run the same command again"
    )
