"""One rank of a job that trains, and counts the bytes which the host's network card sends for it.

Started by `multinode/test_traffic.py` under torchrun on every host: `python -m tests.network_bytes CASES.json FOLDER`.
Writes `FOLDER/sent-RANK.json`: for each case, the bytes that left through `eth0` in each of its steps.
"""

import itertools
import json
import sys
import time
from pathlib import Path

import psutil
import torch

from lex_pretrain.config import Config
from lex_pretrain.data.loader import Loader, open_sources
from lex_pretrain.ending import leave
from lex_pretrain.ranks import Ranks, leave_process_group
from lex_pretrain.train.distributed import init_distributed
from lex_pretrain.train.trainer import Trainer

NUM_STEPS = 4


def sent_bytes() -> int:
    """Bytes that this host's network card has sent, headers included, once all ranks are done and the wire is still."""
    torch.distributed.barrier()
    time.sleep(0.1)
    sent = psutil.net_io_counters(pernic=True)["eth0"].bytes_sent
    torch.distributed.barrier()
    return int(sent)


def bytes_of_steps(config: Config, ranks: Ranks) -> list[int]:
    """Train as a run does, without checkpoints; the first steps are those at which DeepSpeed learns the order."""
    loader = Loader(open_sources(config.data, split="train"), [1.0], config.model.sequence_length, config.run.seed)
    trainer = Trainer(config, ranks, loader, load_universal=False)
    counts = [sent_bytes()]
    for step in range(NUM_STEPS):
        trainer.train_step(step, step * config.train.global_batch_size, stop_requested=False)
        counts.append(sent_bytes())
    trainer.engine.destroy()
    return [after - before for before, after in itertools.pairwise(counts)]


def main(cases_file: str, folder: str) -> None:
    ranks = init_distributed()
    cases = json.loads(Path(cases_file).read_text())
    found = [bytes_of_steps(Config.model_validate(case), ranks) for case in cases]
    (Path(folder) / f"sent-{ranks.rank}.json").write_text(json.dumps(found))
    leave_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
    leave(0)
