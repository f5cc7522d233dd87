"""What one host is and can do, found on that host: the other end of `launch.preflight`.

Prints its facts as one line of JSON, then reads one line with the other hosts and their ports, and prints which of them
it reaches by name, and from which of its own addresses. A second line makes it take part in an all-reduce.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from launch.all_reduce import Part, take_part
from launch.control_group import memory_left_bytes

PACKAGES = ("torch", "deepspeed", "mpi4py")
SECONDS_TO_CONNECT = 5.0


@dataclasses.dataclass(frozen=True)
class Question:
    """What a job is going to use on every host; paths are as the job names them."""

    data_folders: list[str]
    output_folder: str | None


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One GPU as its driver describes it."""

    name: str
    driver: str
    total_mib: int
    used_mib: int

    @property
    def free_bytes(self) -> int:
        return (self.total_mib - self.used_mib) * 2**20


@dataclasses.dataclass(frozen=True)
class Facts:
    """One host. `data` has a fingerprint, or None where there is no dataset, for each folder asked about.

    `memory_is_limited`: by the control group of this process, to less than the host itself has left.
    """

    hostname: str
    versions: dict[str, str]
    code_sha256: str
    gpus: list[Gpu]
    num_cores: int
    addresses: dict[str, str]
    seconds_since_epoch: float
    data: dict[str, str | None]
    output_fault: str
    output_free_bytes: int
    shared_memory_free_bytes: int
    memory_available_bytes: int
    memory_is_limited: bool
    max_open_files: int
    port: int
    free_ports: list[int]

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Facts":
        return cls(**{**values, "gpus": [Gpu(**gpu) for gpu in values["gpus"]]})


def gather_facts(question: Question, port: int = 0) -> Facts:
    """The facts of this host; `port` is one where this process listens."""
    fault, free_bytes = _try_output(question.output_folder)
    host_bytes, group_bytes = psutil.virtual_memory().available, memory_left_bytes()
    is_limited = group_bytes is not None and group_bytes < host_bytes
    return Facts(
        hostname=socket.gethostname(),
        versions={"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        code_sha256=code_sha256(),
        gpus=find_gpus(),
        num_cores=len(os.sched_getaffinity(0)),
        addresses=_addresses(),
        seconds_since_epoch=time.time(),
        data={folder: _data_fingerprint(Path(folder)) for folder in question.data_folders},
        output_fault=fault,
        output_free_bytes=free_bytes,
        shared_memory_free_bytes=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0,
        memory_available_bytes=group_bytes if group_bytes is not None and is_limited else host_bytes,
        memory_is_limited=is_limited,
        max_open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        port=port,
        free_ports=_free_ports(),
    )


def code_sha256() -> str:
    """Fingerprint of this project's own sources, which must be the same on all hosts."""
    root = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for package in ("data_prep", "launch", "lex_pretrain"):
        for file in sorted((root / package).rglob("*.py")):
            digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def find_gpus() -> list[Gpu]:
    """The NVIDIA GPUs here that CUDA_VISIBLE_DEVICES leaves, by their driver's own tool; none where it is missing."""
    columns = "index,uuid,name,driver_version,memory.total,memory.used"
    query = ["nvidia-smi", f"--query-gpu={columns}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    by_name = {}
    for index, uuid, name, driver, total, used in rows:
        by_name[index] = by_name[uuid] = Gpu(name, driver, int(total), int(used))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [by_name[index] for index, *_ in rows]
    # CUDA takes beginnings of a uuid too, and stops at the first name that is none.
    chosen = []
    for wanted in map(str.strip, visible.split(",")):
        names = [name for name in by_name if name == wanted or (wanted.startswith("GPU-") and name.startswith(wanted))]
        if not names:
            break
        chosen.append(by_name[names[0]])
    return chosen


def reach(peers: dict[str, int]) -> dict[str, dict[str, str]]:
    """For each host and port: the fault on the way there, or this host's address that leads there."""
    found = {}
    for host, port in peers.items():
        try:
            with socket.create_connection((host, port), timeout=SECONDS_TO_CONNECT) as connection:
                found[host] = {"fault": "", "address": str(connection.getsockname()[0])}
        except OSError as error:
            found[host] = {"fault": str(error), "address": ""}
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _addresses() -> dict[str, str]:
    """IPv4 address of each network interface but the loopback."""
    return {
        interface: address.address
        for interface, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    }


def _data_fingerprint(folder: Path) -> str | None:
    """The manifest holds the checksums of all shards and of the tokenizer."""
    try:
        return hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()
    except OSError:
        return None


def _try_output(folder: str | None) -> tuple[str, int]:
    """Why nothing can be written there (empty if it can), and the free bytes."""
    if folder is None:
        return "", 0
    existing = Path(folder).absolute()
    while not existing.exists():
        existing = existing.parent
    try:
        free_bytes = shutil.disk_usage(existing).free
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".lex-pretrain-") as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        return str(error), 0
    return "", free_bytes


def _free_ports() -> list[int]:
    """One for the job, one for the all-reduce before it."""
    with socket.socket() as first, socket.socket() as second:
        first.bind(("", 0))
        second.bind(("", 0))
        return [int(bound.getsockname()[1]) for bound in (first, second)]


def main() -> None:
    question = Question(**json.loads(sys.argv[1]))
    with socket.socket() as listener, contextlib.suppress(BrokenPipeError):
        listener.bind(("", 0))
        listener.listen(1024)
        facts = gather_facts(question, port=int(listener.getsockname()[1]))
        _answer(dataclasses.asdict(facts))
        # The kernel completes connections to the listener without our help until all hosts are done.
        if peers := sys.stdin.readline():
            _answer(reach(json.loads(peers)))
            if part := sys.stdin.readline():
                _answer(dataclasses.asdict(take_part(Part(**json.loads(part)))))


def _answer(values: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
