"""The job's process group with DeepSpeed on top of it."""

import logging
import os

import torch

from lex_pretrain.ranks import Ranks, join_process_group


def init_distributed() -> Ranks:
    """Join the process group and let DeepSpeed adopt it, without its chatter and without its shared-memory op.

    That op takes 40 seconds of C++ compilation at first use, and only speeds up collectives inside one CPU host, where
    gloo does the same work.
    """
    has_gpu = torch.cuda.is_available()
    if not has_gpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    ranks = join_process_group()
    import deepspeed

    deepspeed.utils.logging.logger.setLevel(logging.WARNING)
    if not has_gpu:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if has_gpu else "gloo", verbose=False)
    return ranks
