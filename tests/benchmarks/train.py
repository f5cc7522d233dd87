"""What the trainer costs beside a bare loop over its own engine, and beside the Hugging Face Trainer; how it starts.

Two processes, ZeRO stage 1 on the CPU, the same sizes, batches and precision. The trainer and the bare loop take turns
step by step in one job; the Hugging Face Trainer is a job of its own, and jobs take turns. A ratio is the median over
pairs: of neighbouring steps for the bare loop, of neighbouring jobs' median steps for the other.
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

from lex_pretrain.config import Config, Precision
from lex_pretrain.config_io import save_config
from lex_pretrain.data.manifest import Account, Manifest, TokenizerRecord
from lex_pretrain.data.shards import write_shard
from lex_pretrain.monitor.metrics import read_steps
from lex_pretrain.tokenizer import Tokenizer
from tests.benchmarks.prepare import train_on_python

NUM_PROCESSES = 2
_ROUNDS = 3
_STEPS = 12
_DATASET_TOKENS = 2_000_000


def run() -> list[str]:
    """Lines of the result: tokens a second and ratios, in both precisions that CPUs train in, and seconds to start."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = make_dataset(folder / "data")
        config = _config(folder, data, "bf16")
        starts = [_start_seconds(config, folder / f"start-{number}") for number in range(_ROUNDS)]
        lines = [
            f"train: {NUM_PROCESSES} processes, hidden {config.model.hidden_size}, {config.model.num_layers} layers, "
            f"{config.train.global_batch_size} x {config.model.sequence_length} tokens a step",
            "  from the command to the end of the first step {:.1f} s, resumed {:.1f} s".format(
                *map(statistics.median, zip(*starts, strict=True))
            ),
        ]
        for precision in ("bf16", "fp32"):
            lines += _compare(_config(folder, data, precision), folder / precision)
    return lines


def _compare(config: Config, folder: Path) -> list[str]:
    """Lines about one precision."""
    folder.mkdir()
    seconds: dict[str, list[float]] = {"trainer": [], "bare": [], "huggingface": []}
    over_huggingface = []
    for number in range(_ROUNDS):
        ours = _step_seconds("lex-pretrain", config, folder / f"lex-pretrain-{number}")
        theirs = _step_seconds("huggingface", config, folder / f"huggingface-{number}")
        over_huggingface.append(statistics.median(theirs["huggingface"]) / statistics.median(ours["trainer"]))
        for contender, taken in (ours | theirs).items():
            seconds[contender] += taken
    over_bare = [bare / trainer for bare, trainer in zip(seconds["bare"], seconds["trainer"], strict=True)]
    tokens_per_step = config.train.global_batch_size * config.model.sequence_length
    rates = {contender: tokens_per_step / statistics.median(taken) for contender, taken in seconds.items()}
    return [
        f"  {config.train.precision}: "
        + ", ".join(f"{contender} {rate:,.0f} tokens/s" for contender, rate in rates.items()),
        f"    trainer over bare loop of its engine {statistics.median(over_bare):.3f} (of {len(over_bare)} pairs)",
        f"    trainer over Hugging Face Trainer    {statistics.median(over_huggingface):.3f} "
        f"({min(over_huggingface):.3f} to {max(over_huggingface):.3f} in {_ROUNDS} pairs)",
    ]


def _config(folder: Path, data: Path, precision: Precision) -> Config:
    return Config.model_validate(
        {
            "run": {"output_dir": str(folder / "run")},
            "data": {"path": str(data)},
            "model": {"num_layers": 6, "hidden_size": 384, "num_heads": 6, "sequence_length": 256},
            "train": {"num_steps": _STEPS, "global_batch_size": 16, "micro_batch_size": 4, "precision": precision},
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


def _step_seconds(contender: str, config: Config, output: Path) -> dict[str, list[float]]:
    """Times of the steps of a job by whose they are, without the first third, which warm up."""
    file = _save_config(config, output)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_PROCESSES}"]
    command += ["-m", "tests.benchmarks.train_worker", contender, str(file), str(output / "seconds")]
    num_threads = max(1, (os.cpu_count() or 1) // NUM_PROCESSES)
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(num_threads)},
    )
    if done.returncode != 0:
        raise RuntimeError(f"{contender} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    seconds: dict[str, list[float]] = json.loads((output / "seconds").read_text())
    return {contender: taken[_STEPS // 3 :] for contender, taken in seconds.items()}
