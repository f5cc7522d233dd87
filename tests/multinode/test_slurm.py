"""Slurm for real: a controller and two nodes of it on the hosts, `srun` training, preemption, and going on."""

import grp
import os
import pwd
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lex_pretrain.config import Config
from lex_pretrain.config_io import save_config
from lex_pretrain.monitor.metrics import read_records, read_steps
from tests.conftest import Program
from tests.multinode.conftest import Hosts

pytestmark = [pytest.mark.multinode, pytest.mark.slow]

ROOT = Path(__file__).parent.parent.parent
TOOLS = ("slurmctld", "slurmd", "srun", "sbatch", "munged")
NODES = (0, 1)


@pytest.fixture
def slurm(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A cluster of two nodes; the variables that make Slurm's commands find it."""
    path = os.environ["PATH"] + os.pathsep + "/usr/sbin"
    if missing := [tool for tool in TOOLS if shutil.which(tool, path=path) is None]:
        pytest.skip(f"SKIPPED SLURM TESTS: missing {', '.join(missing)} (apt-get install slurm-wlm munge)")
    folder = tmp_path_factory.mktemp("slurm")
    servers: list[subprocess.Popen[str]] = []
    munge_folder = Path("/run/munge") / f"lex-pretrain-{os.getpid()}"
    try:
        socket_file = _start_munge(munge_folder, servers)
        config = _write_config(hosts, folder, socket_file)
        environment = {"SLURM_CONF": str(config)}
        servers.append(hosts.start(0, ["env", f"SLURM_CONF={config}", "slurmctld", "-D"], folder))
        for number in NODES:
            name = hosts.hosts[number].name
            servers.append(hosts.start(number, ["env", f"SLURM_CONF={config}", "slurmd", "-D", "-N", name], folder))
        _wait_until_idle(hosts, environment)
        yield environment
    finally:
        for server in reversed(servers):
            subprocess.run(["pkill", "-KILL", "--parent", str(server.pid)], check=False)
            server.kill()
            server.wait()
        shutil.rmtree(munge_folder, ignore_errors=True)


def _start_munge(folder: Path, servers: "list[subprocess.Popen[str]]") -> Path:
    """munged with a key of its own; it insists on folders that belong to its own user."""
    user, group = pwd.getpwnam("munge"), grp.getgrnam("munge")
    folder.mkdir(parents=True)
    key = folder / "key"
    key.write_bytes(os.urandom(128))
    for path in (folder.parent, folder, key):
        os.chown(path, user.pw_uid, group.gr_gid)
    folder.chmod(0o755)
    key.chmod(0o400)
    files = {"socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    arguments = [f"--{option}={folder / name}" for option, name in files.items()]
    command = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={group.gr_gid}", "--clear-groups"]
    servers.append(subprocess.Popen([*command, "munged", "--foreground", f"--key-file={key}", *arguments], text=True))
    return folder / "socket"


def _write_config(hosts: Hosts, folder: Path, socket_file: Path) -> Path:
    addresses = dict(reversed(line.split()) for line in hosts.names_file.read_text().splitlines())
    names = [hosts.hosts[number].name for number in NODES]
    for name in ("state", *names):
        (folder / name).mkdir()
    nodes = "".join(f"NodeName={name} NodeAddr={addresses[name]} CPUs=2 State=UNKNOWN\n" for name in names)
    config = folder / "slurm.conf"
    config.write_text(
        f"ClusterName=test\nSlurmctldHost={names[0]}({addresses[names[0]]})\nSlurmUser=root\n"
        f"AuthType=auth/munge\nAuthInfo=socket={socket_file},cred_expire=5\nCredType=cred/munge\n"
        f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/%n\n"
        f"SlurmctldPidFile={folder}/ctld.pid\nSlurmdPidFile={folder}/%n.pid\n"
        f"SlurmctldLogFile={folder}/ctld.log\nSlurmdLogFile={folder}/%n.log\n"
        "ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nMpiDefault=none\nSelectType=select/cons_tres\n"
        "SlurmdParameters=config_overrides\nReturnToService=2\nKillWait=30\n"
        f"{nodes}PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=INFINITE\n"
    )
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    return config


def _slurm(hosts: Hosts, environment: dict[str, str], command: list[str], folder: Path) -> str:
    settings = [f"{name}={value}" for name, value in environment.items()]
    # The tests' own interpreter first, as an activated environment would have it.
    path = f"PATH={Path(sys.executable).parent}{os.pathsep}{hosts.environment['PATH']}"
    done = hosts.run(0, ["env", path, *settings, *command], folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _wait_until_idle(hosts: Hosts, environment: dict[str, str]) -> None:
    deadline = time.monotonic() + 60
    while True:
        settings = [f"{name}={value}" for name, value in environment.items()]
        done = hosts.run(0, ["env", *settings, "sinfo", "--noheader", "--format=%T %D"])
        if done.stdout.strip() == f"idle {len(NODES)}":
            return
        assert time.monotonic() < deadline, done.stdout + done.stderr
        time.sleep(0.5)


def test_a_signal_saves_requeues_and_the_job_goes_on(
    hosts: Hosts, slurm: dict[str, str], tiny_config: Callable[..., Config], program: Program, tmp_path: Path
) -> None:
    """The shipped batch script, smaller; the losses are those of one host that was never stopped."""
    sections = {"train": {"num_steps": 150}, "checkpoint": {"every_steps": 1000}}
    save_config(tiny_config(**sections), tmp_path / "run.yaml")
    save_config(tiny_config(**sections, run={"output_dir": str(tmp_path / "whole")}), tmp_path / "whole.yaml")
    size = ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--gpus-per-node=0", "--output=log"]
    script = str(ROOT / "launch" / "slurm.sbatch")
    said = _slurm(hosts, slurm, ["sbatch", *size, script, "train", "--config", "run.yaml"], tmp_path)
    job = re.findall(r"\d+", said)[0]
    metrics = tmp_path / "run" / "metrics.jsonl"
    _wait(lambda: metrics.is_file() and len(read_steps(metrics)) >= 5, tmp_path / "log")
    _slurm(hosts, slurm, ["scancel", "--signal=USR1", job], tmp_path)
    _wait(lambda: metrics.is_file() and len(read_steps(metrics)) == 150, tmp_path / "log", seconds=240)
    records = read_records(metrics)
    resumed = [record["step"] for record in records if record.get("event") == "resumed"]
    assert len(resumed) == 1
    assert 5 <= resumed[0] < 150
    whole = program("launch", "--num-processes", "2", "--", "train", "--config", "whole.yaml")
    assert whole.returncode == 0, whole.stderr
    losses = [
        [step["loss"] for step in read_steps(run / "metrics.jsonl")] for run in (metrics.parent, tmp_path / "whole")
    ]
    assert losses[0] == losses[1]


def _wait(done: Callable[[], bool], log: Path, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, log.read_text() if log.is_file() else "no log"
        time.sleep(0.1)
