"""Run by tests/test_robustness.py: a training that saves after every other step, killed at random moments of a save.

    python -m tests.killed_saves CONFIG NUM_KILLS

Prints a JSON list of what stood on the disk at each kill.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from lex_pretrain.config_io import load_config
from lex_pretrain.monitor.metrics import read_records, read_steps
from tests.forked_runs import start

DEADLINE_SECONDS = 60


def main() -> None:
    config, num_kills = load_config(Path(sys.argv[1])), int(sys.argv[2])
    checkpoints = Path(config.run.output_dir) / "checkpoints"
    metrics = checkpoints.parent / "metrics.jsonl"
    generator = random.Random(1)
    found = []
    for _ in range(num_kills):
        num_events = len(read_records(metrics)) if metrics.is_file() else 0
        (child,) = start(config, num_processes=1)
        wait_for_a_save(checkpoints, metrics, num_events)
        time.sleep(generator.uniform(0, 0.08))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        names = sorted(path.name for path in checkpoints.iterdir())
        resumed = [record["step"] for record in read_records(metrics)[num_events:] if record.get("event") == "resumed"]
        found.append(
            {
                "killed": os.WIFSIGNALED(status),
                "resumed": resumed,
                "last_step": read_steps(metrics)[-1]["step"],
                "newest": max((int(name[5:]) for name in names if name.startswith("step-")), default=0),
                "unfinished": [name for name in names if name.startswith(".step-")],
            }
        )
    print(json.dumps(found))  # noqa: T201


def wait_for_a_save(checkpoints: Path, metrics: Path, num_events: int) -> None:
    """Until this start has saved at least once and begins to save again."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no save within {DEADLINE_SECONDS} s")
        new = read_records(metrics)[num_events:] if metrics.is_file() else []
        if any(record.get("event") == "saved" for record in new):
            break
        time.sleep(0.01)
    while not list(checkpoints.glob(".step-*.tmp")) and time.monotonic() < deadline:
        time.sleep(0.001)


if __name__ == "__main__":
    main()
