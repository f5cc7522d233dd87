"""Run by tests/test_robustness.py in place of `lex_pretrain`: `train` with faults put into it.

    python -m tests.spoiled_run FAULT COMMAND...

FAULT is RANK:FIRST-LAST, the global samples FIRST .. LAST that make a gradient of that rank infinite;
RANK:spike:SAMPLE, a sample whose batch reports a loss ten times as large; RANK:weights:SAMPLE, one at which a moment of
the optimizer becomes NaN; RANK:hang:SAMPLE, one that is never read; or RANK:full:SAMPLE, after which the disk is filled
up to 200 kB just before the next save.
"""

import os
import shutil
import sys
import time
from typing import Any

import numpy as np
import torch

from lex_pretrain import cli
from lex_pretrain.data.loader import Loader
from lex_pretrain.train import trainer
from lex_pretrain.train.checkpoint import Checkpoints


def main() -> None:
    spoil_if_meant(sys.argv.pop(1))
    cli.main()


def spoil_if_meant(fault: str) -> None:
    """Put FAULT into this process where it has the fault's rank."""
    rank, kind, samples = parts if len(parts := fault.split(":")) == 3 else (parts[0], "inf", parts[1])
    first, last = (int(part) for part in (samples.split("-") if "-" in samples else (samples, samples)))
    if os.environ.get("RANK", "0") == rank:
        spoil(kind, first, last)


def spoil(kind: str, first: int, last: int) -> None:
    """Patch the reading of samples to note which are met, and what follows from it."""
    micro_batch, make_engine = Loader.micro_batch, trainer.make_engine
    met = False

    def noting(self: Loader, samples: Any, device: torch.device) -> Any:
        nonlocal met
        met = bool(np.any((samples >= first) & (samples <= last)))
        while met and kind == "hang":
            time.sleep(0.1)
        return micro_batch(self, samples, device)

    def spoiling(*arguments: Any) -> Any:
        decoder, engine = make_engine(*arguments)
        if kind == "inf":
            list(decoder.parameters())[5].register_hook(lambda gradient: gradient * float("inf") if met else None)
        if kind == "weights":
            engine.module.register_forward_pre_hook(lambda module, inputs: spoil_state(engine) if met else None)
        if kind == "spike":
            engine.module.register_forward_hook(lambda module, inputs, loss: loss * 10 if met else None)
        return decoder, engine

    def filling(self: Checkpoints) -> None:
        check_room(self)
        if met and kind == "full":
            free = shutil.disk_usage(self.folder.parent).free
            (self.folder.parent / "filler").write_bytes(bytes(free - 200_000))

    check_room = Checkpoints.check_room
    Checkpoints.check_room = filling  # type: ignore[method-assign]
    Loader.micro_batch = noting  # type: ignore[method-assign]
    trainer.make_engine = spoiling


def spoil_state(engine: Any) -> None:
    state = next(iter(engine.basic_optimizer.state.values()))
    state["exp_avg_sq"].view(-1)[0] = float("nan")


if __name__ == "__main__":
    main()
