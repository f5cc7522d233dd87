"""Run the benchmarks named on the command line, or all of them, and show their lines."""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from lex_pretrain.progress import console
from tests.benchmarks import (
    attention,
    checkpoint,
    decontamination,
    evaluate,
    loader,
    model,
    order,
    prepare,
    small_files,
    train,
    verification,
)

if __name__ == "__main__":
    benchmarks: dict[str, Callable[[], list[str]]] = {
        "prepare": prepare.run,
        "small_files": small_files.run,
        "order": order.run,
        "decontamination": decontamination.run,
        "loader": loader.run,
        "attention": attention.run,
        "model": model.run,
        "train": train.run,
        "checkpoint": checkpoint.run,
        "verification": verification.run,
        "evaluate": evaluate.run,
    }
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(benchmarks)}; all if not given")
    parser.add_argument("--corpus", type=Path, help=".jsonl for `prepare`; Python's own sources if not given")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in benchmarks]:
        parser.error(f"unknown benchmark {', '.join(unknown)}; known: {', '.join(benchmarks)}")
    benchmarks["prepare"] = partial(prepare.run, arguments.corpus)
    for name in arguments.names or benchmarks:
        for line in benchmarks[name]():
            console.print(line, highlight=False, soft_wrap=True)
