"""Run the benchmarks named on the command line, or all of them, and show their lines."""

import sys

from lex_pretrain.progress import console
from tests.benchmarks import attention, evaluate, loader, model

BENCHMARKS = {"loader": loader.run, "attention": attention.run, "model": model.run, "evaluate": evaluate.run}

if __name__ == "__main__":
    wanted = sys.argv[1:] or list(BENCHMARKS)
    if unknown := [name for name in wanted if name not in BENCHMARKS]:
        sys.exit(f"unknown benchmark {', '.join(unknown)}; known: {', '.join(BENCHMARKS)}")
    for name in wanted:
        for line in BENCHMARKS[name]():
            console.print(line)
