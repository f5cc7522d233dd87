"""Launching: hostfiles, the commands of existing launchers, ranks from their environments."""

import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from launch.attempt import Outcome
from launch.commands import (
    Command,
    Rendezvous,
    deepspeed_command,
    forwarded_variables,
    local_command,
    local_deepspeed_command,
    mpich_command,
    openmpi_command,
    slurm_command,
    threads_variable,
    torchrun_commands,
)
from launch.hostfile import read_hostfile, select_hosts
from launch.rank import RankTask
from launch.run import without_resume
from launch.supervise import Patience, largest_that_fits, supervise
from launch.torchrun import first_failure
from lex_pretrain.config import Config
from lex_pretrain.config_io import save_config
from lex_pretrain.errors import JobError, RequestError
from lex_pretrain.monitor.metrics import read_records, read_steps
from lex_pretrain.ranks import Ranks, find_ranks
from tests.conftest import Program

ROOT = Path(__file__).parent.parent


def test_shipped_hostfile_reads() -> None:
    assert read_hostfile(ROOT / "hostfile.example") == {"node1": 8, "node2": 8}


def test_comments_blank_lines_and_line_ends_are_no_matter(tmp_path: Path) -> None:
    file = tmp_path / "hostfile"
    file.write_bytes(b"\xef\xbb\xbf# a comment\r\n\r\n  a.example slots=2  \r\n10.0.0.2 slots = 4 # four\r\n")
    assert read_hostfile(file) == {"a.example": 2, "10.0.0.2": 4}


def test_every_bad_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "hostfile"
    file.write_text("a slots=2\nb\na slots=3\nc slots=0\n-oProxyCommand=x slots=1\nd slots=two\n")
    with pytest.raises(RequestError) as caught:
        read_hostfile(file)
    faults = str(caught.value).splitlines()
    assert [fault.split(":")[0].rsplit(" ", 1)[1] for fault in faults] == ["2", "3", "4", "5", "6"]


@pytest.mark.parametrize(("text", "words"), [(None, "does not exist"), ("# nothing\n", "names no host")])
def test_missing_and_empty_hostfiles_are_errors(tmp_path: Path, text: str | None, words: str) -> None:
    file = tmp_path / "hostfile"
    if text is not None:
        file.write_text(text)
    with pytest.raises(RequestError, match=words):
        read_hostfile(file)


def test_hosts_are_chosen_by_name() -> None:
    slots = {"a": 1, "b": 2, "c": 3}
    assert select_hosts(slots, None, None) == slots
    assert select_hosts(slots, "c, a", None) == {"a": 1, "c": 3}
    assert select_hosts(slots, None, "b") == {"a": 1, "c": 3}
    for include, exclude, words in (("a,z", None, "--include z"), (None, "y", "--exclude y"), ("a", "a", "no host")):
        with pytest.raises(RequestError, match=words):
            select_hosts(slots, include, exclude)


def test_arguments_reach_the_processes_unchanged() -> None:
    subcommand = ["train", "--config", "a folder/run.yaml", "run.output_dir='it''s here' 5%h $HOME\n\"x\""]
    for command in (local_command(subcommand, 4), local_deepspeed_command(subcommand, 4)):
        assert list(command.arguments[-len(subcommand) :]) == subcommand
    task = RankTask("job", "/a folder", "logs", "first", {"A": "b c"}, subcommand)
    meeting, slots = Rendezvous("a", 1), {"a": 1, "b": 2}
    commands = [
        deepspeed_command(task, Path("hosts"), Path("environment"), meeting),
        *torchrun_commands(task, slots, meeting),
        mpich_command(task, slots, {}),
        openmpi_command(task, slots),
        slurm_command(task, 2),
    ]
    for command in commands:
        encoded = shlex.split(command.arguments[-1])[-1]
        assert encoded.replace("-", "").replace("_", "").rstrip("=").isalnum()
        assert RankTask.decode(encoded) == task


def test_multi_host_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exact words that each launcher documents for this job."""
    monkeypatch.setenv("PYTHONPATH", "/here")
    task = RankTask("job.0", "/here", "logs", "first", {}, ["train"])
    slots, encoded = {"a": 1, "b": 2}, task.encode()
    mpich = mpich_command(task, slots, {"GLOO_SOCKET_IFNAME": "eth1"}).arguments
    assert mpich[:9] == ("mpiexec", "-launcher", "ssh", "-hosts", "a:1,b:2", "-n", "3", "-iface", "eth1")
    assert openmpi_command(task, slots) == Command(
        (
            *("mpirun", "--host", "a:1,b:2", "-np", "3", "-x", "LEX_JOB", "-x", "PYTHONPATH"),
            *(sys.executable, "-m", "launch.rank", encoded),
        ),
        {"LEX_JOB": "job.0"},
    )
    first, second = torchrun_commands(task, slots, Rendezvous("a", 29000))
    assert "--nnodes 2 --node-rank 0 --nproc-per-node 1 --master-addr a --master-port 29000" in first.arguments[-1]
    assert "--nnodes 2 --node-rank 1 --nproc-per-node 2 --master-addr a --master-port 29000" in second.arguments[-1]
    assert first.arguments[-2] == "a"
    assert second.arguments[-2] == "b"


def test_threads_are_the_cores_of_each_process() -> None:
    assert threads_variable(4, 8, {}) == {"OMP_NUM_THREADS": "2"}
    assert threads_variable(4, 2, {}) == {"OMP_NUM_THREADS": "1"}
    assert threads_variable(4, 8, {"OMP_NUM_THREADS": "3"}) == {}


def test_secrets_are_not_forwarded_to_command_lines() -> None:
    environment = {"NCCL_DEBUG": "INFO", "WANDB_API_KEY": "hidden", "HF_TOKEN": "hidden", "HF_HOME": "x", "PATH": "y"}
    assert forwarded_variables(environment) == {"NCCL_DEBUG": "INFO", "HF_HOME": "x"}
    assert forwarded_variables(environment, ["PATH"]) == {"NCCL_DEBUG": "INFO", "HF_HOME": "x", "PATH": "y"}
    for name, words in (("WANDB_API_KEY", "looks like a secret"), ("NONE", "not set here")):
        with pytest.raises(RequestError, match=words):
            forwarded_variables(environment, [name])


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
        {
            "OMPI_COMM_WORLD_RANK": "3",
            "OMPI_COMM_WORLD_SIZE": "8",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        },
        {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "2"},
    ],
    ids=["torch", "mpich", "openmpi", "slurm"],
)
def test_ranks_are_found_alike_under_every_launcher(environment: dict[str, str]) -> None:
    assert find_ranks(environment) == Ranks(3, 8, 1, 2)
    assert find_ranks({}) == Ranks(0, 1, 0, 1)


def test_a_slurm_batch_script_is_one_process() -> None:
    assert find_ranks({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}) == Ranks(0, 1, 0, 1)


@pytest.mark.slow
def test_dry_run_prints_the_commands_and_bad_requests_end_with_2(
    program: Program, tiny_config: Callable[..., Config], tmp_path: Path
) -> None:
    save_config(tiny_config(), tmp_path / "my run.yaml")
    train = ["--", "train", "--config", "my run.yaml"]
    shown = program("launch", "--num-processes", "2", "--dry-run", *train)
    assert shown.returncode == 0, shown.stderr
    assert "--nproc-per-node 2 --module lex_pretrain train --config 'my run.yaml'" in shown.stdout
    hostfile = ["--hostfile", ROOT / "hostfile.example"]
    for launcher in ("deepspeed", "torchrun", "mpich", "openmpi"):
        shown = program("launch", "--launcher", launcher, *hostfile, "--dry-run", *train)
        assert shown.returncode == 0, shown.stderr
        for host in ("node1", "node2"):
            assert f"# 8 on {host}: OMP_NUM_THREADS=" in shown.stdout
        assert not list(tmp_path.glob("launch-logs"))
    cases = [
        (["--launcher", "ssh", *train], "--launcher ssh is unknown"),
        ([], "after `--`"),
        (["--launcher", "deepspeed", "--hostfile", tmp_path / "none", *train], "does not exist"),
        ([*hostfile, *train], "use --launcher deepspeed"),
        (["--launcher", "mpich", *train], "needs --hostfile"),
        (["--launcher", "slurm", *train], "inside an allocation"),
        (["--launcher", "torchrun", *hostfile, "--exclude", "node9", *train], "node9: not among the hosts"),
        (["--", "trian"], "cannot start 'trian'"),
        (["--", "train", "--confg", "my run.yaml"], "No such option"),
        ([*train, "model.hiden_size=3"], "did you mean model.hidden_size"),
    ]
    for arguments, words in cases:
        done = program("launch", *arguments)
        assert done.returncode == 2, done.stderr
        assert words in done.stderr


@pytest.mark.slow
def test_exit_code_of_the_failing_process_comes_out(
    program: Program, tiny_config: Callable[..., Config], tmp_path: Path
) -> None:
    save_config(tiny_config(), tmp_path / "run.yaml")
    for launcher in ("local", "deepspeed"):
        launch = ["launch", "--launcher", launcher, "--num-processes", "2", "--max-restarts", "2"]
        done = program(*launch, "--", "train", "--config", "run.yaml", "data.path=nowhere")
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("nowhere is not a prepared dataset") == 1


def test_as_many_hosts_as_the_batch_allows(tiny_config: Callable[..., Config]) -> None:
    config = tiny_config(train={"global_batch_size": 24, "micro_batch_size": 2})
    slots = {"a": 2, "b": 2, "c": 2, "d": 4}
    assert largest_that_fits(slots, None) == slots
    assert largest_that_fits(slots, config) == {"a": 2, "b": 2, "c": 2}
    assert largest_that_fits({"d": 4, "a": 1}, config) == {"d": 4}
    assert largest_that_fits({"e": 5}, config) == {}


def test_restarts_end_when_they_are_of_no_use(
    tiny_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.supervise.FIRST_PAUSE_SECONDS", 0.0)
    config = tiny_config()
    latest = tmp_path / "run" / "checkpoints" / "latest"
    latest.parent.mkdir(parents=True)
    calls: list[int] = []

    def attempts(*codes: int, saves: bool = False) -> Callable[[int, dict[str, int] | None], Outcome]:
        calls.clear()

        def run(number: int, hosts: dict[str, int] | None) -> Outcome:
            calls.append(number)
            if saves:
                latest.write_text(f"step-{number:08d}")
            return Outcome(codes[number])

        return run

    assert supervise(attempts(1, 1, 0, saves=True), None, Patience(5), config) == 0
    assert calls == [0, 1, 2]
    for final in (2, 75, 130):
        assert supervise(attempts(1, final, saves=True), None, Patience(5), config) == final
    assert supervise(attempts(1, 137, 1, saves=True), None, Patience(2), config) == 1
    assert supervise(attempts(137), None, Patience(), config) == 137
    with pytest.raises(JobError, match="2 attempts in a row ended without a new checkpoint"):
        supervise(attempts(1, 1, 1, 1), None, Patience(5), config)
    assert calls == [0, 1]


def test_a_restart_goes_on_instead_of_going_back_again() -> None:
    command = ["train", "--config", "run.yaml", "--resume", "4", "train.num_steps=9"]
    assert without_resume(command) == ["train", "--config", "run.yaml", "train.num_steps=9"]
    assert without_resume(["train", "--resume=4", "--config", "run.yaml"]) == ["train", "--config", "run.yaml"]


def test_a_killed_process_comes_before_those_that_it_took_along() -> None:
    """torchrun finds both ended at one look, and takes the first rank for the first to fail."""

    def ended(rank: int, exit_code: int) -> ProcessFailure:
        return ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=exit_code, error_file="none")

    for codes, expected in (((1, -9, -15), 1), ((1, 1, -15), 0), ((3, -11, 1), 1)):
        failures = {rank: ended(rank, code) for rank, code in enumerate(codes)}
        assert first_failure(ChildFailedError("train", failures))[0] == expected
    failures = {0: ended(0, 1), 1: ended(1, -9)}
    failures[1].timestamp += 30  # the others did not end when told to
    assert first_failure(ChildFailedError("train", failures))[0] == 0


@pytest.mark.slow
def test_a_killed_process_is_named_and_the_job_goes_on(
    program: Program, tiny_config: Callable[..., Config], tmp_path: Path
) -> None:
    """kill -9 of one rank, on one host: the job starts again from its checkpoint and ends with all steps."""
    config = tiny_config(train={"num_steps": 60}, checkpoint={"every_steps": 10})
    save_config(config, tmp_path / "run.yaml")
    launch = ["launch", "--num-processes", "2", "--max-restarts", "1", "--", "train", "--config", "run.yaml"]
    process = subprocess.Popen(
        [sys.executable, "-m", "lex_pretrain", *launch], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.is_file() and any(record.get("event") == "saved" for record in read_records(metrics))):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for child in psutil.Process(process.pid).children(recursive=True):
        if child.environ().get("RANK") == "1":
            child.kill()
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert "rank 1" in stderr
    assert "was ended by SIGKILL" in stderr
    assert "restart 1 of 1" in stderr
    records = read_records(metrics)
    (resumed,) = (record["step"] for record in records if record.get("event") == "resumed")
    assert resumed >= 10
    assert resumed % 10 == 0
    assert [step["step"] for step in read_steps(metrics)] == list(range(1, 61))
