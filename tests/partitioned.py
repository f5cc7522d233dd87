"""What a training engine computes whose weights are spread over processes: one of the processes of a test.

`python -m torch.distributed.run --nproc-per-node 2 partitioned.py CONFIG OUTPUT` makes the engine of `train`, feeds it
tokens 0, 1, 2, ... in every attention mode, and saves logits, losses and whole weights to OUTPUT.
"""

import sys
from pathlib import Path
from typing import Any

import torch

from lex_pretrain.config_io import load_config
from lex_pretrain.ending import leave
from lex_pretrain.ranks import leave_process_group
from lex_pretrain.train.distributed import init_distributed
from lex_pretrain.train.snapshot import gather_weights
from lex_pretrain.train.trainer import make_engine

MODES = ("causal", "blockwise", "sliding", "sinks")


def examine(config_file: Path, output: Path) -> None:
    ranks = init_distributed()
    decoder, engine = make_engine(load_config(config_file), ranks, load_universal=False, eod_id=0)
    engine.eval()
    logits: list[torch.Tensor] = []
    decoder.register_forward_hook(lambda module, given, made: logits.append(made.clone()))
    tokens = torch.arange(80).reshape(2, 40)
    found: dict[str, Any] = {"whole_here": [name for name, one in decoder.named_parameters() if one.numel()]}
    for mode in MODES:
        with torch.no_grad():
            loss = engine(tokens[:, :-1], tokens[:, 1:], mode)
        found[mode] = {"loss": loss.item(), "logits": logits.pop()}
    found["weights"] = gather_weights(decoder, keep=True)
    if ranks.rank == 1:
        torch.save(found, output)
    leave_process_group()


if __name__ == "__main__":
    examine(Path(sys.argv[1]), Path(sys.argv[2]))
    leave(0)
