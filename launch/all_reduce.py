"""An all-reduce over the processes of a job, before it starts: what the network between them really does.

`launch.probe` runs it, on every host for the processes there. They are forked, so that a host imports torch once.
"""

import multiprocessing
import multiprocessing.connection
import os
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from lex_pretrain.ranks import die_with_parent, join_process_group, leave_process_group

NUM_BYTES = 16 * 2**20
NUM_REPETITIONS = 3


@dataclass(frozen=True)
class Part:
    """The processes of one host among all; `environment` has the variables by which they find the others."""

    first_rank: int
    num_processes: int
    world_size: int
    environment: dict[str, str]
    timeout_seconds: float


@dataclass(frozen=True)
class Result:
    """What came of one host's part: what failed, whose sums were wrong, and the best time of the slowest process."""

    faults: list[str] = field(default_factory=list)
    wrong_ranks: list[int] = field(default_factory=list)
    seconds: float = 0.0
    backend: str = ""


@dataclass(frozen=True)
class _Sum:
    """What one process saw, or why it saw nothing."""

    fault: str = ""
    right: bool = True
    seconds: float = 0.0
    backend: str = ""


def take_part(part: Part) -> Result:
    """Run the processes of this host to their end, which one of them that fails brings about for all."""
    # Before the processes are forked; none has touched a GPU yet.
    import torch.distributed  # noqa: F401

    fork = multiprocessing.get_context("fork")
    processes, ranks = [], {}
    for local_rank in range(part.num_processes):
        reading, writing = fork.Pipe(duplex=False)
        process = fork.Process(target=_run_process, args=(part, local_rank, writing))
        process.start()
        writing.close()
        processes.append(process)
        ranks[reading] = part.first_rank + local_rank
    sums: dict[int, _Sum] = {}
    deadline = time.monotonic() + part.timeout_seconds
    while len(sums) < len(ranks) and not any(found.fault for found in sums.values()):
        waiting = [reading for reading, rank in ranks.items() if rank not in sums]
        answered = multiprocessing.connection.wait(waiting, deadline - time.monotonic())
        sums |= {ranks[reading]: _receive(reading) for reading in waiting if reading in answered}
        if not answered:
            fault = f"not done after {part.timeout_seconds:.0f} s"
            sums |= {ranks[reading]: _Sum(fault) for reading in waiting}
    for process in processes:
        process.kill()
        process.join()
    return Result(
        faults=[f"rank {rank}: {found.fault}" for rank, found in sums.items() if found.fault],
        wrong_ranks=[rank for rank, found in sums.items() if not found.right],
        seconds=max(found.seconds for found in sums.values()),
        backend=next(iter(sums.values())).backend,
    )


def _receive(reading: Connection) -> _Sum:
    try:
        found = reading.recv()
    except EOFError:
        return _Sum("its process was killed")
    assert isinstance(found, _Sum)
    return found


def _run_process(part: Part, local_rank: int, writing: Connection) -> None:
    die_with_parent()
    # NCCL and gloo talk on the output that carries the host's answers.
    os.dup2(2, 1)
    ranks = (part.first_rank + local_rank, part.world_size, local_rank, part.num_processes)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    os.environ.update(part.environment)
    os.environ.update({name: str(value) for name, value in zip(names, ranks, strict=True)})
    try:
        found = _sum_over_all()
    except Exception as error:
        found = _Sum(fault=(str(error).strip().splitlines() or [type(error).__name__])[0])
    writing.send(found)


def _sum_over_all() -> _Sum:
    ranks = join_process_group()
    import torch
    import torch.distributed

    from lex_pretrain.hardware import device_of_rank

    right, seconds = True, []
    for _ in range(NUM_REPETITIONS):
        values = torch.full((NUM_BYTES // 4,), float(ranks.rank + 1), device=device_of_rank(ranks.local_rank))
        torch.distributed.barrier()
        started = time.perf_counter()
        torch.distributed.all_reduce(values)
        right &= bool((values == ranks.world_size * (ranks.world_size + 1) / 2).all())
        seconds.append(time.perf_counter() - started)
    backend = torch.distributed.get_backend()
    leave_process_group()
    return _Sum(right=right, seconds=min(seconds), backend=backend)
