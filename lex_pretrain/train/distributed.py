"""The job's process group with DeepSpeed on top of it."""

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator

import torch

from lex_pretrain.ranks import Ranks, join_process_group

logger = logging.getLogger("lex_pretrain")


@contextlib.contextmanager
def quiet_deepspeed() -> Iterator[None]:
    """Send what DeepSpeed prints to the debug log: stdout belongs to the command's own output."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        for line in printed.getvalue().splitlines():
            logger.debug("deepspeed: %s", line)


def init_distributed() -> Ranks:
    """Join the process group and let DeepSpeed adopt it, without its chatter and without its shared-memory op.

    That op takes 40 seconds of C++ compilation at first use, and only speeds up collectives inside one CPU host, where
    gloo does the same work.
    """
    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    # DeepSpeed calls torch by names that torch has renamed; its users can do nothing about it.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    ranks = join_process_group()
    import deepspeed

    deepspeed.utils.logging.logger.setLevel(logging.WARNING)
    if not has_gpu:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with quiet_deepspeed():
        deepspeed.init_distributed(dist_backend="nccl" if has_gpu else "gloo", verbose=False)
    return ranks
