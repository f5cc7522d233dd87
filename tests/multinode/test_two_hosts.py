"""Training over two hosts gives the losses of one host with as many processes."""

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


def test_deepspeed_over_two_hosts_equals_one(
    hosts: Hosts, tiny_config: Callable[..., Config], program: Program, tmp_path: Path
) -> None:
    losses = []
    for name in ("one host", "two hosts"):
        file = tmp_path / f"{name}.yaml"
        save_config(tiny_config(run={"output_dir": str(tmp_path / name)}), file)
        if name == "one host":
            done = program("launch", "--num-processes", "2", "--", "train", "--config", file)
        else:
            hostfile = tmp_path / "hostfile"
            hostfile.write_text("".join(f"{address} slots=1\n" for address in hosts.addresses))
            launch = [sys.executable, "-m", "lex_pretrain", "launch", "--launcher", "deepspeed"]
            done = hosts.run(0, [*launch, "--hostfile", str(hostfile), "--", "train", "--config", str(file)])
        assert done.returncode == 0, done.stdout + done.stderr
        losses.append([step["loss"] for step in read_steps(tmp_path / name / "metrics.jsonl")])
    assert losses[0] == losses[1]


def test_a_wrong_request_on_two_hosts_ends_with_2(hosts: Hosts, tmp_path: Path) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("".join(f"{address} slots=1\n" for address in hosts.addresses))
    launch = [sys.executable, "-m", "lex_pretrain", "launch", "--launcher", "deepspeed", "--hostfile", str(hostfile)]
    done = hosts.run(0, [*launch, "--", "train", "--config", str(tmp_path / "no such.yaml")])
    assert done.returncode == 2, done.stderr
    assert "no such.yaml does not exist" in done.stdout + done.stderr
