"""Real hosts on one machine: network namespaces, each with its own address and its own sshd."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

TOOLS = ("ip", "sshd", "ssh-keygen", "pdsh")


@dataclass(frozen=True)
class Hosts:
    """Hosts that reach each other by ssh; `environment` makes ssh and pdsh find the throw-away key."""

    names: tuple[str, ...]
    addresses: tuple[str, ...]
    environment: dict[str, str]

    def run(self, host: int, command: list[str], timeout_seconds: float = 120) -> "subprocess.CompletedProcess[str]":
        """Run a command on one of the hosts."""
        return subprocess.run(
            ["ip", "netns", "exec", self.names[host], *command],
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            env={**os.environ, **self.environment},
            check=False,
        )


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Two hosts, taken down again at the end. Skips loudly where namespaces cannot be made."""
    path = os.environ["PATH"] + os.pathsep + "/usr/sbin"
    missing = [tool for tool in TOOLS if shutil.which(tool, path=path) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"SKIPPED MULTI-NODE TESTS: they need root and {', '.join(TOOLS)}; missing: {missing or 'root'}")
    folder = tmp_path_factory.mktemp("hosts")
    # Interface names hold 15 characters; the process id keeps parallel test runs apart.
    tag = f"lx{os.getpid() % 100000}"
    subnet = f"10.77.{os.getpid() % 250}"
    names = tuple(f"{tag}n{number}" for number in (1, 2))
    addresses = tuple(f"{subnet}.{number}" for number in (1, 2))
    servers: list[subprocess.Popen[bytes]] = []
    try:
        _ip("link", "add", tag, "type", "bridge")
        _ip("link", "set", tag, "up")
        for number, (name, address) in enumerate(zip(names, addresses, strict=True), start=1):
            _ip("netns", "add", name)
            _ip("link", "add", f"{tag}v{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", f"{tag}v{number}", "master", tag, "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        environment = {"PATH": f"{_ssh_with_key(folder)}{os.pathsep}{path}", "GLOO_SOCKET_IFNAME": "eth0"}
        servers += [_start_sshd(folder, name) for name in names]
        ready = Hosts(names, addresses, environment)
        _wait_for_ssh(ready)
        yield ready
    finally:
        for server in servers:
            server.terminate()
            server.wait()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", tag], capture_output=True, check=False)


def _ssh_with_key(folder: Path) -> Path:
    """A folder for PATH whose `ssh` uses a key and settings of this test alone."""
    for name in ("host_key", "user_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True)
    shutil.copy(folder / "user_key.pub", folder / "authorized_keys")
    real_ssh = shutil.which("ssh")
    wrapper = folder / "bin" / "ssh"
    wrapper.parent.mkdir()
    settings = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR -o IdentitiesOnly=yes"
    wrapper.write_text(f'#!/bin/sh\nexec {real_ssh} -F none -i {folder}/user_key {settings} "$@"\n')
    wrapper.chmod(0o755)
    return wrapper.parent


def _start_sshd(folder: Path, name: str) -> "subprocess.Popen[bytes]":
    Path("/run/sshd").mkdir(exist_ok=True)
    config = folder / f"{name}.conf"
    config.write_text(
        f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/authorized_keys\nPidFile none\n"
        "PermitRootLogin yes\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nMaxStartups 100\n"
    )
    sshd = shutil.which("sshd", path=os.environ["PATH"] + os.pathsep + "/usr/sbin")
    return subprocess.Popen(
        ["ip", "netns", "exec", name, str(sshd), "-D", "-f", str(config)], stderr=subprocess.DEVNULL
    )


def _wait_for_ssh(hosts: Hosts) -> None:
    deadline = time.monotonic() + 20
    for address in hosts.addresses:
        while (done := hosts.run(0, ["ssh", address, "true"])).returncode != 0:
            assert time.monotonic() < deadline, done.stderr
            time.sleep(0.2)
