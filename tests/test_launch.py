"""Launching: hostfiles, the commands of existing launchers, ranks from their environments."""

from pathlib import Path

import pytest

from launch.commands import deepspeed_command, forwarded_variables, local_command
from launch.hostfile import read_hostfile
from lex_pretrain.errors import RequestError
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


def test_arguments_reach_the_processes_unchanged() -> None:
    subcommand = ["train", "--config", "a folder/run.yaml", "run.output_dir='it''s here'"]
    for command in (
        local_command(subcommand, 4, 8, {}),
        deepspeed_command(subcommand, Path("hosts"), 4, 8, {}),
        deepspeed_command(subcommand, None, 4, 8, {}),
    ):
        assert list(command.arguments[-len(subcommand) :]) == subcommand
        assert command.environment == {"OMP_NUM_THREADS": "2"}
    assert local_command(subcommand, 4, 8, {"OMP_NUM_THREADS": "3"}).environment == {}


def test_secrets_are_not_forwarded_to_command_lines() -> None:
    environment = {"NCCL_DEBUG": "INFO", "WANDB_API_KEY": "hidden", "HF_TOKEN": "hidden", "HF_HOME": "x", "PATH": "y"}
    assert forwarded_variables(environment) == {"NCCL_DEBUG": "INFO", "HF_HOME": "x"}


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
        {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "2"},
    ],
    ids=["torch", "mpich", "openmpi", "slurm"],
)
def test_ranks_are_found_alike_under_every_launcher(environment: dict[str, str]) -> None:
    assert find_ranks(environment) == Ranks(3, 8, 1, 2)
    assert find_ranks({}) == Ranks(0, 1, 0, 1)


def test_dry_run_prints_the_command_and_bad_requests_end_with_2(program: Program, tmp_path: Path) -> None:
    shown = program("launch", "--num-processes", "2", "--dry-run", "--", "train", "--config", "my run.yaml")
    assert shown.returncode == 0
    assert "--nproc-per-node 2 --module lex_pretrain train --config 'my run.yaml'" in shown.stdout
    cases = [
        (["launch", "--launcher", "ssh", "--", "train"], "--launcher ssh is unknown"),
        (["launch"], "after `--`"),
        (["launch", "--launcher", "deepspeed", "--hostfile", tmp_path / "none", "--", "train"], "does not exist"),
        (["launch", "--hostfile", ROOT / "hostfile.example", "--", "train"], "use --launcher deepspeed"),
    ]
    for arguments, words in cases:
        done = program(*arguments)
        assert done.returncode == 2, done.stderr
        assert words in done.stderr


@pytest.mark.slow
def test_exit_code_of_the_failing_process_comes_out(program: Program) -> None:
    for launcher in ("local", "deepspeed"):
        done = program("launch", "--launcher", launcher, "--num-processes", "2", "--", "train", "--config", "none.yaml")
        assert done.returncode == 2, done.stderr
        assert done.stderr.count("config file none.yaml does not exist") == 1
