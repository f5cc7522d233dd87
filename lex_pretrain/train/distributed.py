"""Who this process is in the job, found alike under torchrun, deepspeed, mpiexec, srun or no launcher."""

import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed

from lex_pretrain.errors import RequestError

COLLECTIVE_TIMEOUT = timedelta(minutes=30)

# Launchers that do not set torch's names: variable of the rank, of the world size, of the rank on the host, of the
# number of ranks on the host.
_MPI_VARIABLES = (
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)

logger = logging.getLogger("lex_pretrain")


@dataclass(frozen=True)
class Ranks:
    """This process among all of the job, and among those on its host."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def find_ranks(environment: Mapping[str, str]) -> Ranks:
    """Ranks from a launcher's environment variables; one process alone where there are none."""
    if "RANK" in environment:
        world_size = int(environment["WORLD_SIZE"])
        return Ranks(
            int(environment["RANK"]),
            world_size,
            int(environment.get("LOCAL_RANK", 0)),
            int(environment.get("LOCAL_WORLD_SIZE", world_size)),
        )
    for rank, size, local_rank, local_world_size in _MPI_VARIABLES:
        if rank in environment and size in environment:
            total = int(environment[size])
            return Ranks(
                int(environment[rank]),
                total,
                int(environment.get(local_rank, environment[rank])),
                int(environment.get(local_world_size, total)),
            )
    return Ranks(0, 1, 0, 1)


def init_distributed() -> Ranks:
    """Join the job's process group: NCCL where there are GPUs, gloo on CPUs. Raises RequestError when it cannot."""
    ranks = find_ranks(os.environ)
    if torch.distributed.is_initialized():
        return ranks
    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    if "MASTER_ADDR" not in os.environ:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = _agree_on_master(ranks)
    for name, value in (
        ("RANK", ranks.rank),
        ("WORLD_SIZE", ranks.world_size),
        ("LOCAL_RANK", ranks.local_rank),
        ("LOCAL_WORLD_SIZE", ranks.local_world_size),
    ):
        os.environ[name] = str(value)
    if has_gpu:
        torch.cuda.set_device(ranks.local_rank)
    torch.distributed.init_process_group(
        "nccl" if has_gpu else "gloo",
        timeout=COLLECTIVE_TIMEOUT,
        device_id=torch.device("cuda", ranks.local_rank) if has_gpu else None,
    )
    _init_deepspeed(has_gpu)
    return ranks


def leave_distributed() -> None:
    """End the process group at the end of a job, where there is one."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _agree_on_master(ranks: Ranks) -> tuple[str, str]:
    """Address and free port of rank 0, which mpi4py tells all others where no launcher did."""
    if ranks.world_size == 1:
        return "127.0.0.1", str(_free_port())
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise RequestError(
            f"started as rank {ranks.rank} of {ranks.world_size} without MASTER_ADDR, and mpi4py cannot agree on one: "
            f"{error}. Set MASTER_ADDR and MASTER_PORT, or start with `lex-pretrain launch`"
        ) from error
    if MPI.COMM_WORLD.size != ranks.world_size:
        raise RequestError(
            f"the launcher started {ranks.world_size} processes, but mpi4py sees {MPI.COMM_WORLD.size}: they belong to "
            "different MPI installations. Set MASTER_ADDR and MASTER_PORT, or use the mpiexec that mpi4py was made for"
        )
    mine = (socket.gethostbyname(socket.gethostname()), str(_free_port())) if ranks.rank == 0 else None
    address, port = MPI.COMM_WORLD.bcast(mine, root=0)
    return str(address), str(port)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def _init_deepspeed(has_gpu: bool) -> None:
    """Let DeepSpeed adopt the process group, without its chatter and without compiling its shared-memory op.

    That op takes 40 seconds of C++ at first use and serves CPU collectives on one host only; gloo does the same work.
    """
    import deepspeed

    deepspeed.utils.logging.logger.setLevel(logging.WARNING)
    if not has_gpu:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if has_gpu else "gloo", verbose=False)
