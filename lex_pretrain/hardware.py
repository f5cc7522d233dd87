"""What this machine can do: device, precision, processes, and the rate of its matrix unit."""

import ctypes
import os
import time

import torch

from lex_pretrain.config import Precision
from lex_pretrain.errors import RequestError

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def device_of_rank(local_rank: int) -> torch.device:
    """The GPU of a process on its host, or the CPU where there is none."""
    return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")


def evaluation_dtype(precision: Precision) -> torch.dtype:
    """The number format to evaluate in: that of the training where this machine computes it, else float32."""
    if torch.cuda.is_available() or (precision == "bf16" and cpu_has_bf16()):
        return TORCH_DTYPES[precision]
    return torch.float32


def cpu_has_bf16() -> bool:
    """Whether the CPU multiplies bf16 matrices in hardware (AVX-512 BF16 or AMX); emulated, they are slower."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def choose_precision() -> tuple[Precision, str]:
    """The precision for a run that leaves it open, and why."""
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bf16", f"{name} computes bf16"
        return "fp16", f"{name} has no bf16"
    # Hardware for bf16 need not be fast: AVX-512 BF16 can be slower than float32, while AMX is many times faster.
    bf16, fp32 = (measure_matmul_flops(torch.device("cpu"), precision) / 1e9 for precision in ("bf16", "fp32"))
    return "bf16" if bf16 > fp32 else "fp32", (
        f"no GPU; this CPU multiplies matrices in bf16 at {bf16:,.0f} GFLOP/s, in fp32 at {fp32:,.0f}"
    )


def choose_num_processes() -> tuple[int, str]:
    """Processes on this host for a run that leaves it open, and why."""
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        return count, f"one for each of {count} GPUs"
    cores = len(os.sched_getaffinity(0))
    count = 2 if cores >= 2 else 1
    threads = cores // count
    return count, f"no GPU; {cores} CPU cores, {threads} thread{'s' if threads > 1 else ''} a process"


def keep_freed_memory() -> None:
    """Without a GPU, let this process keep the memory that tensors give up for the next ones, until it ends.

    By default glibc returns large blocks to the system at once, and each step takes them again page by page. That costs
    most in a virtual machine whose free pages go back to its host. The parameters are of mallopt(3); where the C
    library has none, nothing is done.
    """
    m_trim_threshold, m_mmap_max = -1, -4
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not torch.cuda.is_available():
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, -1)


def check_precision(precision: Precision) -> None:
    """Raises RequestError when this machine cannot train in `precision`."""
    if precision == "fp16" and not torch.cuda.is_available():
        raise RequestError("train.precision fp16 needs a GPU: DeepSpeed has no fp16 on the CPU. Use bf16 or fp32 here")


def measure_matmul_flops(device: torch.device, precision: Precision) -> float:
    """Floating-point operations a second of a large matrix product: what MFU is stated against."""
    size = 4096 if device.type == "cuda" else 768
    a, b = (torch.randn(size, size, device=device, dtype=TORCH_DTYPES[precision]) for _ in range(2))
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        torch.mm(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return float(2 * size**3 / min(seconds))
