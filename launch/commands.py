"""The commands of existing launchers that start `lex-pretrain SUBCOMMAND ...` on every process.

Pure functions: they look at nothing but their arguments, so that `--dry-run` prints what would really run.
"""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from launch.rank import JOB_VARIABLE, RankTask
from launch.ssh import ALIVE_OPTIONS, remote_python, ssh_command
from lex_pretrain.errors import RequestError

Launcher = Literal["local", "deepspeed", "torchrun", "mpich", "openmpi", "slurm"]

# Variables that a run reads on every host.
FORWARDED_PREFIXES = ("NCCL_", "GLOO_", "HF_", "WANDB_", "OMP_", "DS_ACCELERATOR", "LEX_")
# What is forwarded stands on remote command lines, which every user of that host can read.
SECRET_MARKS = ("KEY", "TOKEN", "SECRET", "PASSWORD")
# How long srun lets the others run when one process has ended.
SECONDS_AFTER_FIRST_END = 60
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@dataclass(frozen=True)
class Command:
    """What to run on this host, and the variables that are set or changed for it."""

    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    folder: str | None = None

    def __str__(self) -> str:
        settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.environment.items())
        return f"{settings} {shlex.join(self.arguments)}".strip()


@dataclass(frozen=True)
class Rendezvous:
    """Where rank 0 listens for all others."""

    address: str
    port: int

    def variables(self) -> dict[str, str]:
        return {"MASTER_ADDR": self.address, "MASTER_PORT": str(self.port)}


def local_command(subcommand: Sequence[str], num_processes: int) -> Command:
    """`num_processes` processes on this host under torchrun, which passes the first failing exit code on."""
    return Command(
        (
            *(sys.executable, "-m", "launch.torchrun"),
            *("--standalone", "--nproc-per-node", str(num_processes)),
            *("--module", "lex_pretrain"),
            *subcommand,
        )
    )


def local_deepspeed_command(subcommand: Sequence[str], num_processes: int) -> Command:
    """`num_processes` processes on this host under DeepSpeed's launcher."""
    return Command(
        (
            *(sys.executable, "-m", "deepspeed.launcher.runner"),
            # Without a hostfile DeepSpeed would read one of its own default path where that exists.
            *("--hostfile", os.devnull, "--num_gpus", str(num_processes)),
            *("--no_local_rank", "--module", "lex_pretrain"),
            *subcommand,
        )
    )


def deepspeed_command(task: RankTask, hostfile: Path, environment_file: Path, meeting: Rendezvous) -> Command:
    """DeepSpeed's launcher on the hosts of `hostfile`, through pdsh.

    `environment_file` is read by DeepSpeed: it marks the processes on each host as those of the job.
    """
    arguments = (
        *(sys.executable, "-m", "deepspeed.launcher.runner"),
        *("--hostfile", str(hostfile), "--force_multi", "--no_ssh_check", "--launcher_args=-N"),
        *("--master_addr", meeting.address, "--master_port", str(meeting.port)),
        *("--no_local_rank", "--module", "launch.rank", task.encode()),
    )
    environment = {"DS_ENV_FILE": str(environment_file), "PDSH_SSH_ARGS_APPEND": shlex.join(ALIVE_OPTIONS)}
    # DeepSpeed goes to the current folder on each host without quoting its name; launch.rank finds its own way.
    folder = str(Path.cwd())
    safe = shlex.quote(folder) == folder
    return Command(arguments, environment, folder=None if safe else "/")


def torchrun_commands(task: RankTask, slots: Mapping[str, int], meeting: Rendezvous) -> list[Command]:
    """One torchrun on each host, through ssh."""
    return [
        Command(
            ssh_command(
                host,
                remote_python(
                    *("launch.torchrun", "--nnodes", str(len(slots)), "--node-rank", str(number)),
                    *("--nproc-per-node", str(count)),
                    *("--master-addr", meeting.address, "--master-port", str(meeting.port)),
                    *("--module", "launch.rank", task.encode()),
                ),
                {JOB_VARIABLE: task.job},
            )
        )
        for number, (host, count) in enumerate(slots.items())
    ]


def mpich_command(task: RankTask, slots: Mapping[str, int], environment: Mapping[str, str]) -> Command:
    """MPICH's mpiexec, through ssh. The environment travels through its own connection, not on command lines."""
    interface = next((environment[name] for name in INTERFACE_VARIABLES if name in environment), None)
    arguments = (
        *("mpiexec", "-launcher", "ssh", "-hosts", _hosts_with_slots(slots), "-n", str(sum(slots.values()))),
        *(("-iface", interface) if interface else ()),
        *(sys.executable, "-m", "launch.rank", task.encode()),
    )
    return Command(arguments, {JOB_VARIABLE: task.job, "HYDRA_LAUNCHER_EXTRA_ARGS": shlex.join(ALIVE_OPTIONS)})


def openmpi_command(task: RankTask, slots: Mapping[str, int]) -> Command:
    """Open MPI's mpirun, through ssh."""
    arguments = (
        *("mpirun", "--host", _hosts_with_slots(slots), "-np", str(sum(slots.values()))),
        *("-x", JOB_VARIABLE, *(("-x", "PYTHONPATH") if "PYTHONPATH" in os.environ else ())),
        *(sys.executable, "-m", "launch.rank", task.encode()),
    )
    return Command(arguments, {JOB_VARIABLE: task.job})


def slurm_command(task: RankTask, processes_per_host: int | None) -> Command:
    """Slurm's srun inside an allocation, on all of its hosts; as many processes as it was made for if None."""
    arguments = (
        # Not --kill-on-bad-exit: when all stop on a signal, it would end those that are still saving.
        *("srun", f"--wait={SECONDS_AFTER_FIRST_END}", "--mpi=none"),
        *(("--ntasks-per-node", str(processes_per_host)) if processes_per_host else ()),
        *(sys.executable, "-m", "launch.rank", task.encode()),
    )
    return Command(arguments, {JOB_VARIABLE: task.job})


def program_path() -> str:
    """Where to look for launchers: first beside the interpreter, where the mpich package puts mpiexec."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def forwarded_variables(environment: Mapping[str, str], names: Sequence[str] = ()) -> dict[str, str]:
    """What must reach the other hosts: known prefixes, and `names`.

    Secrets are left out and have to be set there, or logged in there; RequestError when one is in `names`.
    """
    for name in names:
        if name not in environment:
            raise RequestError(f"--forward {name}: not set here")
        if _is_secret(name):
            raise RequestError(
                f"--forward {name}: it looks like a secret, and would stand on command lines that all users of the "
                "hosts can read; set it in the hosts' own environment, or log in there"
            )
    return {
        name: value
        for name, value in environment.items()
        if name in names or (name.startswith(FORWARDED_PREFIXES) and not _is_secret(name))
    }


def threads_variable(num_processes: int, num_cores: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Threads of each process, unless the user has set them."""
    if "OMP_NUM_THREADS" in environment:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, num_cores // num_processes))}


def _is_secret(name: str) -> bool:
    return any(mark in name for mark in SECRET_MARKS)


def _hosts_with_slots(slots: Mapping[str, int]) -> str:
    return ",".join(f"{host}:{count}" for host, count in slots.items())
