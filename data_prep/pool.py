"""Who does the work units: this process, more processes of this machine, or all processes of an `mpiexec` over many."""

import contextlib
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from typing import cast


@contextlib.contextmanager
def worker_pool(num_workers: int) -> Iterator[Executor | None]:
    """An executor for the process that leads, None for an MPI process that served as a worker until the end."""
    if int(os.environ.get("PMI_SIZE") or os.environ.get("OMPI_COMM_WORLD_SIZE") or 1) > 1:
        from mpi4py.futures import MPICommExecutor

        with MPICommExecutor() as executor:
            yield cast("Executor | None", executor)
        return
    pool: Executor
    if num_workers == 1:
        pool = ThreadPoolExecutor(1)
    else:
        # Spawned, not forked: the parent may hold threads of libraries that do not survive a fork.
        pool = ProcessPoolExecutor(num_workers, mp_context=multiprocessing.get_context("spawn"))
    with pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
