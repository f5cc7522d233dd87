"""Room on disk for the next checkpoint."""

import shutil
from pathlib import Path

from lex_pretrain.config import Config
from lex_pretrain.model.parameters import count_parameters

# Float32 weights and two moments of the optimizer.
_OPTIMIZER_BYTES = 12
# DeepSpeed's copy of the model's weights, and the consolidated one.
_COPIES_OF_WEIGHTS = 2
# A checkpoint of the same run may differ a little in size: names and numbers in its small files.
_MARGIN_BYTES = 1_000_000


def estimate_bytes(config: Config) -> int:
    """Size of a checkpoint, the largest that any ZeRO stage writes."""
    width = 4 if config.train.precision == "fp32" else 2
    return count_parameters(config.model) * (_OPTIMIZER_BYTES + _COPIES_OF_WEIGHTS * width)


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
