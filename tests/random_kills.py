"""A training that is killed at random moments, and started again, until it is done; and its twin that never was.

    python -m tests.random_kills --config CONFIG --kills 100 [--seed 1]

CONFIG saves, validates and prunes checkpoints every few steps. Between starts the clock that files are dated by may be
an hour off, as after a battery change. Prints a JSON summary and ends with 1 unless every step's losses and the last
weights are those of the twin, bit for bit, no process is left, and no temporary file is.
"""

import argparse
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from lex_pretrain.config import Config
from lex_pretrain.config_io import load_config
from lex_pretrain.files import sha256_of_file
from lex_pretrain.monitor.metrics import METRICS_FILE, read_records, read_steps
from lex_pretrain.progress import configure_logging
from lex_pretrain.run_folder import CHECKPOINTS_FOLDER, WEIGHTS_FILE, step_folder
from tests.forked_runs import start

_COMPARED = ("loss", "lr", "grad_norm", "samples", "tokens")
_HOUR_SECONDS = 3600
_DEADLINE_SECONDS = 120


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.random_kills", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    configure_logging(debug=False)
    config = load_config(arguments.config)
    output = Path(config.run.output_dir)
    summary = kill_at_random(config, arguments.kills, random.Random(arguments.seed))
    run_to_its_end(config)
    twin = config.model_copy(update={"run": config.run.model_copy(update={"output_dir": f"{output}-twin"})})
    run_to_its_end(twin)
    summary |= compare(output, Path(twin.run.output_dir), config.num_steps)
    sys.stdout.write(json.dumps(summary) + "\n")
    sys.exit(0 if not summary["differences"] and not summary["left"] else 1)


def kill_at_random(config: Config, num_kills: int, generator: random.Random) -> dict[str, Any]:
    """Start it again and again, and kill it after a random time of training, or on its way to that."""
    output = Path(config.run.output_dir)
    moments: Counter[str] = Counter()
    for number in range(num_kills):
        before = records_of(output)
        (child,) = start(config, num_processes=1)
        if generator.random() < 0.8:
            wait_for_a_step(output, len(before), child)
        time.sleep(generator.uniform(0, 0.6))
        if ended := os.waitpid(child, os.WNOHANG)[0]:
            raise SystemExit(f"start {number} ended by itself ({ended}); give the config more steps")
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        moments[moment_of(output, records_of(output)[len(before) :])] += 1
        if generator.random() < 0.3:
            shift_clock(output, generator.choice((-_HOUR_SECONDS, _HOUR_SECONDS)))
    return {"kills": num_kills, "moments": dict(moments)}


def moment_of(output: Path, records: list[dict[str, Any]]) -> str:
    """What the run was about when it was killed, by what stands on the disk."""
    names = [path.name for path in (output / CHECKPOINTS_FOLDER).glob(".step-*")]
    if any(name.endswith(".tmp") for name in names):
        return "writing a checkpoint"
    if names:
        return "removing a checkpoint"
    if not records:
        return "starting"
    return "after a validation" if records[-1].get("event") == "validation" else "training"


def records_of(output: Path) -> list[dict[str, Any]]:
    file = output / METRICS_FILE
    return read_records(file) if file.is_file() else []


def wait_for_a_step(output: Path, num_records: int, child: int) -> None:
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while not any("loss" in record for record in records_of(output)[num_records:]):
        if os.waitpid(child, os.WNOHANG)[0]:
            raise SystemExit("a start ended before its first step; its words stand above")
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            raise SystemExit("no step within two minutes")
        time.sleep(0.02)


def shift_clock(output: Path, seconds: int) -> None:
    """Date all files as a clock would have that was off by so much when they were written."""
    for path in output.rglob("*"):
        if path.is_file():
            state = path.stat()
            os.utime(path, (state.st_atime + seconds, state.st_mtime + seconds))


def run_to_its_end(config: Config) -> None:
    (child,) = start(config, num_processes=1)
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        raise SystemExit(f"{config.run.output_dir} ended with {code}")


def compare(output: Path, twin: Path, num_steps: int) -> dict[str, Any]:
    """Differences between the two runs, and what the kills left behind."""
    killed, whole = (read_steps(folder / METRICS_FILE) for folder in (output, twin))
    differences = [
        f"{key} at step {one['step']}"
        for one, other in zip(killed, whole, strict=True)
        for key in _COMPARED
        if one[key] != other[key]
    ]
    weights = [step_folder(folder / CHECKPOINTS_FOLDER, num_steps) / WEIGHTS_FILE for folder in (output, twin)]
    if len({sha256_of_file(file) for file in weights}) > 1:
        differences.append("the last weights")
    left = [str(path.relative_to(output)) for path in output.rglob("*.tmp")]
    left += [f"process {child.pid}" for child in psutil.Process().children(recursive=True)]
    num_run = sum("event" not in record for record in records_of(output))
    return {"steps": len(killed), "steps_run_again": num_run - len(killed), "differences": differences, "left": left}


if __name__ == "__main__":
    main()
