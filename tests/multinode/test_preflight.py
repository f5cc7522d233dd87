"""Preflight of real hosts: what is in the way is named for each host, and then nothing starts."""

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed

import lex_pretrain
from lex_pretrain.config import Config
from lex_pretrain.config_io import save_config
from lex_pretrain.monitor.metrics import read_steps
from tests.multinode.conftest import Hosts

pytestmark = [pytest.mark.multinode, pytest.mark.slow]

PROGRAM = [sys.executable, "-m", "lex_pretrain"]
# Tables with a line for each fault.
WIDE = ["env", "COLUMNS=400"]


def test_doctor_of_healthy_hosts_times_an_all_reduce(
    hosts: Hosts, tiny_config: Callable[..., Config], tmp_path: Path
) -> None:
    hostfile = hosts.write_hostfile(tmp_path / "hostfile")
    save_config(tiny_config(), tmp_path / "run.yaml")
    started = time.monotonic()
    done = hosts.run(0, [*PROGRAM, "doctor", "--hostfile", str(hostfile), "--config", "run.yaml"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 hosts answer and agree; nothing is in the way" in done.stderr
    assert "all-reduce of 16 MiB over 2 processes: correct" in done.stderr
    # 20 seconds are promised; the machine that tests may be busy.
    assert time.monotonic() - started < 60


def test_every_fault_of_every_host_is_named_and_nothing_starts(
    hosts: Hosts, tiny_config: Callable[..., Config], dataset: Path, tmp_path: Path
) -> None:
    """Another version, no dataset and a full disk on node2; a wrong key on node3; a name that does not resolve.

    Neither has a host the memory, nor the first one the disk, for the model that is asked for.
    """
    config = tiny_config()
    output = Path(config.run.output_dir)
    output.mkdir()
    save_config(config, tmp_path / "run.yaml")
    hostfile = hosts.write_hostfile(tmp_path / "hostfile", (0, 1, 2))
    hostfile.write_text(hostfile.read_text() + "node9 slots=1\n")
    other_version = tmp_path / "other_version.py"
    own_version = Path(lex_pretrain.__file__)
    other_version.write_text(own_version.read_text() + "# changed\n")
    no_keys = tmp_path / "no_keys"
    no_keys.touch()
    second, third = hosts.hosts[1:]
    second.mount("--bind", other_version, own_version)
    second.mount("-t", "tmpfs", "none", dataset)
    second.mount("-t", "tmpfs", "-o", "size=4k", "none", output)
    third.mount("--bind", no_keys, hosts.authorized_keys)
    try:
        fill = hosts.run(0, ["ssh", "node2", f"head -c 4096 /dev/zero > {output}/full"])
        assert fill.returncode == 0, fill.stderr
        command = [*WIDE, *PROGRAM, "launch", "--launcher", "torchrun", "--hostfile", str(hostfile)]
        huge = ["model.hidden_size=65536", "model.num_layers=100"]
        done = hosts.run(0, [*command, "--", "train", "--config", "run.yaml", *huge], tmp_path)
    finally:
        for path in (own_version, dataset, output):
            second.unmount(path)
        third.unmount(hosts.authorized_keys)
    assert done.returncode == 2, done.stderr
    said = done.stderr
    for words in (
        "this project's code",
        "no dataset in",
        "cannot write",
        "Permission denied",
        "resolve",
        "ssh-copy-id",
    ):
        assert words in said, said
    assert said.count("weights, gradients and optimizer state of 1 of 4 processes") == 2, said
    assert said.count("free for checkpoints") == 1, said
    assert "nothing was started: 8 things in the way" in said, said
    assert not list(output.iterdir())


def test_a_network_that_spoils_sums_or_is_slow_is_named(
    hosts: Hosts, tiny_config: Callable[..., Config], tmp_path: Path
) -> None:
    """node2's torch adds to what it has summed, and all it gets comes through a line of 150 Mb/s."""
    hostfile = hosts.write_hostfile(tmp_path / "hostfile")
    save_config(tiny_config(), tmp_path / "run.yaml")
    collectives = Path(torch.distributed.distributed_c10d.__file__)
    spoiled = tmp_path / "spoiled.py"
    spoiled.write_text(
        f"{collectives.read_text()}\n_right = all_reduce\n\n"
        "def all_reduce(tensor, *arguments, **options):\n"
        "    _right(tensor, *arguments, **options)\n    tensor[-1] += 1\n"
    )
    second = hosts.hosts[1]
    second.slow_down("150mbit")
    second.mount("--bind", spoiled, collectives)
    try:
        done = hosts.run(0, [*WIDE, *PROGRAM, "doctor", "--hostfile", str(hostfile)], tmp_path)
    finally:
        second.unmount(collectives)
        second.speed_up()
    assert done.returncode == 1, done.stderr
    assert re.search(r"node2 +│ the all-reduce gave a wrong sum on rank 1", done.stderr), done.stderr
    assert re.search(r"every host +│ \(warning\) the all-reduce moved 0\.0[12]", done.stderr), done.stderr


def test_a_host_name_that_means_the_loopback_does_not_mislead(
    hosts: Hosts, tiny_config: Callable[..., Config], tmp_path: Path
) -> None:
    """Debian gives a host's own name the address 127.0.1.1, which gloo would tell the other hosts."""
    config = tiny_config()
    save_config(config, tmp_path / "run.yaml")
    hostfile = hosts.write_hostfile(tmp_path / "hostfile")
    etc_hosts = Path("/etc/hosts")
    for host in hosts.hosts[:2]:
        misleading = tmp_path / f"{host.name}-hosts"
        misleading.write_text(f"127.0.1.1 {host.name}\n" + hosts.names_file.read_text())
        host.mount("--bind", misleading, etc_hosts)
    unset = ["env", "--unset=GLOO_SOCKET_IFNAME"]
    command = [*unset, *PROGRAM, "launch", "--launcher", "torchrun", "--hostfile", str(hostfile)]
    try:
        done = hosts.run(0, [*command, "--", "train", "--config", "run.yaml"], tmp_path)
    finally:
        for host in hosts.hosts[:2]:
            host.unmount(etc_hosts)
    assert done.returncode == 0, done.stderr
    assert len(read_steps(Path(config.run.output_dir) / "metrics.jsonl")) == 6
