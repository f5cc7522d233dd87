"""Training over two hosts gives the losses of one host with as many processes, under every launcher."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lex_pretrain.config import Config
from lex_pretrain.config_io import save_config
from lex_pretrain.monitor.metrics import read_steps
from tests.conftest import Program
from tests.multinode.conftest import Hosts

pytestmark = [pytest.mark.multinode, pytest.mark.slow]

LAUNCH = [sys.executable, "-m", "lex_pretrain", "launch"]


def losses(run: Path) -> list[float]:
    return [step["loss"] for step in read_steps(run / "metrics.jsonl")]


def test_two_hosts_equal_one_under_every_launcher(
    hosts: Hosts, tiny_config: Callable[..., Config], program: Program, tmp_path: Path
) -> None:
    """From a folder with a space, and with an output folder whose name no shell would leave alone."""
    hostfile = hosts.write_hostfile(tmp_path / "host file")
    file = tmp_path / "run.yaml"
    save_config(tiny_config(), file)
    folder = tmp_path / "a folder"
    folder.mkdir()
    done = program("launch", "--num-processes", "2", "--", "train", "--config", file, "run.output_dir=one")
    assert done.returncode == 0, done.stderr
    for launcher in ("deepspeed", "torchrun", "mpich"):
        output = f'it\'s 5% of "{launcher}" $HOME'
        launch = [*LAUNCH, "--launcher", launcher, "--hostfile", str(hostfile)]
        done = hosts.run(
            0,
            [*launch, "--", "train", "--config", str(file), f"run.output_dir={output}"],
            folder,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert losses(folder / output) == losses(tmp_path / "one")


@pytest.mark.usefixtures("open_mpi")
def test_two_hosts_train_under_open_mpi(
    hosts: Hosts, tiny_config: Callable[..., Config], program: Program, tmp_path: Path
) -> None:
    """MPICH stands beside the interpreter, where launchers are looked for first; the right one is found."""
    file = tmp_path / "run.yaml"
    save_config(tiny_config(), file)
    done = program("launch", "--num-processes", "2", "--", "train", "--config", file, "run.output_dir=one")
    assert done.returncode == 0, done.stderr
    launch = [*LAUNCH, "--launcher", "openmpi", "--hostfile", str(hosts.write_hostfile(tmp_path / "hostfile"))]
    done = hosts.run(0, [*launch, "--", "train", "--config", str(file), "run.output_dir=two"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(tmp_path / "two") == losses(tmp_path / "one")


def test_a_wrong_request_ends_with_2_and_leaves_nothing(
    hosts: Hosts, tiny_config: Callable[..., Config], tmp_path: Path, launcher: str
) -> None:
    hostfile = hosts.write_hostfile(tmp_path / "hostfile")
    file = tmp_path / "run.yaml"
    save_config(tiny_config(), file)
    launch = [*LAUNCH, "--launcher", launcher, "--hostfile", str(hostfile), "--max-restarts", "3"]
    done = hosts.run(0, [*launch, "--", "train", "--config", str(file), "model.vocab_size=100"], tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count("smaller than the 320 pieces") == 1
    for host in hosts.hosts[:2]:
        assert not host.processes("lex_pretrain")


def test_prepare_over_two_hosts_makes_the_bytes_of_one_process(
    hosts: Hosts, program: Program, corpus: Path, tmp_path: Path
) -> None:
    options = ["--vocab-size", "320", "--unit-bytes", "20000", "--test-fraction", "0.2"]
    alone = program("prepare", corpus, "--output", "alone", "--workers", "1", *options)
    assert alone.returncode == 0, alone.stderr
    hostfile = hosts.write_hostfile(tmp_path / "hostfile")
    launch = [*LAUNCH, "--launcher", "mpich", "--hostfile", str(hostfile), "--", "prepare", str(corpus)]
    spread = hosts.run(0, [*launch, "--output", "spread", *options], tmp_path)
    assert spread.returncode == 0, spread.stdout + spread.stderr
    written = [
        {file.name: file.read_bytes() for file in (tmp_path / name).glob("shard-*")} for name in ("alone", "spread")
    ]
    assert len(written[0]) >= 8
    assert written[0] == written[1]
