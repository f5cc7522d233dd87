"""Room on disk for the next checkpoint."""

import shutil
from pathlib import Path

from lex_pretrain.config import Config
from lex_pretrain.model.activations import BYTES_PER_ELEMENT
from lex_pretrain.model.parameters import count_parameters

# A checkpoint of the same run may differ a little in size: names and numbers in its small files.
_MARGIN_BYTES = 1_000_000


def checkpoint_bytes(config: Config, zero_stage: int) -> int:
    """Bytes of one checkpoint on disk: DeepSpeed's files, and `model.safetensors` with the weights of forward passes.

    DeepSpeed saves float32 weights and two moments, and below stage 3 the weights of forward passes too. Padding,
    names and the tokenizer are left out. ValueError while the vocabulary is open.
    """
    num_parameters = count_parameters(config.model)
    moments, element = 8, BYTES_PER_ELEMENT[config.train.precision]
    if zero_stage == 0:
        states = moments if element == 4 else moments + 4
        return num_parameters * (states + 2 * element)
    forward_copies = 1 if zero_stage == 3 else 2
    return num_parameters * (4 + moments + forward_copies * element)


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
