"""Trainings whose processes are forked from one that has imported everything, so that a start takes a second.

    python -m tests.forked_runs RUN...

Each RUN is CONFIG,NUM_PROCESSES, or that with ,killed or with ,FAULT as in tests/spoiled_run.py: a training on so many
processes, one RUN after the other. A killed one takes its time over each step, and its rank 0 is killed a step after
its first checkpoint is on the disk. Ends with the first exit code that is not as it should be.
"""

import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import deepspeed  # noqa: F401
import torch._dynamo  # noqa: F401  (an optimizer would import it in every process)

from lex_pretrain.config import Config
from lex_pretrain.config_io import load_config
from lex_pretrain.monitor.metrics import read_records
from lex_pretrain.progress import configure_logging
from lex_pretrain.train.run import train
from tests.spoiled_run import spoil_if_meant

DEADLINE_SECONDS = 120


def main() -> None:
    configure_logging(debug=False)
    for argument in sys.argv[1:]:
        file, num_processes, *extra = argument.split(",")
        killed, fault = extra == ["killed"], extra[0] if extra and extra != ["killed"] else None
        config = load_config(Path(file))
        processes = start(config, int(num_processes), fault, pause_seconds=0.3 if killed else 0.0)
        if killed:
            wait_for_save(Path(config.run.output_dir), processes)
            os.kill(processes[0], signal.SIGKILL)
        codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
        if codes[0] != (-signal.SIGKILL if killed else 0):
            sys.exit(f"{argument} ended with {codes}")


def start(config: Config, num_processes: int, fault: str | None = None, pause_seconds: float = 0.0) -> list[int]:
    """The ids of `num_processes` processes that train together, by rank; they pause after each step."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(num_processes):
        process = os.fork()
        if process == 0:
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_processes, "LOCAL_WORLD_SIZE": num_processes}
            values = {**names, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in values.items()})
            if fault is not None:
                spoil_if_meant(fault)
            try:
                train(config, after_step=lambda step: time.sleep(pause_seconds))
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        processes.append(process)
    return processes


def wait_for_save(run: Path, processes: list[int]) -> None:
    """Until a checkpoint is on the disk, and another step is done."""
    metrics = run / "metrics.jsonl"
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        records = read_records(metrics) if metrics.is_file() else []
        saved = [record["step"] for record in records if record.get("event") == "saved"]
        if saved and any(record["step"] > saved[0] for record in records if "event" not in record):
            return
        if time.monotonic() > deadline:
            for process in processes:
                os.kill(process, signal.SIGKILL)
            raise TimeoutError(f"{run}: no save within {DEADLINE_SECONDS} s")
        time.sleep(0.01)


if __name__ == "__main__":
    main()
