"""Optimizer state that DeepSpeed keeps in files on a local disk (ZeRO-Infinity, arXiv 2104.07857), within reach.

DeepSpeed 0.19 reads it group by group while it steps, and leaves empty tensors in between. Its own checkpoints of it
are copies of the swap files, from which it resumes without Adam's step count and without the state of groups too small
to be swapped. Here the same checkpoints are saved and loaded as for state in memory.
"""

import contextlib
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lex_pretrain.config import Config
from lex_pretrain.errors import RequestError, SharedJobError
from lex_pretrain.model.parameters import count_parameters
from lex_pretrain.ranks import Ranks, gather_lists
from lex_pretrain.train.deepspeed_config import swap_folder

# Float32 weights, two moments and gradients of what a process updates.
_SWAPPED_BYTES = 16


def check_swapping(nvme_path: str) -> None:
    """Raises RequestError where the optimizer's state cannot be kept under `zero.nvme_path` on this host."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    folder = Path(nvme_path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        os.close(os.open(probe, os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
        probe.unlink()
    except OSError as error:
        raise RequestError(
            f"zero.nvme_path {folder}: {error.strerror}; it must be a folder on a local disk that can be written past "
            "the page cache (no tmpfs)"
        ) from error
    if not AsyncIOBuilder().is_compatible():
        raise RequestError("zero.nvme_path needs libaio; install libaio-dev (apt) or libaio-devel (rpm)")


def check_swap_room(config: Config, ranks: Ranks) -> None:
    """Raises SharedJobError on all ranks where the disk of any host is too small for what its processes keep there."""
    if config.zero.nvme_path is None:
        return
    needed = _SWAPPED_BYTES * count_parameters(config.model) * ranks.local_world_size // ranks.world_size
    # What an earlier start left is written over.
    left = sum(file.stat().st_size for file in Path(swap_folder(config)).rglob("*.swp"))
    free = shutil.disk_usage(config.zero.nvme_path).free + left
    lacking = []
    if free < needed:
        lacking.append(
            f"zero.nvme_path {config.zero.nvme_path} of {socket.gethostname()} has {free / 1e6:,.1f} MB free, and the "
            f"optimizer's state of its processes takes {needed / 1e6:,.1f} MB; make room, or use more hosts"
        )
    if lacking := gather_lists(lacking, ranks):
        raise SharedJobError(lacking[0])


@contextlib.contextmanager
def within_reach(engine: Any) -> Iterator[None]:
    """Meanwhile the optimizer's tensors are those in the files, mapped into memory; to be read only."""
    if not _swaps(engine):
        yield
        return
    mapped = []
    for info in engine.optimizer.optimizer_swapper.swap_params_info.values():
        for tensor in info.tensors:
            content = torch.from_file(tensor.swap_path, shared=False, size=info.numel(), dtype=torch.float32)
            tensor.compute_tensor.data = content
            mapped.append(tensor)
    engine.optimizer.swap_optimizer = False
    try:
        yield
    finally:
        engine.optimizer.swap_optimizer = True
        for tensor in mapped:
            tensor.release_memory()


@contextlib.contextmanager
def replaced(engine: Any) -> Iterator[None]:
    """Meanwhile the optimizer's tensors are in memory, to be filled; afterwards they are in the files."""
    if not _swaps(engine):
        yield
        return
    optimizer = engine.optimizer
    swapper = optimizer.optimizer_swapper
    for info in swapper.swap_params_info.values():
        info.tensors[0].compute_tensor.data = torch.empty(info.numel(), dtype=torch.float32)
    optimizer.swap_optimizer = False
    try:
        yield
    finally:
        optimizer.swap_optimizer = True
    swapper.purge_state()
    buffers = swapper.swap_buffer_manager.allocate_all(num_elems=swapper.largest_numel, dtype=swapper.dtype)
    for weights in optimizer.fp32_partitioned_groups_flat:
        # None for a group that is too small; with the moments that were loaded for the others.
        if (info := swapper._get_param_swap_info(weights)) is not None:
            tensors, files = info.get_swap_buffers_and_paths(pinned=False)
            swapper._swap_out_unpinned_tensors(swapper.aio_handle, tensors, files, buffers)
            info.release_memory()
    swapper.swap_buffer_manager.free(buffers)


def remove_swap_files(engine: Any) -> None:
    """Remove this rank's files; the engine cannot step any more."""
    if _swaps(engine):
        shutil.rmtree(engine.optimizer.optimizer_swapper.swap_folder, ignore_errors=True)


def _swaps(engine: Any) -> bool:
    return bool(engine.zero_nvme_offload_optimizer())
