"""The command of an existing launcher that starts `lex-pretrain SUBCOMMAND ...` on every process."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Launcher = Literal["local", "deepspeed"]

# Variables that a run reads on every host.
FORWARDED_PREFIXES = ("NCCL_", "GLOO_", "HF_", "WANDB_", "OMP_", "DS_ACCELERATOR", "LEX_")
# DeepSpeed puts forwarded variables on the remote command line, which every user of that host can read.
SECRET_MARKS = ("KEY", "TOKEN", "SECRET", "PASSWORD")


@dataclass(frozen=True)
class Command:
    """What to run, and the variables that are set or changed for it."""

    arguments: tuple[str, ...]
    environment: dict[str, str]


def local_command(subcommand: list[str], num_processes: int, num_cores: int, environment: Mapping[str, str]) -> Command:
    """`num_processes` processes on this host under torchrun, which passes the first failing exit code on."""
    arguments = (
        *(sys.executable, "-m", "launch.torchrun"),
        *("--standalone", "--nproc-per-node", str(num_processes)),
        *("--module", "lex_pretrain"),
        *subcommand,
    )
    return Command(arguments, _threads(num_processes, num_cores, environment))


def deepspeed_command(
    subcommand: list[str],
    hostfile: Path | None,
    num_processes: int,
    num_cores: int,
    environment: Mapping[str, str],
) -> Command:
    """DeepSpeed's launcher: through pdsh on the hosts of `hostfile`, or `num_processes` processes on this one."""
    # Without a hostfile DeepSpeed would read one of its own default path where that exists.
    where = ["--hostfile", str(hostfile), "--force_multi", "--no_ssh_check"] if hostfile else ["--hostfile", os.devnull]
    if hostfile is None:
        where += ["--num_gpus", str(num_processes)]
    arguments = (
        sys.executable,
        "-m",
        "deepspeed.launcher.runner",
        *where,
        "--no_local_rank",
        "--module",
        "lex_pretrain",
        *subcommand,
    )
    return Command(arguments, _threads(num_processes, num_cores, environment))


def forwarded_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What must reach the other hosts; secrets are left out and have to be set there, or logged in there."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(FORWARDED_PREFIXES) and not any(mark in name for mark in SECRET_MARKS)
    }


def _threads(num_processes: int, num_cores: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Threads of each process, unless the user has set them."""
    if "OMP_NUM_THREADS" in environment:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, num_cores // num_processes))}
