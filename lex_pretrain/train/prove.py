"""Proof, on the user's own config and machine, that a run which was killed goes on as if it had not been.

Each process of the job starts its part of three short trainings as processes of their own: one straight through, one
that is killed half way, and that one again. Run as a module, this file is such a part.
"""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from lex_pretrain.config import Config
from lex_pretrain.ending import leave, run_command
from lex_pretrain.errors import JobError, RequestError
from lex_pretrain.monitor.metrics import METRICS_FILE, read_records, read_steps
from lex_pretrain.progress import configure_logging
from lex_pretrain.ranks import die_with_parent, find_ranks
from lex_pretrain.run_folder import CHECKPOINTS_FOLDER, WEIGHTS_FILE

COMPARED = ("loss", "lr", "grad_norm")

logger = logging.getLogger("lex_pretrain")


@dataclass(frozen=True)
class Part:
    """What one process does in one of the three trainings: steps up to `last_step`, or a kill -9 of itself before."""

    config: dict[str, Any]
    last_step: int
    killed_after_step: int | None


def prove_resume(config: Config, num_steps: int) -> None:
    """Compare `num_steps` straight steps with as many that a kill interrupts half way.

    Raises JobError when a loss, learning rate, gradient norm or weight differs in any bit, and RequestError when the
    job's processes cannot be started three times over.
    """
    if not 2 <= num_steps <= config.num_steps:
        raise RequestError(f"--prove-resume {num_steps} must be from 2 to train.num_steps {config.num_steps}")
    ranks = find_ranks(os.environ)
    if ranks.world_size > 1 and "MASTER_ADDR" not in os.environ:
        raise RequestError("--prove-resume needs MASTER_ADDR with several processes; start it by `lex-pretrain launch`")
    folder = Path(f"{config.run.output_dir.rstrip('/')}.prove-resume")
    if ranks.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    straight, resumed = folder / "straight", folder / "resumed"
    kill_step = num_steps // 2
    _run_part(_part(config, straight, num_steps, None), attempt=0)
    _run_part(_part(config, resumed, num_steps, kill_step), attempt=1)
    _run_part(_part(config, resumed, num_steps, None), attempt=2)
    if ranks.rank != 0:
        return
    faults = compare(straight, resumed, num_steps)
    if faults:
        raise JobError("the resumed run is not the straight one:\n" + "\n".join(faults) + f"\nboth are in {folder}")
    (start,) = [record["step"] for record in read_records(resumed / METRICS_FILE) if record.get("event") == "resumed"]
    shutil.rmtree(folder)
    logger.info(
        "proved: %d steps straight, and %d steps killed after step %d and resumed from step %d, have the same losses, "
        "learning rates, gradient norms and weights, bit for bit",
        *(num_steps, num_steps, kill_step, start),
    )


def compare(straight: Path, resumed: Path, num_steps: int) -> list[str]:
    """Where two runs differ after `num_steps` steps: the first step of each measure, and the weights."""
    faults = []
    records = [read_steps(run / METRICS_FILE) for run in (straight, resumed)]
    for key in COMPARED:
        for one, other in zip(*records, strict=True):
            if repr(one[key]) != repr(other[key]):
                faults.append(f"{key} of step {one['step']}: {one[key]!r} straight, {other[key]!r} resumed")
                break
    checkpoint = Path(CHECKPOINTS_FOLDER) / f"step-{num_steps:08d}" / WEIGHTS_FILE
    weights = [load_file(run / checkpoint) for run in (straight, resumed)]
    differing = [name for name in weights[0] if not torch.equal(weights[0][name], weights[1][name])]
    if differing:
        largest = max(float((weights[0][name] - weights[1][name]).abs().max()) for name in differing)
        faults.append(f"{len(differing)} of {len(weights[0])} weights, by up to {largest:.3g}, first {differing[0]}")
    return faults


def _part(config: Config, output_dir: Path, num_steps: int, killed_after_step: int | None) -> Part:
    changes = {
        "run": {"output_dir": str(output_dir)},
        # One is on the disk before the kill, and steps follow it that are to be done again.
        "checkpoint": {"every_steps": max(1, num_steps // 3), "in_background": False},
        "monitor": {"wandb_mode": "disabled"},
        "train": {"validate_every_steps": None},
    }
    values = config.model_dump(mode="json")
    values |= {name: values[name] | change for name, change in changes.items()}
    return Part(values, num_steps, killed_after_step)


def _run_part(part: Part, attempt: int) -> None:
    """Run it in a process that has this one's rank and ends with it. JobError when it does not end as it should."""
    environment = dict(os.environ)
    if "MASTER_PORT" in environment:
        # Each training meets at a port of its own, kept by its first process: in what keeps the launcher's port, and in
        # the last training's while it ends, stand addresses of processes that are gone.
        environment["MASTER_PORT"] = str(int(environment["MASTER_PORT"]) + 1 + attempt)
        environment["TORCHELASTIC_USE_AGENT_STORE"] = str(False)
    command = [sys.executable, "-m", "lex_pretrain.train.prove", json.dumps(asdict(part))]
    code = subprocess.Popen(command, env=environment, preexec_fn=die_with_parent).wait()
    # A process may meet the death of another before its own.
    if (code == 0) != (part.killed_after_step is None):
        raise JobError(f"a training of the proof ended with {code}; its own message stands above")


def main() -> None:
    """Do one part."""
    from lex_pretrain.train.run import train

    part = Part(**json.loads(sys.argv[1]))
    configure_logging(debug=False)

    def kill(step: int) -> None:
        if step == part.killed_after_step:
            os.kill(os.getpid(), signal.SIGKILL)

    config = Config.model_validate(part.config)
    leave(run_command(lambda: train(config, last_step=part.last_step, after_step=kill), debug=False))


if __name__ == "__main__":
    main()
