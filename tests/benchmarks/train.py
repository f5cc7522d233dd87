"""What the trainer costs beside a bare loop over its own engine, and beside the Hugging Face Trainer; how it starts.

Two processes, ZeRO stage 1, bf16 on the CPU, the same sizes and batches. Every contender is a job of its own; they take
turns, and a step's time is the median over all rounds of the time from one step's start to the next one's.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from lex_pretrain.config import Config
from lex_pretrain.config_io import save_config
from lex_pretrain.data.manifest import Account, Manifest, TokenizerRecord
from lex_pretrain.data.shards import write_shard
from lex_pretrain.monitor.metrics import read_steps
from lex_pretrain.tokenizer import Tokenizer
from tests.benchmarks.prepare import train_on_python

NUM_PROCESSES = 2
CONTENDERS = ("trainer", "bare", "huggingface")
_ROUNDS = 3
_STEPS = 12
_DATASET_TOKENS = 2_000_000


def run() -> list[str]:
    """Lines of the result: tokens a second and ratios."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = _config(folder, make_dataset(folder / "data"))
        seconds: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
        starts = [_start_seconds(config, folder / f"start-{number}") for number in range(_ROUNDS)]
        for number in range(_ROUNDS):
            for contender in CONTENDERS:
                seconds[contender] += _step_seconds(contender, config, folder / f"{contender}-{number}")
    tokens_per_step = config.train.global_batch_size * config.model.sequence_length
    rates = {contender: tokens_per_step / statistics.median(taken) for contender, taken in seconds.items()}
    return [
        f"train: {NUM_PROCESSES} processes, hidden {config.model.hidden_size}, {config.model.num_layers} layers, "
        f"{config.train.global_batch_size} x {config.model.sequence_length} tokens a step",
        *(f"  {contender:12} {rate:8,.0f} tokens/s" for contender, rate in rates.items()),
        f"  trainer over bare loop of its engine {rates['trainer'] / rates['bare']:.3f}",
        f"  trainer over Hugging Face Trainer    {rates['trainer'] / rates['huggingface']:.3f}",
        "  from the command to the end of the first step {:.1f} s, resumed {:.1f} s".format(
            *map(statistics.median, zip(*starts, strict=True))
        ),
    ]


def _config(folder: Path, data: Path) -> Config:
    return Config.model_validate(
        {
            "run": {"output_dir": str(folder / "run")},
            "data": {"path": str(data)},
            "model": {"num_layers": 6, "hidden_size": 384, "num_heads": 6, "sequence_length": 256},
            "train": {"num_steps": _STEPS, "global_batch_size": 16, "micro_batch_size": 4, "precision": "bf16"},
            "schedule": {"warmup_steps": 2},
            "checkpoint": {"every_steps": 1000},
            "monitor": {"log_every_steps": 1, "wandb_mode": "disabled"},
        }
    )


def make_dataset(folder: Path) -> Path:
    """Random ids under a real tokenizer: what they say makes no step faster or slower."""
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(train_on_python(folder))
    tokenizer = Tokenizer(folder / "tokenizer.model")
    ids = np.random.default_rng(0).integers(0, tokenizer.vocab_size, _DATASET_TOKENS).astype(np.uint16)
    Manifest(
        package_version="0",
        tokenizer=TokenizerRecord(
            fingerprint=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size, eod_id=tokenizer.eod_id
        ),
        dtype="uint16",
        shards=(write_shard(folder, "shard-00000", "train", ids, np.array([0]), 0),),
        account=Account(),
        config={},
        sources=(),
    ).save(folder)
    return folder


def _save_config(config: Config, output: Path) -> Path:
    """The config of a job whose run lies in the new folder `output`."""
    output.mkdir()
    run = config.run.model_copy(update={"output_dir": str(output / "run")})
    save_config(config.model_copy(update={"run": run}), output / "config.yaml")
    return output / "config.yaml"


def _start_seconds(config: Config, output: Path) -> tuple[float, float]:
    """From `lex-pretrain launch` to the end of the first step: of a new run, and of one that goes on."""
    file = _save_config(config, output)
    command = [sys.executable, "-m", "lex_pretrain", "launch", "--num-processes", str(NUM_PROCESSES), "--", "train"]
    command += ["--config", str(file)]
    metrics = output / "run" / "metrics.jsonl"
    seconds = []
    for num_steps in (1, 2):
        started = time.perf_counter()
        training = subprocess.Popen(
            [*command, f"train.num_steps={num_steps}", "schedule.warmup_steps=1"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while training.poll() is None and (not metrics.is_file() or len(read_steps(metrics)) < num_steps):
            time.sleep(0.02)
        seconds.append(time.perf_counter() - started)
        if training.wait() != 0:
            raise RuntimeError(f"a training in {output} ended with {training.returncode}")
    return seconds[0], seconds[1]


def _step_seconds(contender: str, config: Config, output: Path) -> list[float]:
    """Times of the steps of a job, without the first third, which warms up."""
    file = _save_config(config, output)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_PROCESSES}"]
    command += ["-m", "tests.benchmarks.train_worker", contender, str(file), str(output / "starts")]
    num_threads = max(1, (os.cpu_count() or 1) // NUM_PROCESSES)
    subprocess.run(
        command,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": str(num_threads)},
    )
    starts = json.loads((output / "starts").read_text())
    return list(np.diff(starts)[_STEPS // 3 :])
