"""What preflight judges of one host: memory (this machine's own facts, given other memory), an all-reduce alone."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from launch.all_reduce import Part, Result
from launch.faults import Fault, all_reduce_faults, memory_faults
from launch.probe import Facts, Gpu, Question, find_gpus, gather_facts
from launch.training import ProcessMemory, Training
from lex_pretrain.config import Config
from lex_pretrain.errors import RequestError

GIB = 2**30
# Of one process: 4 GiB throughout, 10 at the peak on a GPU, 8 on a CPU.
MEMORY = ProcessMemory(states=4 * GIB, gpu_peak=10 * GIB, cpu_peak=8 * GIB, offloaded=0, copied=0, first_copied=0)


@pytest.fixture(scope="module")
def facts() -> Facts:
    return gather_facts(Question([], None))


def faults_of(facts: Facts, config: Config, memory: ProcessMemory = MEMORY, slots: int = 3) -> list[Fault]:
    """Of two hosts, the first with the facts, the second with one process and room for everything."""
    roomy = dataclasses.replace(facts, gpus=[], memory_available_bytes=1000 * GIB)
    training = Training(config, 0, lambda world_size: memory)
    return memory_faults({"a": facts, "b": roomy}, {"a": slots, "b": 1}, training)


def test_states_must_fit_and_activations_should_on_cpus(facts: Facts, tiny_config: Callable[..., Config]) -> None:
    config = tiny_config(zero={"stage": 3}, train={"micro_batch_size": 1})

    def with_memory(num_gib: int) -> list[Fault]:
        limited = dataclasses.replace(facts, gpus=[], memory_available_bytes=num_gib * GIB, memory_is_limited=True)
        return faults_of(limited, config)

    assert with_memory(24) == []
    (tight,) = with_memory(23)
    assert not tight.fatal
    assert "3 of 4 processes fit, but take about 24.0 GiB" in tight.what
    assert tight.way_out.startswith("train.activation_checkpointing=1")
    (lacking,) = with_memory(11)
    assert lacking.fatal
    assert lacking.host == "a"
    assert "3 of 4 processes take 12.0 GiB; its control group has 11.0 GiB left" in lacking.what
    assert lacking.way_out == "fewer slots, more hosts"
    limited = dataclasses.replace(facts, gpus=[], memory_available_bytes=3 * GIB, memory_is_limited=True)
    (only_one,) = faults_of(limited, config, slots=1)
    assert only_one.way_out == "more hosts"


def test_each_gpu_must_hold_its_process_and_the_host_what_is_offloaded(
    facts: Facts, tiny_config: Callable[..., Config]
) -> None:
    def with_gpus(free_gib: list[int], offloaded_gib: int = 0, host_gib: int = 100) -> list[Fault]:
        gpus = [Gpu("a GPU", "1.0", 20 * 1024, (20 - free) * 1024) for free in free_gib]
        host = dataclasses.replace(facts, gpus=gpus, memory_available_bytes=host_gib * GIB, memory_is_limited=False)
        memory = dataclasses.replace(MEMORY, offloaded=offloaded_gib * GIB)
        return faults_of(host, tiny_config(zero={"stage": 2, "offload_optimizer": bool(offloaded_gib)}), memory)

    # The fourth GPU has no process.
    assert with_gpus([12, 20, 10, 1]) == []
    (tight,) = with_gpus([12, 9, 10])
    assert not tight.fatal
    assert "GPU 1 has 9.0 GiB left" in tight.what
    (lacking,) = with_gpus([12, 9, 3])
    assert lacking.fatal
    assert "each of 4 processes take 4.0 GiB; GPU 2 has 3.0 GiB left" in lacking.what
    assert lacking.way_out == "a higher zero.stage, zero.offload_optimizer=true, more GPUs"
    assert with_gpus([20, 20, 20], offloaded_gib=10, host_gib=30) == []
    (offloading,) = with_gpus([20, 20, 20], offloaded_gib=10, host_gib=29)
    assert offloading.fatal
    assert "what 3 of 4 processes offload takes 30.0 GiB; the host has 29.0 GiB left" in offloading.what


def test_a_host_that_holds_the_processes_but_not_the_copies_they_save_from(
    facts: Facts, tiny_config: Callable[..., Config]
) -> None:
    def with_memory(num_gib: int, on_gpus: bool, in_background: bool = True) -> list[Fault]:
        gpus = [Gpu("a GPU", "1.0", 20 * 1024, 0)] * (3 if on_gpus else 0)
        host = dataclasses.replace(facts, gpus=gpus, memory_available_bytes=num_gib * GIB, memory_is_limited=False)
        # 3 GiB in each process, 5 in that of rank 0, which is on the first host.
        memory = dataclasses.replace(MEMORY, copied=3 * GIB, first_copied=5 * GIB)
        return faults_of(host, tiny_config(checkpoint={"in_background": in_background}), memory)

    assert with_memory(35, on_gpus=False) == []
    (tight,) = with_memory(34, on_gpus=False)
    assert not tight.fatal
    assert "3 of 4 processes save from take 11.0 GiB beside 24.0 GiB in use; the host has 34.0 GiB" in tight.what
    assert tight.way_out == "checkpoint.in_background=false"
    assert with_memory(11, on_gpus=True) == []
    (on_gpus,) = with_memory(10, on_gpus=True)
    assert "take 11.0 GiB; the host has 10.0 GiB" in on_gpus.what
    (foreground,) = with_memory(10, on_gpus=True, in_background=False)
    assert foreground.way_out == "more hosts"


def test_a_number_of_processes_that_the_batch_does_not_allow(facts: Facts, tiny_config: Callable[..., Config]) -> None:
    def refuse(world_size: int) -> ProcessMemory:
        raise RequestError(f"not divisible by {world_size} processes")

    (fault,) = memory_faults({"a": facts}, {"a": 3}, Training(tiny_config(), 0, refuse))
    assert fault.fatal
    assert fault.host == "every host"
    assert "3 processes" in fault.what


def test_an_all_reduce_that_nobody_else_joins_ends_and_leaves_no_process() -> None:
    part = Part(0, 1, world_size=2, environment={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}, timeout_seconds=1)
    probe = subprocess.Popen(
        [sys.executable, "-m", "launch.probe", json.dumps(dataclasses.asdict(Question([], None)))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    answers, _ = probe.communicate("{}\n" + json.dumps(dataclasses.asdict(part)) + "\n", timeout=60)
    result = Result(**json.loads(answers.splitlines()[-1]))
    assert result.faults == ["rank 0: not done after 1 s"]
    (fault,) = all_reduce_faults({"a": result, "b": Result()}, 2)
    assert fault.fatal
    assert fault.host == "a"
    for process in psutil.process_iter(["cmdline"]):
        assert process.info["cmdline"] != probe.args


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, [10, 20, 30]), ("2,0", [30, 10]), ("GPU-bb", [20]), ("1,7,0", [20]), ("", [])],
)
def test_gpus_that_are_hidden_from_cuda_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: list[int]
) -> None:
    tool = tmp_path / "nvidia-smi"
    rows = [
        f"{index}, GPU-{name}, H200, 570.1, 100, {10 * index + 10}" for index, name in enumerate(("aa1", "bb2", "cc3"))
    ]
    tool.write_text("#!/bin/sh\nprintf '%s\\n' " + " ".join(f"'{row}'" for row in rows) + "\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.used_mib for gpu in find_gpus()] == expected
