"""A conversion of a checkpoint, which one rank does while the others wait."""

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed
import torch.multiprocessing

from lex_pretrain.errors import JobError, SharedJobError
from lex_pretrain.ranks import Ranks
from lex_pretrain.train import conversion

TIMEOUT_SECONDS = 2.0


def wait_for_conversion(rank: int, folder: Path, error: Exception | None) -> None:
    def convert(*arguments: object) -> None:
        assert rank == 0
        time.sleep(3 * TIMEOUT_SECONDS)
        (folder / "converted").touch()
        if error is not None:
            raise error

    conversion.convert_to_universal = convert
    conversion.SECONDS_BETWEEN_MEETINGS = 0.2
    # The time-out holds for finding each other too, which importing torch may delay by more.
    (folder / f"here-{rank}").touch()
    while len(list(folder.glob("here-*"))) < 2:
        time.sleep(0.05)
    torch.distributed.init_process_group(
        *("gloo", f"file://{folder}/store", timedelta(seconds=TIMEOUT_SECONDS)), rank=rank, world_size=2
    )
    try:
        conversion.convert_on_first_rank(folder, folder, 1, 3, Ranks(rank, 2, rank, 2))
    except SharedJobError as shared:
        (folder / f"failed-{rank}").write_text(str(shared))
    assert (folder / "converted").exists()


@pytest.mark.parametrize("error", [None, JobError("the disk broke"), OSError("the disk is full")])
def test_all_ranks_wait_for_one_that_takes_longer_than_a_collective_may(
    tmp_path: Path, error: Exception | None
) -> None:
    torch.multiprocessing.spawn(wait_for_conversion, (tmp_path, error), nprocs=2)
    failed = [file.read_text() for file in tmp_path.glob("failed-*")]
    assert len(failed) == (0 if error is None else 2)
    assert all(str(error) in message for message in failed)
