"""`lex-pretrain launch`: which launcher runs what, where."""

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import typer

from launch.attempt import Attempt, Outcome
from launch.commands import (
    Command,
    Launcher,
    Rendezvous,
    deepspeed_command,
    forwarded_variables,
    local_command,
    local_deepspeed_command,
    mpich_command,
    openmpi_command,
    program_path,
    slurm_command,
    threads_variable,
    torchrun_commands,
)
from launch.host_links import HostLinks
from launch.hostfile import read_hostfile, select_hosts
from launch.preflight import Preflight, preflight
from launch.rank import JOB_VARIABLE, RankTask, Show, read_failures
from launch.supervise import Patience, newest_checkpoint, supervise
from launch.training import Training
from lex_pretrain.errors import JobError, RequestError
from lex_pretrain.files import write_text

# Shown where no host was asked for a port that is free.
DRY_RUN_PORT = 29_500
SECONDS_TO_FREE = 10
# What each launcher needs on this host, and where it comes from.
PROGRAMS: Mapping[Launcher, tuple[str, str]] = {
    "deepspeed": ("pdsh", "install pdsh, for example with apt-get install pdsh"),
    "torchrun": ("ssh", "install openssh-client"),
    "mpich": ("mpiexec", "pip install mpich"),
    "openmpi": (
        "mpirun",
        "install Open MPI, for example with apt-get install openmpi-bin, and put its folder into PATH",
    ),
    "slurm": ("srun", "run this inside a Slurm allocation; launch/slurm.sbatch shows how"),
}


@dataclass(frozen=True)
class LaunchOptions:
    """What the command line of `launch` says; `num_processes` are those of one host, None for what its hosts say."""

    launcher: Launcher = "local"
    hostfile: Path | None = None
    include: str | None = None
    exclude: str | None = None
    num_processes: int | None = None
    forward: tuple[str, ...] = ()
    show: Show = "first"
    log_folder: Path = Path("launch-logs")
    host_timeout_seconds: float = 60.0
    patience: Patience = field(default_factory=Patience)
    dry_run: bool = False


def launch(options: LaunchOptions, subcommand: list[str], training: Training | None) -> int:
    """Run `lex-pretrain SUBCOMMAND ...` as the options say; returns the job's exit code.

    `training` is None for other commands than `train`. Raises RequestError when the launcher cannot be used as asked,
    JobError when the job cannot be started or goes on failing.
    """
    config = training.config if training else None
    slots = _hosts(options)
    _check_installed(options, slots)
    found_checkpoint = newest_checkpoint(config)
    launch_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{random.SystemRandom().randrange(16**4):04x}"

    def run_attempt(number: int, hosts: dict[str, int] | None) -> Outcome:
        # Once the run has begun where --resume says, a restart goes on from what it has saved since.
        begun = newest_checkpoint(config) != found_checkpoint
        arguments = without_resume(subcommand) if begun else subcommand
        if hosts is None:
            job = _Job(options, arguments, None, f"{launch_id}.{number}")
            outcome = Attempt(job.commands(), links=None).run()
            # Only Slurm's processes leave notes here; its hosts have a common file system.
            failures = read_failures(job.log_folder)
            return replace(outcome, failures=failures, exit_code=failures[0].job_exit_code) if failures else outcome
        found = preflight(hosts, training, forwarded_variables(os.environ, options.forward))
        if found.fatal and number > 0:
            # What the ended job held, a GPU's memory say, may not be free at once.
            time.sleep(SECONDS_TO_FREE)
            found = preflight(hosts, training, forwarded_variables(os.environ, options.forward))
        found.show()
        if found.fatal and number == 0:
            raise RequestError(f"nothing was started: {sum(fault.fatal for fault in found.faults)} things in the way")
        if found.fatal:
            return Outcome(JobError.exit_code)
        job = _Job(options, arguments, hosts, f"{launch_id}.{number}", found)
        job.write_files()
        links = HostLinks(hosts, launch_id, job.log_folder, options.host_timeout_seconds)
        return Attempt(job.commands(), links).run()

    if options.dry_run:
        _show(_Job(options, subcommand, slots, f"{launch_id}.0"))
        return 0
    return supervise(run_attempt, slots, options.patience, config)


def without_resume(subcommand: list[str]) -> list[str]:
    """The command without its `--resume` option, in either spelling."""
    kept = [part for part in subcommand if not part.startswith("--resume=")]
    if "--resume" in kept:
        position = kept.index("--resume")
        del kept[position : position + 2]
    return kept


class _Job:
    """One attempt's commands and the files they read."""

    def __init__(
        self,
        options: LaunchOptions,
        subcommand: list[str],
        slots: dict[str, int] | None,
        name: str,
        found: Preflight | None = None,
    ) -> None:
        self.options = options
        self.subcommand = subcommand
        self.slots = slots
        self.name = name
        self.log_folder = options.log_folder / name
        self.num_processes = max(slots.values()) if slots else options.num_processes or _processes_of_allocation()
        num_cores = len(os.sched_getaffinity(0))
        self.environment = {
            **(found.interface_variables() if found else {}),
            **forwarded_variables(os.environ, options.forward),
            **threads_variable(self.num_processes, num_cores, os.environ),
        }
        port = found.port if found and found.port else DRY_RUN_PORT
        self.meeting = Rendezvous(next(iter(slots)), port) if slots else None

    def task(self, meeting: Rendezvous | None = None) -> RankTask:
        """What each process gets; `meeting` where the launcher does not tell it itself."""
        return RankTask(
            job=self.name,
            folder=str(Path.cwd()),
            log_folder=str(self.log_folder),
            show=self.options.show,
            environment={**self.environment, **(meeting.variables() if meeting else {})},
            arguments=self.subcommand,
        )

    def write_files(self) -> None:
        """The hostfile and the variables that DeepSpeed's launcher reads."""
        self.log_folder.mkdir(parents=True, exist_ok=True)
        write_text(self.hostfile, "".join(f"{host} slots={count}\n" for host, count in (self.slots or {}).items()))
        write_text(self.environment_file, f"{JOB_VARIABLE}={self.name}\n")

    @property
    def hostfile(self) -> Path:
        return self.log_folder.absolute() / "hostfile"

    @property
    def environment_file(self) -> Path:
        return self.log_folder.absolute() / "environment"

    def commands(self) -> list[Command]:
        launcher, slots, meeting = self.options.launcher, self.slots, self.meeting
        if launcher == "slurm":
            return [self._slurm_command()]
        if slots is None or meeting is None:
            make = local_command if launcher == "local" else local_deepspeed_command
            command = make(self.subcommand, self.num_processes)
            return [Command(command.arguments, self.environment)]
        if launcher == "deepspeed":
            return [deepspeed_command(self.task(), self.hostfile, self.environment_file, meeting)]
        if launcher == "torchrun":
            return torchrun_commands(self.task(), slots, meeting)
        task = self.task(meeting)
        if launcher == "mpich":
            return [mpich_command(task, slots, self.environment)]
        return [openmpi_command(task, slots)]

    def _slurm_command(self) -> Command:
        from lex_pretrain.ranks import slurm_master

        address, port = slurm_master(os.environ)
        task = self.task(Rendezvous(address, int(port)))
        return slurm_command(task, self.options.num_processes)


def _hosts(options: LaunchOptions) -> dict[str, int] | None:
    """The hosts of the job with the processes on each; None where the launcher needs no list."""
    launcher = options.launcher
    if launcher in ("local", "slurm"):
        if options.hostfile is not None:
            where = "on this host only" if launcher == "local" else "on the hosts of the allocation"
            raise RequestError(
                f"--launcher {launcher} starts processes {where}; for --hostfile use --launcher deepspeed, torchrun, "
                "mpich or openmpi"
            )
        if launcher == "slurm" and "SLURM_JOB_ID" not in os.environ:
            raise RequestError("--launcher slurm works inside an allocation: salloc, or sbatch launch/slurm.sbatch")
        return None
    if options.hostfile is None:
        if launcher == "deepspeed":
            return None
        raise RequestError(f"--launcher {launcher} needs --hostfile; hostfile.example shows the format")
    return select_hosts(read_hostfile(options.hostfile), options.include, options.exclude)


def _processes_of_allocation() -> int:
    """Processes on each host that a Slurm allocation was made for."""
    return int(os.environ.get("SLURM_NTASKS_PER_NODE", "1"))


def _check_installed(options: LaunchOptions, slots: dict[str, int] | None) -> None:
    if options.dry_run or (slots is None and options.launcher != "slurm"):
        return
    os.environ["PATH"] = program_path()
    program, way_out = PROGRAMS[options.launcher]
    if shutil.which(program) is None:
        raise RequestError(f"--launcher {options.launcher} needs {program}, which is not installed here: {way_out}")
    if options.launcher in ("mpich", "openmpi"):
        os.environ["PATH"] = _path_to_mpi(program, is_open_mpi=options.launcher == "openmpi")


def _path_to_mpi(program: str, is_open_mpi: bool) -> str:
    """PATH with the folder of the right MPI first: two of them may be installed, with programs of the same name."""
    path = os.environ["PATH"]
    others = []
    for folder in path.split(os.pathsep):
        if (found := shutil.which(program, path=folder)) is None:
            continue
        version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
        if ("Open MPI" in version) == is_open_mpi:
            return f"{folder}{os.pathsep}{path}"
        others.append(found)
    launcher: Launcher = "openmpi" if is_open_mpi else "mpich"
    raise RequestError(f"--launcher {launcher}: {', '.join(others)} belongs to another MPI; {PROGRAMS[launcher][1]}")


def _show(job: _Job) -> None:
    """Print what would run, here and on every process of every host."""
    for command in job.commands():
        typer.echo(str(command))
    if job.slots is not None or job.options.launcher == "slurm":
        hosts = job.slots or {"each host of the allocation": job.num_processes}
        command = Command((sys.executable, "-m", "lex_pretrain", *job.subcommand), job.environment)
        for host, count in hosts.items():
            typer.echo(f"# {count} on {host}: {command}")
