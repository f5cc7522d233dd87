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


def wait_for_conversion(rank: int, folder: Path, fails: bool) -> None:
    def convert(*arguments: object) -> None:
        assert rank == 0
        time.sleep(3 * TIMEOUT_SECONDS)
        (folder / "converted").touch()
        if fails:
            raise JobError("the disk broke")

    conversion.convert_to_universal = convert
    conversion.SECONDS_BETWEEN_MEETINGS = 0.2
    torch.distributed.init_process_group(
        *("gloo", f"file://{folder}/store", timedelta(seconds=TIMEOUT_SECONDS)), rank=rank, world_size=2
    )
    try:
        conversion.convert_on_first_rank(folder, folder, 1, 3, Ranks(rank, 2, rank, 2))
    except SharedJobError as error:
        (folder / f"failed-{rank}").write_text(str(error))
    assert (folder / "converted").exists()


@pytest.mark.parametrize("fails", [False, True])
def test_all_ranks_wait_for_one_that_takes_longer_than_a_collective_may(tmp_path: Path, fails: bool) -> None:
    torch.multiprocessing.spawn(wait_for_conversion, (tmp_path, fails), nprocs=2)
    failed = [file.read_text() for file in tmp_path.glob("failed-*")]
    assert failed == (["the disk broke"] * 2 if fails else [])
