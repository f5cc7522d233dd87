"""What a machine chooses by what it measures, and the memory that a training keeps on it."""

import platform
import subprocess
import sys

import pytest
import torch

from lex_pretrain import hardware


@pytest.mark.parametrize(("bf16", "fp32", "chosen"), [(82e9, 140e9, "fp32"), (900e9, 140e9, "bf16")])
def test_a_cpu_trains_in_the_precision_that_it_multiplies_faster(
    bf16: float, fp32: float, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rates = {"bf16": bf16, "fp32": fp32}
    monkeypatch.setattr(hardware, "measure_matmul_flops", lambda device, precision: rates[precision])
    precision, reason = hardware.choose_precision()
    assert precision == chosen
    assert f"in bf16 at {bf16 / 1e9:.0f} GFLOP/s, in fp32 at 140" in reason


# Prints the page faults of a tensor of 32 MiB after one of 64 was given up, in pages of the smallest size everywhere.
FAULTS = """
import ctypes, resource, sys, torch
from lex_pretrain.hardware import keep_freed_memory
PR_SET_THP_DISABLE = 41
ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
if sys.argv[1] == "keep":
    keep_freed_memory()
torch.ones(2**24)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones(2**23)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU no memory is kept")
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the setting")
def test_memory_that_a_tensor_gave_up_is_kept_for_the_next() -> None:
    def faults(wish: str) -> int:
        done = subprocess.run([sys.executable, "-c", FAULTS, wish], capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert faults("keep") < 100 < faults("return")
