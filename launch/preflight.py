"""Before anything starts: ask every host what it is, compare, and name every fault of every host with the way out."""

import contextlib
import dataclasses
import json
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from launch.commands import INTERFACE_VARIABLES
from launch.probe import Facts, Question
from launch.ssh import remote_python, ssh_command
from lex_pretrain.config import Config
from lex_pretrain.progress import console
from lex_pretrain.train.room import checkpoint_bytes

SECONDS_TO_ANSWER = 30.0
# Each host tries the first one and this many after it in the list: all of them in small jobs, a ring in large ones.
NUM_PEERS = 8
LARGEST_CLOCK_SKEW_SECONDS = 5.0
LEAST_SHARED_MEMORY_BYTES = 2**30
LEAST_OPEN_FILES = 1024
# Memory that a driver and a display take; more than this belongs to another job.
IDLE_GPU_SHARE = 0.05


@dataclass(frozen=True)
class Fault:
    """One thing in the way on one host. Only a fatal one keeps a job from starting."""

    host: str
    what: str
    way_out: str
    fatal: bool = True


@dataclass(frozen=True)
class Preflight:
    """What came out: the faults, the network interface that connects the hosts, a free port of the first host."""

    faults: list[Fault]
    interface: str | None
    port: int | None

    @property
    def fatal(self) -> bool:
        return any(fault.fatal for fault in self.faults)

    def interface_variables(self) -> dict[str, str]:
        """Variables that make gloo and NCCL use that interface, where one was found."""
        return dict.fromkeys(INTERFACE_VARIABLES, self.interface) if self.interface else {}

    def show(self) -> None:
        """The faults as one table on stderr; nothing where there are none."""
        if not self.faults:
            return
        table = Table(title="preflight")
        for heading in ("host", "what is in the way", "way out"):
            table.add_column(heading, overflow="fold")
        for fault in self.faults:
            table.add_row(fault.host, fault.what if fault.fatal else f"(warning) {fault.what}", fault.way_out)
        console.print(table)


def preflight(slots: Mapping[str, int], config: Config | None) -> Preflight:
    """Ask all hosts at once, over ssh; `config` is that of the training, None for other commands."""
    probes = [_Probe(host, question_of(config)) for host in slots]
    try:
        with ThreadPoolExecutor(max_workers=len(probes)) as pool:
            list(pool.map(_Probe.ask_facts, probes))
            answered = [probe for probe in probes if probe.facts is not None]
            ports = {probe.host: probe.facts.port for probe in answered if probe.facts is not None}
            list(pool.map(lambda probe: probe.ask_reach(_peers(probe.host, ports)), answered))
    finally:
        for probe in probes:
            probe.close()
    faults = [fault for probe in probes if (fault := probe.fault) is not None]
    facts = {probe.host: probe.facts for probe in probes if probe.facts is not None}
    faults += compare_hosts(facts)
    for host, its_facts in facts.items():
        faults += host_faults(host, its_facts, slots[host], config)
    for probe in answered:
        faults += probe.reach_faults()
        if abs(probe.clock_skew_seconds) > LARGEST_CLOCK_SKEW_SECONDS:
            what = f"its clock differs by {probe.clock_skew_seconds:+.0f} s from this host's"
            faults.append(Fault(probe.host, what, "synchronise the clocks, for example with chrony", fatal=False))
    interfaces = {interface for probe in answered for interface in probe.interfaces()}
    first = next(iter(facts.values()), None)
    return Preflight(faults, interfaces.pop() if len(interfaces) == 1 else None, first.free_port if first else None)


def question_of(config: Config | None) -> Question:
    if config is None:
        return Question([], None)
    return Question([source.path for source in config.data.resolved_sources], config.run.output_dir)


def compare_hosts(facts: Mapping[str, Facts]) -> list[Fault]:
    """In what a host differs from most of the others (from the first one where there is no majority)."""
    faults = []
    described = {host: _comparable(its_facts) for host, its_facts in facts.items()}
    for what in sorted({key for values in described.values() for key in values}):
        usual = Counter(values[what] for values in described.values() if what in values).most_common(1)[0][0]
        for host, values in described.items():
            if values.get(what, usual) != usual:
                way_out = "install the same everywhere" if "dataset" not in what else "copy the same dataset everywhere"
                faults.append(Fault(host, f"{what}: {values[what]} there, {usual} elsewhere", way_out))
    return faults


def _comparable(facts: Facts) -> dict[str, str]:
    values = dict(facts.versions)
    values["this project's code"] = f"sha256 {facts.code_sha256[:12]}"
    values["GPU"] = ", ".join(sorted({gpu.name for gpu in facts.gpus})) or "none"
    values["GPU driver"] = ", ".join(sorted({gpu.driver for gpu in facts.gpus})) or "none"
    for folder, fingerprint in facts.data.items():
        # A folder that is missing is a fault of its own.
        if fingerprint is not None:
            values[f"dataset {folder}"] = f"sha256 {fingerprint[:12]}"
    return values


def host_faults(host: str, facts: Facts, slots: int, config: Config | None) -> list[Fault]:
    """What is in the way on one host, whatever the others are."""
    faults = []
    if facts.gpus and slots > len(facts.gpus):
        what = f"{slots} processes on {len(facts.gpus)} GPUs"
        faults.append(Fault(host, what, f"set slots={len(facts.gpus)}, one process for each GPU"))
    elif not facts.gpus and slots > facts.num_cores:
        what = f"{slots} processes on {facts.num_cores} CPU cores"
        faults.append(Fault(host, what, "set fewer slots", fatal=False))
    for number, gpu in enumerate(facts.gpus[:slots]):
        if gpu.used_mib > IDLE_GPU_SHARE * gpu.total_mib:
            what = f"GPU {number} ({gpu.name}): {gpu.used_mib} of {gpu.total_mib} MiB are in use"
            faults.append(Fault(host, what, "end the other job, or leave the host out", fatal=False))
    for folder, fingerprint in facts.data.items():
        if fingerprint is None:
            faults.append(Fault(host, f"no dataset in {folder}", "share the folder, or copy it to the same path"))
    if facts.output_fault:
        faults.append(Fault(host, f"cannot write the output folder: {facts.output_fault}", "make room, or allow it"))
    elif config is not None and facts.output_free_bytes < (needed := checkpoint_room_bytes(config)):
        what = f"{_gib(facts.output_free_bytes)} free for checkpoints that need about {_gib(needed)}"
        faults.append(Fault(host, what, "make room, or lower checkpoint.keep_last"))
    if facts.gpus and facts.shared_memory_free_bytes < LEAST_SHARED_MEMORY_BYTES:
        what = f"{_gib(facts.shared_memory_free_bytes)} free in /dev/shm, which NCCL uses between GPUs"
        faults.append(Fault(host, what, "enlarge it (containers: --shm-size)", fatal=False))
    if facts.max_open_files < LEAST_OPEN_FILES:
        faults.append(Fault(host, f"at most {facts.max_open_files} open files", "ulimit -n 65536", fatal=False))
    return faults


def checkpoint_room_bytes(config: Config) -> int:
    """Room for the checkpoints that are kept and the one being written; embeddings count where the config has them."""
    model = config.model.model_copy(update={"vocab_size": config.model.vocab_size or 1})
    known = config.model_copy(update={"model": model})
    return checkpoint_bytes(known, config.zero.stage) * (config.checkpoint.keep_last + 1)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _peers(host: str, ports: Mapping[str, int]) -> dict[str, int]:
    hosts = list(ports)
    position = hosts.index(host)
    following = [hosts[(position + step) % len(hosts)] for step in range(1, NUM_PEERS + 1)]
    return {peer: ports[peer] for peer in (hosts[0], *following) if peer != host}


class _Probe:
    """`launch.probe` on one host, through ssh."""

    def __init__(self, host: str, question: Question) -> None:
        self.host = host
        self.facts: Facts | None = None
        self.clock_skew_seconds = 0.0
        self.fault: Fault | None = None
        self._reached: dict[str, dict[str, str]] = {}
        words = remote_python("launch.probe", json.dumps(dataclasses.asdict(question)))
        self._process = subprocess.Popen(
            ssh_command(host, words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def ask_facts(self) -> None:
        answer = self._read()
        if answer is not None:
            self.facts = Facts.from_json(answer)
            self.clock_skew_seconds = self.facts.seconds_since_epoch - time.time()

    def ask_reach(self, peers: Mapping[str, int]) -> None:
        assert self._process.stdin is not None
        # A host that is gone by now shows in what comes back.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(peers) + "\n")
            self._process.stdin.flush()
        self._reached = self._read() or {}

    def reach_faults(self) -> list[Fault]:
        way_out = "check /etc/hosts or DNS, and the firewall between the hosts"
        return [
            Fault(self.host, f"does not reach {peer}: {answer['fault']}", way_out)
            for peer, answer in self._reached.items()
            if answer["fault"]
        ]

    def interfaces(self) -> set[str]:
        """This host's interfaces that lead to the others."""
        used = {answer["address"] for answer in self._reached.values()}
        by_interface = self.facts.addresses.items() if self.facts else ()
        return {interface for interface, address in by_interface if address in used}

    def _read(self) -> Any:
        assert self._process.stdout is not None
        timer = threading.Timer(SECONDS_TO_ANSWER, self._process.kill)
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        if line:
            return json.loads(line)
        self._process.kill()
        assert self._process.stderr is not None
        said = self._process.stderr.read().strip().splitlines()
        self.fault = Fault(self.host, f"no answer over ssh: {said[-1] if said else 'timed out'}", _ssh_way_out(said))
        return None

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def _ssh_way_out(said: list[str]) -> str:
    text = "\n".join(said)
    if "Permission denied" in text:
        return "put this host's public key into authorized_keys there (ssh-copy-id)"
    if "resolve" in text:
        return "correct the name in the hostfile, or add it to /etc/hosts or DNS"
    if "No module named" in text or "No such file" in text:
        return "install the project at the same path as here"
    return "check that the host is up and that `ssh HOST true` works without a password"
