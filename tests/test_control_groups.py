"""Control groups of little memory: plans are held against them, and who was killed for want of it is told apart."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launch.attempt import Outcome
from launch.control_group import count_memory_kills
from launch.memory_kills import kernel_message
from launch.rank import RankTask, read_failures
from launch.supervise import describe
from lex_pretrain.config import Config
from lex_pretrain.config_io import save_config

# Far more than torchrun itself takes: the kernel ends the largest process, which must be the hungry one.
LIMIT_BYTES = 2**30
CONTROL_GROUPS = Path("/sys/fs/cgroup")


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of little memory; a process joins by writing its number into `cgroup.procs`."""
    version_1 = CONTROL_GROUPS / "memory"
    folder = (version_1 if version_1.is_dir() else CONTROL_GROUPS) / f"lex-pretrain-test-{os.getpid()}"
    try:
        folder.mkdir()
        limit = "memory.limit_in_bytes" if version_1.is_dir() else "memory.max"
        (folder / limit).write_text(str(LIMIT_BYTES))
    except OSError as error:
        pytest.skip(f"SKIPPED OUT-OF-MEMORY TESTS: they need root and a control group for memory: {error}")
    yield folder
    folder.rmdir()


@pytest.fixture
def hungry(tmp_path: Path) -> Path:
    """A folder with a module that takes memory until it is stopped."""
    (tmp_path / "hungry.py").write_text("taken = []\nwhile True:\n    taken.append(b'x' * 2**20)\n")
    return tmp_path


def run_in(group: Path, words: list[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    path = os.pathsep.join([str(folder), str(Path(__file__).parent.parent)])
    return subprocess.run(
        ["sh", "-c", f'echo $$ > "{group}/cgroup.procs" && exec "$@"', "sh", sys.executable, *words],
        cwd=folder,
        # Wide enough for a table with a line for each fault.
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "400"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_rank_on_a_host_says_so_in_its_note(small_group: Path, hungry: Path) -> None:
    task = RankTask("job.0", str(hungry), "logs", "first", {}, [], module="hungry")
    done = run_in(small_group, ["-m", "launch.rank", task.encode()], hungry)
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    failures = read_failures(hungry / "logs")
    said = describe(Outcome(failures[0].job_exit_code, failures))
    assert "was ended by SIGKILL" in said
    assert "killed it for want of memory" in said


def test_torchrun_says_so_on_this_host(small_group: Path, hungry: Path) -> None:
    words = ["-m", "launch.torchrun", "--standalone", "--nproc-per-node", "1", "--module", "hungry"]
    done = run_in(small_group, words, hungry)
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert "was ended by SIGKILL" in done.stderr
    assert "the kernel killed it for want of memory" in done.stderr


def test_doctor_holds_a_plan_against_what_the_group_has_left(
    small_group: Path, tiny_config: Callable[..., Config], tmp_path: Path
) -> None:
    save_config(tiny_config(model={"hidden_size": 1024, "num_layers": 16}), tmp_path / "run.yaml")
    done = run_in(small_group, ["-m", "lex_pretrain", "doctor", "--config", "run.yaml"], tmp_path)
    assert done.returncode == 1, done.stderr
    for words in ("its control group has", "weights, gradients and optimizer", "a higher zero.stage, fewer slots"):
        assert words in done.stderr


def test_version_2_of_control_groups_is_read_as_the_kernel_writes_it(tmp_path: Path) -> None:
    """Files as in Linux's cgroup-v2.rst, for a container, which sees its own group as the root of all."""
    files = {
        "memory.events": "low 0\nhigh 0\nmax 7\noom 3\noom_kill 2\noom_group_kill 0\n",
        "memory.max": "1000000\n",
        "memory.current": "700000\n",
        "memory.stat": "anon 300000\nfile 400000\ninactive_file 150000\nactive_file 250000\n",
    }
    group = tmp_path / "group"
    group.mkdir()
    for name, text in files.items():
        (group / name).write_text(text)
    script = "from launch.control_group import *; print(count_memory_kills(), memory_left_bytes())"

    def read() -> str:
        mounted = f'mount --bind "{group}" {CONTROL_GROUPS} && exec "$@"'
        command = ["unshare", "--mount", "sh", "-c", mounted, "sh", sys.executable, "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if "unshare" in done.stderr or "mount" in done.stderr:
            pytest.skip(f"SKIPPED VERSION 2 OF CONTROL GROUPS: it needs root and mount namespaces: {done.stderr}")
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert read() == "2 450000"
    (group / "memory.max").write_text("max\n")
    assert read() == "2 None"


def test_a_process_that_somebody_killed_is_not_said_to_lack_memory() -> None:
    before = count_memory_kills()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert kernel_message(process.pid, before) == ""


@pytest.mark.parametrize(
    ("log", "kills", "said"),
    [
        (
            # As the kernel wrote it for such a process.
            "[ 4885.779510] Memory cgroup out of memory: Killed process 26916 (python3) total-vm:163068kB, "
            "anon-rss:153044kB, file-rss:6616kB, shmem-rss:0kB, UID:0 pgtables:356kB oom_score_adj:0",
            (0, 1),
            "Killed process 26916 (python3)",
        ),
        ("[ 1.0] Memory cgroup out of memory: Killed process 2691 (other)", (0, 1), "one more process"),
        ("dmesg: read kernel buffer failed: Operation not permitted", (None, None), ""),
    ],
    ids=["in the log", "only counted", "neither"],
)
def test_the_log_is_quoted_where_it_names_the_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: str, kills: tuple[int | None, int | None], said: str
) -> None:
    program = tmp_path / "dmesg"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{log}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("launch.memory_kills.count_memory_kills", lambda: kills[1])
    message = kernel_message(26916, kills[0])
    assert said in message
    assert bool(message) == bool(said)
