"""The most memory that a stretch of work held."""

import resource
from pathlib import Path

import torch

# Linux tells and resets the peak of the resident set (man 5 proc); elsewhere it is the peak since the process began.
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def reset_peak_memory(device: torch.device) -> None:
    """Begin a new stretch."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _CLEAR.exists():
        _CLEAR.write_text(_RESET_PEAK)


def peak_memory_bytes(device: torch.device) -> int:
    """Largest memory since the reset: of the GPU's allocator, or of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if _STATUS.exists():
        peak = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(peak.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
