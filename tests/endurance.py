"""A run and its twin that is killed six times, side by side, each under `lex-pretrain launch` on two processes.

    python -m tests.endurance --data DATASET --output DIR --steps 2000

Takes about an hour for 2,000 steps on two cores, so no test runs it. It ends with 1 unless both runs have the same
losses, learning rates and gradient norms at every step and the same weights at the end, and leaves `curves.png`.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lex_pretrain.files import sha256_of_file
from lex_pretrain.monitor.metrics import read_records, read_steps
from lex_pretrain.progress import console

CONFIG = Path(__file__).parent.parent / "configs" / "paper-mini" / "xpos.yaml"
COMPARED = ("loss", "lr", "grad_norm", "samples", "tokens")
SAVE_EVERY_STEPS = 25


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.endurance", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of a prepared dataset")
    parser.add_argument("--output", type=Path, required=True, help="folder of both runs; must not exist")
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    if arguments.steps < 8 * len(KILLS):
        parser.error(f"--steps must be at least {8 * len(KILLS)}: there are {len(KILLS)} kills")
    arguments.output.mkdir(parents=True)

    def start(name: str) -> "subprocess.Popen[bytes]":
        return start_run(name, arguments.output, arguments.data, arguments.steps)

    whole = start("whole")
    margin = arguments.steps // 12
    kill_steps = sorted(random.Random(5).sample(range(margin, arguments.steps - margin), len(KILLS)))
    for step, (kind, in_a_save, kill) in zip(kill_steps, KILLS, strict=True):
        launcher = start("twin")
        wait_for_step(arguments.output / "twin", step, in_a_save, launcher)
        kill(launcher.pid)
        say(f"{kind} at step {last_step(arguments.output / 'twin')}; exit code {launcher.wait()}")
    say(f"the twin ended with {start('twin').wait()}, the whole run with {whole.wait()}")
    sys.exit(compare(arguments.output, arguments.steps, kill_steps))


def start_run(name: str, output: Path, data: Path, num_steps: int) -> "subprocess.Popen[bytes]":
    command = ["-m", "lex_pretrain", "launch", "--num-processes", "2", "--log-folder", str(output / f"{name}-logs")]
    command += ["--", "train", "--config", str(CONFIG), f"data.path={data}", f"run.output_dir={output / name}"]
    command += [f"train.num_steps={num_steps}", f"checkpoint.every_steps={SAVE_EVERY_STEPS}"]
    with (output / f"{name}.log").open("ab") as log:
        return subprocess.Popen([sys.executable, *command], stdout=log, stderr=log, start_new_session=True)


def wait_for_step(run: Path, step: int, in_a_save: bool, launcher: "subprocess.Popen[bytes]") -> None:
    """Return after `step`, or with `in_a_save` when a checkpoint after that is being written by this launch."""
    started = time.time()
    while last_step(run) < step:
        if launcher.poll() is not None:
            raise SystemExit(f"{run} ended by itself with {launcher.returncode}")
        time.sleep(0.5)
    while in_a_save and not any(is_newer(folder, started) for folder in (run / "checkpoints").glob(".step-*.tmp")):
        time.sleep(0.005)


def is_newer(folder: Path, moment: float) -> bool:
    try:
        return folder.stat().st_mtime > moment
    except FileNotFoundError:
        return False


def last_step(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    steps = read_steps(metrics) if metrics.is_file() else []
    return steps[-1]["step"] if steps else 0


def processes_of(launcher_pid: int) -> list[int]:
    """The launcher and all that it started, each after its parent; the ranks are last."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = dict(map(int, line.split()) for line in listed.splitlines())
    found = [launcher_pid]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def kill_one_rank(launcher_pid: int) -> None:
    os.kill(processes_of(launcher_pid)[-1], signal.SIGKILL)


def kill_all(launcher_pid: int) -> None:
    for pid in reversed(processes_of(launcher_pid)):
        os.kill(pid, signal.SIGKILL)


def ask_launcher(launcher_pid: int) -> None:
    os.kill(launcher_pid, signal.SIGTERM)


def ask_ranks(launcher_pid: int) -> None:
    for pid in processes_of(launcher_pid)[-2:]:
        os.kill(pid, signal.SIGUSR1)


KILLS: list[tuple[str, bool, Callable[[int], None]]] = [
    ("one rank by SIGKILL", False, kill_one_rank),
    ("all processes by SIGKILL", False, kill_all),
    ("SIGTERM to the launcher", False, ask_launcher),
    ("one rank by SIGKILL during a save", True, kill_one_rank),
    ("all processes by SIGKILL during a save", True, kill_all),
    ("SIGUSR1 to both ranks", False, ask_ranks),
]


def compare(output: Path, num_steps: int, kill_steps: list[int]) -> int:
    whole, twin = (read_steps(output / name / "metrics.jsonl") for name in ("whole", "twin"))
    differing = [
        f"{key} at step {one['step']}"
        for one, other in zip(whole, twin, strict=True)
        for key in COMPARED
        if one[key] != other[key]
    ]
    weights = {
        sha256_of_file(output / name / "checkpoints" / f"step-{num_steps:08d}" / "model.safetensors")
        for name in ("whole", "twin")
    }
    records = [record for record in read_records(output / "twin" / "metrics.jsonl") if "event" not in record]
    say(f"{len(records) - num_steps} steps were run again")
    say(f"{len(whole)} steps compared: {differing[0] + ' differs first' if differing else 'all equal'}")
    say(f"the weights {'are equal' if len(weights) == 1 else 'differ'}")
    draw(whole, twin, kill_steps, output / "curves.png")
    return 1 if differing or len(weights) > 1 else 0


def draw(whole: list[dict[str, Any]], twin: list[dict[str, Any]], kill_steps: list[int], file: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for steps, label, style in (
        (whole, "whole", {"linewidth": 3, "color": "0.75"}),
        (twin, "killed six times", {"linewidth": 0.7}),
    ):
        axes.plot([record["step"] for record in steps], [record["loss"] for record in steps], label=label, **style)
    for step in kill_steps:
        axes.axvline(step, linewidth=0.8, linestyle=":", color="tab:red")
    axes.set(xlabel="step", ylabel="training loss", title="A run and its twin that was killed (dotted)")
    axes.legend()
    figure.savefig(file, dpi=110)


def say(text: str) -> None:
    console.print(time.strftime("%H:%M:%S"), text, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
