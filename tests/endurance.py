"""A run and its twin that is killed six times, side by side, each under `lex-pretrain launch` on two processes.

    python -m tests.endurance --data DATASET --output DIR --steps 2000

Takes about an hour for 2,000 steps on two cores, so no test runs it. It ends with 1 unless both runs have the same
losses, learning rates and gradient norms at every step, validations and last weights, and leaves `curves.png`.
"""

import argparse
import contextlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from lex_pretrain.errors import StoppedError
from lex_pretrain.files import sha256_of_file
from lex_pretrain.monitor.metrics import METRICS_FILE, read_records, read_steps
from lex_pretrain.progress import console

CONFIG = Path(__file__).parent.parent / "configs" / "paper-mini" / "xpos.yaml"
COMPARED = ("loss", "lr", "grad_norm", "samples", "tokens")
SAVE_EVERY_STEPS = 25
NUM_VALIDATIONS = 10


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.endurance", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of a prepared dataset")
    parser.add_argument("--output", type=Path, required=True, help="folder of both runs; must not exist")
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    if arguments.steps < 8 * len(KILLS):
        parser.error(f"--steps must be at least {8 * len(KILLS)}: there are {len(KILLS)} kills")
    arguments.output.mkdir(parents=True)

    started = []

    def start(name: str) -> "subprocess.Popen[bytes]":
        started.append(start_run(name, arguments.output, arguments.data, arguments.steps))
        return started[-1]

    try:
        kill_steps = run_both(start, arguments.output / "twin", arguments.steps)
    finally:
        for launcher in started:
            launcher.terminate()
    sys.exit(compare(arguments.output, arguments.steps, kill_steps))


def run_both(start: "Callable[[str], subprocess.Popen[bytes]]", twin: Path, num_steps: int) -> list[int]:
    """Both runs to their end; returns the steps at which the twin was ended."""
    whole = start("whole")
    margin = num_steps // 12
    kill_steps = sorted(random.Random(5).sample(range(margin, num_steps - margin), len(KILLS)))
    for step, kill in zip(kill_steps, KILLS, strict=True):
        launcher = start("twin")
        wait_for_step(twin, step, kill.in_a_save, launcher)
        kill.end(psutil.Process(launcher.pid))
        say(f"{kill.name} at step {last_step(twin)}; exit code {launcher.wait()}")
        if launcher.returncode != kill.exit_code:
            raise SystemExit(f"the exit code should be {kill.exit_code}")
    say(f"the twin ended with {start('twin').wait()}, the whole run with {whole.wait()}")
    return kill_steps


def start_run(name: str, output: Path, data: Path, num_steps: int) -> "subprocess.Popen[bytes]":
    command = ["-m", "lex_pretrain", "launch", "--num-processes", "2", "--log-folder", str(output / f"{name}-logs")]
    command += ["--", "train", "--config", str(CONFIG), f"data.path={data}", f"run.output_dir={output / name}"]
    command += [f"train.num_steps={num_steps}", f"checkpoint.every_steps={SAVE_EVERY_STEPS}"]
    command += [f"train.validate_every_steps={num_steps // NUM_VALIDATIONS}"]
    with (output / f"{name}.log").open("ab") as log:
        return subprocess.Popen([sys.executable, *command], stdout=log, stderr=log, start_new_session=True)


def wait_for_step(run: Path, step: int, in_a_save: bool, launcher: "subprocess.Popen[bytes]") -> None:
    """Return after `step`, or with `in_a_save` when a checkpoint after that is being written by this launch."""
    started = time.time()
    while last_step(run) < step:
        check_runs(run, launcher)
        time.sleep(0.5)
    while in_a_save and not any(is_newer(folder, started) for folder in (run / "checkpoints").glob(".step-*.tmp")):
        check_runs(run, launcher)
        time.sleep(0.005)


def check_runs(run: Path, launcher: "subprocess.Popen[bytes]") -> None:
    if launcher.poll() is not None:
        raise SystemExit(f"{run} ended by itself with {launcher.returncode}; see {run}.log")


def is_newer(folder: Path, moment: float) -> bool:
    try:
        return folder.stat().st_mtime > moment
    except FileNotFoundError:
        return False


def last_step(run: Path) -> int:
    metrics = run / METRICS_FILE
    steps = read_steps(metrics) if metrics.is_file() else []
    return steps[-1]["step"] if steps else 0


def ranks_of(launcher: psutil.Process) -> list[psutil.Process]:
    return [process for process in launcher.children(recursive=True) if "RANK" in process.environ()]


def kill_one_rank(launcher: psutil.Process) -> None:
    ranks_of(launcher)[-1].kill()


def kill_all(launcher: psutil.Process) -> None:
    # A process that its parent's end has ended already is as dead as it is to be.
    for process in [launcher, *launcher.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def ask_launcher(launcher: psutil.Process) -> None:
    launcher.terminate()


def ask_ranks(launcher: psutil.Process) -> None:
    for rank in ranks_of(launcher):
        rank.send_signal(signal.SIGUSR1)


@dataclass(frozen=True)
class Kill:
    """A way to end a run, and the exit code that `launch` owes for it."""

    name: str
    end: Callable[[psutil.Process], None]
    exit_code: int
    in_a_save: bool = False


KILLED_RANK = 128 + signal.SIGKILL
KILLS = [
    Kill("one rank by SIGKILL", kill_one_rank, KILLED_RANK),
    Kill("all processes by SIGKILL", kill_all, -signal.SIGKILL),
    Kill("SIGTERM to the launcher", ask_launcher, StoppedError.exit_code),
    Kill("one rank by SIGKILL during a save", kill_one_rank, KILLED_RANK, in_a_save=True),
    Kill("all processes by SIGKILL during a save", kill_all, -signal.SIGKILL, in_a_save=True),
    Kill("SIGUSR1 to both ranks", ask_ranks, StoppedError.exit_code),
]


def compare(output: Path, num_steps: int, kill_steps: list[int]) -> int:
    whole, twin = (read_steps(output / name / METRICS_FILE) for name in ("whole", "twin"))
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
    validations = [validations_of(output / name) for name in ("whole", "twin")]
    records = [record for record in read_records(output / "twin" / METRICS_FILE) if "event" not in record]
    say(f"{len(records) - num_steps} steps were run again")
    say(f"{len(whole)} steps compared: {differing[0] + ' differs first' if differing else 'all equal'}")
    say(f"{len(validations[0])} validations {'are equal' if validations[0] == validations[1] else 'differ'}")
    say(f"the weights {'are equal' if len(weights) == 1 else 'differ'}")
    draw(whole, twin, kill_steps, output / "curves.png")
    return 1 if differing or len(weights) > 1 or validations[0] != validations[1] else 0


def validations_of(run: Path) -> dict[int, dict[str, Any]]:
    """What each validation found, by step; of one that was done again, the last."""
    records = read_records(run / METRICS_FILE)
    return {
        record["step"]: {key: value for key, value in record.items() if key.startswith("loss")}
        for record in records
        if record.get("event") == "validation"
    }


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
