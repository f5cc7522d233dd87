"""One process of a timed all-reduce: what the network between the processes really does."""

import sys
import time

from lex_pretrain.errors import JobError
from lex_pretrain.progress import configure_logging, logger
from lex_pretrain.ranks import join_process_group, leave_process_group

NUM_BYTES = 16 * 2**20
NUM_REPETITIONS = 5


def main() -> None:
    """Sum a tensor over all processes, check the sum, and say on rank 0 how long it took."""
    configure_logging(debug=False)
    ranks = join_process_group()
    import torch
    import torch.distributed

    from lex_pretrain.hardware import device_of_rank

    seconds = []
    for _ in range(NUM_REPETITIONS):
        values = torch.full((NUM_BYTES // 4,), float(ranks.rank + 1), device=device_of_rank(ranks.local_rank))
        torch.distributed.barrier()
        started = time.perf_counter()
        torch.distributed.all_reduce(values)
        right = bool((values == ranks.world_size * (ranks.world_size + 1) / 2).all())
        seconds.append(time.perf_counter() - started)
        if not right:
            raise JobError(f"rank {ranks.rank}: the sum over all processes is wrong")
    if ranks.rank == 0:
        best = min(seconds)
        # What crosses each process's link in a ring: twice the tensor but for one part of it.
        link_bytes = 2 * NUM_BYTES * (ranks.world_size - 1) / ranks.world_size
        logger.info(
            "all-reduce of %d MiB over %d processes: correct, %.0f ms, %.2f GB/s a link",
            NUM_BYTES // 2**20,
            ranks.world_size,
            1e3 * best,
            link_bytes / best / 1e9,
        )
    leave_process_group()


if __name__ == "__main__":
    try:
        main()
    except JobError as error:
        logger.error("error: %s", error)
        sys.exit(error.exit_code)
