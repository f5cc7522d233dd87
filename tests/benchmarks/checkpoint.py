"""What a checkpoint costs the training: how long it waits, and how much slower its steps are while one is written.

One process at hidden 768 in bf16, ZeRO stage 1, once with checkpoints in the background and once without, one after the
other.
"""

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from lex_pretrain.config import Config
from lex_pretrain.config_io import save_config
from lex_pretrain.monitor.metrics import METRICS_FILE, read_records
from tests.benchmarks.train import make_dataset

_EVERY_STEPS = 6
_STEPS = 19


def run() -> list[str]:
    """Lines of the result: seconds and ratios."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = make_dataset(folder / "data")
        return [
            f"checkpoint: hidden 768, 4 layers, every {_EVERY_STEPS} steps of 4 x 256 tokens",
            *itertools.chain.from_iterable(_measure(folder, data, in_background) for in_background in (True, False)),
        ]


def _measure(folder: Path, data: Path, in_background: bool) -> list[str]:
    output = folder / f"run-{in_background}"
    config = Config.model_validate(
        {
            "run": {"output_dir": str(output)},
            "data": {"path": str(data)},
            "model": {"num_layers": 4, "hidden_size": 768, "num_heads": 12, "sequence_length": 256},
            "train": {"num_steps": _STEPS, "global_batch_size": 4, "precision": "bf16"},
            "schedule": {"warmup_steps": 2},
            "checkpoint": {"every_steps": _EVERY_STEPS, "keep_last": 1, "in_background": in_background},
            "monitor": {"log_every_steps": 100, "wandb_mode": "disabled"},
        }
    )
    save_config(config, folder / "run.yaml")
    command = [sys.executable, "-m", "lex_pretrain", "train", "--config", str(folder / "run.yaml")]
    environment = {**os.environ, "OMP_NUM_THREADS": str(os.cpu_count())}
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL, env=environment)
    waits, alone, beside, last_begun = [], [], [], 0
    for record in read_records(output / METRICS_FILE):
        if record.get("event") == "saved":
            # The last one is at the end, for which training always waits.
            waits += [record["waited_seconds"]] if record["step"] < _STEPS else []
            last_begun = 0
        elif "event" not in record and record["step"] > 2:
            (beside if last_begun else alone).append(record["step_seconds"])
        if "event" not in record and record["step"] % _EVERY_STEPS == 0:
            last_begun = record["step"]
    step, wait = statistics.median(alone), statistics.median(waits)
    name = "in the background" if in_background else "waiting for the disk"
    lines = [
        f"  {name:20}  a step takes {step:.2f} s; training waits {wait:.2f} s a checkpoint: {wait / step:.2f} steps"
    ]
    if beside:
        lines.append(f"  {'':20}  a step beside the writing takes {statistics.median(beside) / step:.2f} times as long")
    return lines
