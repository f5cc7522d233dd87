"""The training that is to be launched, with what it takes: `lex_pretrain.cli` has those work it out who know how."""

from collections.abc import Callable
from dataclasses import dataclass

from lex_pretrain.config import Config


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes of one process by the formulas of `lex-pretrain plan`.

    `states` are weights, gradients and optimizer state, which are there throughout; `gpu_peak` and `cpu_peak` have
    activations and buffers in addition, which are estimates, and that on a GPU the share that the plan leaves free;
    `offloaded` is in the host's memory on behalf of a GPU; `copied` is in it while a checkpoint is written, in the
    first process `first_copied`.
    """

    states: int
    gpu_peak: int
    cpu_peak: int
    offloaded: int
    copied: int
    first_copied: int


@dataclass(frozen=True)
class Training:
    """A config, the bytes of the checkpoints that it keeps on disk, and the memory of a process, given their number.

    `memory` raises RequestError for a number of processes that the batch or DeepSpeed's settings do not allow.
    """

    config: Config
    checkpoint_bytes: int
    memory: Callable[[int], ProcessMemory]
