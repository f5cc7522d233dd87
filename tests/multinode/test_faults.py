"""What happens to hosts and processes in the middle of a run, done for real."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from lex_pretrain.config import Config
from lex_pretrain.config_io import save_config
from lex_pretrain.monitor.metrics import read_records, read_steps
from tests.multinode.conftest import Hosts

pytestmark = [pytest.mark.multinode, pytest.mark.slow]

LAUNCH = [sys.executable, "-m", "lex_pretrain", "launch"]
# In the command of a process that trains, and in no launcher's.
TRAINING = "-m lex_pretrain train"


class Job:
    """A launched training that is watched by its metrics."""

    def __init__(
        self, hosts: Hosts, config: Config, folder: Path, options: list[str], numbers: tuple[int, ...]
    ) -> None:
        self.metrics = Path(config.run.output_dir) / "metrics.jsonl"
        save_config(config, folder / "run.yaml")
        hostfile = hosts.write_hostfile(folder / "hostfile", numbers)
        command = [*LAUNCH, "--hostfile", str(hostfile), *options, "--", "train", "--config", "run.yaml"]
        self.process = hosts.start(0, command, folder)

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + 150
        while not (self.metrics.is_file() and any(record["step"] >= step for record in read_steps(self.metrics))):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def wait_for_event(self, name: str, count: int) -> None:
        deadline = time.monotonic() + 150
        while not self.metrics.is_file() or len(self.events(name)) < count:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def launch_process(self) -> psutil.Process:
        """`launch` itself, below the command that enters the host."""
        return psutil.Process(self.process.pid).children()[0]

    def end(self, timeout_seconds: float = 150) -> tuple[int, str]:
        """Exit code and stderr."""
        try:
            _, stderr = self.process.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            self.launch_process().kill()
            raise
        return self.process.returncode, stderr

    def events(self, name: str) -> list[dict[str, Any]]:
        return [record for record in read_records(self.metrics) if record.get("event") == name]


def assert_nothing_left(hosts: Hosts, seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while left := [process.cmdline() for host in hosts.hosts for process in host.processes("lex_pretrain train")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def test_a_stop_signal_reaches_both_hosts(
    hosts: Hosts, tiny_config: Callable[..., Config], tmp_path: Path, launcher: str
) -> None:
    config = tiny_config(train={"num_steps": 2000}, checkpoint={"every_steps": 5000})
    job = Job(hosts, config, tmp_path, ["--launcher", launcher], (0, 1))
    job.wait_for_step(3)
    job.launch_process().send_signal(signal.SIGINT)
    code, stderr = job.end()
    assert code == 75, stderr
    assert job.events("saved")[-1]["step"] == read_steps(job.metrics)[-1]["step"] < 2000
    assert_nothing_left(hosts)


def test_a_killed_rank_is_named_with_its_host_and_the_job_goes_on(
    hosts: Hosts, tiny_config: Callable[..., Config], tmp_path: Path
) -> None:
    config = tiny_config(train={"num_steps": 60}, checkpoint={"every_steps": 5})
    job = Job(hosts, config, tmp_path, ["--launcher", "torchrun", "--max-restarts", "2"], (0, 1))
    job.wait_for_event("saved", 2)
    victims = hosts.hosts[1].processes(TRAINING)
    assert len(victims) == 1
    victims[0].kill()
    code, stderr = job.end()
    assert code == 0, stderr
    assert "rank 1 on node2 was ended by SIGKILL" in stderr
    (resumed,) = (record["step"] for record in job.events("resumed"))
    assert resumed >= 10
    assert resumed % 5 == 0
    assert len(read_steps(job.metrics)) == 60
    assert_nothing_left(hosts)


def test_nothing_is_left_when_launch_itself_is_killed(
    hosts: Hosts, tiny_config: Callable[..., Config], tmp_path: Path
) -> None:
    config = tiny_config(train={"num_steps": 5000}, checkpoint={"every_steps": 5000})
    job = Job(hosts, config, tmp_path, ["--launcher", "torchrun"], (0, 1))
    job.wait_for_step(3)
    job.launch_process().kill()
    job.process.wait(timeout=10)
    assert_nothing_left(hosts, seconds=40)
    # What could still save did.
    assert (Path(config.run.output_dir) / "checkpoints" / "latest").is_file()


def test_a_host_that_is_cut_off_is_left_out_and_the_same_samples_are_trained_on(
    hosts: Hosts, tiny_config: Callable[..., Config], tmp_path: Path
) -> None:
    config = tiny_config(train={"num_steps": 60}, checkpoint={"every_steps": 5})
    options = ["--launcher", "torchrun", "--max-restarts", "2", "--min-hosts", "1", "--host-timeout", "10"]
    job = Job(hosts, config, tmp_path, options, (0, 1))
    job.wait_for_step(12)
    hosts.hosts[1].cut_off()
    try:
        cut_seconds = time.monotonic()
        while not job.events("resumed"):
            assert job.process.poll() is None, job.process.communicate()
            assert time.monotonic() - cut_seconds < 10 + 60
            time.sleep(0.1)
        code, stderr = job.end()
        assert code == 0, stderr
        assert "lost contact with host node2" in stderr
        steps = read_steps(job.metrics)
        assert [step["samples"] for step in steps] == [8 * number for number in range(1, 61)]
        # The host that nobody reaches ends its processes by itself.
        assert_nothing_left(hosts, seconds=40)
    finally:
        hosts.hosts[1].plug_in()


def test_a_host_that_is_back_takes_part_at_the_next_restart(
    hosts: Hosts, tiny_config: Callable[..., Config], tmp_path: Path
) -> None:
    """Lost, and the job goes on without it; back, and the next failure of the job takes it in again."""
    config = tiny_config(train={"num_steps": 400}, checkpoint={"every_steps": 5})
    options = ["--launcher", "torchrun", "--max-restarts", "3", "--min-hosts", "1", "--host-timeout", "5"]
    job = Job(hosts, config, tmp_path, options, (0, 1))
    job.wait_for_event("saved", 1)
    hosts.hosts[1].cut_off()
    try:
        job.wait_for_event("resumed", 1)
    finally:
        hosts.hosts[1].plug_in()
    # Without a new checkpoint, a restart would count as fruitless.
    job.wait_for_event("saved", len(job.events("saved")) + 1)
    (victim,) = hosts.hosts[0].processes(TRAINING)
    victim.kill()
    job.wait_for_event("resumed", 2)
    assert len(hosts.hosts[0].processes(TRAINING)) == len(hosts.hosts[1].processes(TRAINING)) == 1
    job.launch_process().send_signal(signal.SIGINT)
    code, stderr = job.end()
    assert code == 75, stderr
    assert "going on with node1; no answer from node2" in stderr
    steps = read_steps(job.metrics)
    assert [step["samples"] for step in steps] == [8 * number for number in range(1, len(steps) + 1)]
    assert_nothing_left(hosts)
