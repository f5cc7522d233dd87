"""Who this process is in a job, found alike under torchrun, deepspeed, mpiexec, srun or no launcher.

Finding ranks needs no torch: the launching side and its wrappers do it too, and start at once.
"""

import ctypes
import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from lex_pretrain.errors import RequestError

COLLECTIVE_TIMEOUT = timedelta(minutes=30)

_FIRST_SLURM_PORT = 20_000
_NUM_SLURM_PORTS = 10_000
_PR_SET_PDEATHSIG = 1

_TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# Launchers that do not set torch's names: variables of the rank, of the number of ranks, of the rank on its host, and
# of the number of ranks there.
_MPI_VARIABLES = (
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    # SLURM_NTASKS is also set in a batch script, which is one process.
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)


@dataclass(frozen=True)
class Ranks:
    """This process among all of the job, and among those on its host."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def find_ranks(environment: Mapping[str, str]) -> Ranks:
    """Ranks from a launcher's environment variables; one process alone where there are none."""
    names = _variables_of_launcher(environment)
    if names is None:
        return Ranks(0, 1, 0, 1)
    rank, world_size, local_rank, local_world_size = names
    return Ranks(
        int(environment[rank]),
        int(environment[world_size]),
        int(environment.get(local_rank, environment[rank])),
        int(environment.get(local_world_size, environment[world_size])),
    )


def _variables_of_launcher(environment: Mapping[str, str]) -> tuple[str, str, str, str] | None:
    for names in (_TORCH_VARIABLES, *_MPI_VARIABLES):
        if names[0] in environment and names[1] in environment:
            return names
    return None


def join_process_group() -> Ranks:
    """Join the job's process group: NCCL where there are GPUs, gloo on CPUs. Raises RequestError when it cannot.

    Leaves torch's variables (RANK, WORLD_SIZE, ...) set whatever the launcher was.
    """
    import torch.distributed

    from lex_pretrain.hardware import device_of_rank

    ranks = find_ranks(os.environ)
    if torch.distributed.is_initialized():
        return ranks
    # A process on its own has nobody to meet, and a port that was free a moment ago may be another's by now.
    alone = ranks.world_size == 1
    if "MASTER_ADDR" not in os.environ:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = _agree_on_master(ranks)
    for name, value in vars(ranks).items():
        os.environ[name.upper()] = str(value)
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(ranks.local_rank)
    torch.distributed.init_process_group(
        "nccl" if has_gpu else "gloo",
        timeout=COLLECTIVE_TIMEOUT,
        store=torch.distributed.HashStore() if alone else None,  # type: ignore[attr-defined]
        rank=0 if alone else -1,
        world_size=1 if alone else -1,
        device_id=device_of_rank(ranks.local_rank) if has_gpu else None,
    )
    return ranks


def leave_process_group() -> None:
    """End the process group at the end of a job, where there is one."""
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def die_with_parent() -> None:
    """In a process just started: end it when its parent is killed, so that none is left behind."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def gather_lists(mine: list[Any], ranks: Ranks) -> list[Any]:
    """The items of all ranks on every rank, in the order of the ranks."""
    if ranks.world_size == 1:
        return mine
    import torch.distributed

    parts: list[list[Any]] = [[] for _ in range(ranks.world_size)]
    torch.distributed.all_gather_object(parts, mine)
    return [item for part in parts for item in part]


def _agree_on_master(ranks: Ranks) -> tuple[str, str]:
    """Address and free port of rank 0, which mpi4py tells all others where no launcher did."""
    if ranks.world_size == 1:
        return "127.0.0.1", str(_free_port())
    if "SLURM_PROCID" in (_variables_of_launcher(os.environ) or ()):
        return slurm_master(os.environ)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise RequestError(
            f"started as rank {ranks.rank} of {ranks.world_size} without MASTER_ADDR, and mpi4py cannot agree on one: "
            f"{error}. Set MASTER_ADDR and MASTER_PORT, or start with `lex-pretrain launch`"
        ) from error
    if ranks.world_size != MPI.COMM_WORLD.size:
        raise RequestError(
            f"the launcher started {ranks.world_size} processes, but mpi4py sees {MPI.COMM_WORLD.size}: they belong to "
            "different MPI installations. Set MASTER_ADDR and MASTER_PORT, or use the mpiexec that mpi4py was made for"
        )
    mine = (socket.gethostbyname(socket.gethostname()), str(_free_port())) if ranks.rank == 0 else None
    address, port = MPI.COMM_WORLD.bcast(mine, root=0)
    return str(address), str(port)


def slurm_master(environment: Mapping[str, str]) -> tuple[str, str]:
    """First host of a Slurm step or allocation, and a port that all of its processes derive alike.

    Raises RequestError where Slurm's own `scontrol` cannot be run.
    """
    hosts = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
    try:
        names = subprocess.run(["scontrol", "show", "hostnames", hosts], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise RequestError(
            f"scontrol cannot list the hosts {hosts}: {error}. Set MASTER_ADDR and MASTER_PORT"
        ) from error
    number = int(environment["SLURM_JOB_ID"]) * 16 + int(environment.get("SLURM_STEP_ID", "0"))
    return names.stdout.split()[0], str(_FIRST_SLURM_PORT + number % _NUM_SLURM_PORTS)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])
