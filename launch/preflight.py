"""Before anything starts: ask every host what it is, compare, and name every fault of every host with the way out."""

from collections.abc import Iterable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace

from rich.table import Table

from launch.all_reduce import NUM_BYTES, Part
from launch.commands import INTERFACE_VARIABLES, Rendezvous
from launch.faults import Fault, all_reduce_faults, bandwidth, compare_hosts, host_faults, memory_faults
from launch.probe import Question
from launch.remote_probe import RemoteProbe
from launch.training import Training
from lex_pretrain.progress import console, logger

# Each host tries the first one and this many after it in the list: all of them in small jobs, a ring in large ones.
NUM_PEERS = 8
LARGEST_CLOCK_SKEW_SECONDS = 5.0
# For the all-reduce, the import of torch and the meeting of all processes included.
SECONDS_TO_REDUCE = 60.0


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


def preflight(slots: Mapping[str, int], training: Training | None, environment: Mapping[str, str]) -> Preflight:
    """Ask all hosts at once, over ssh; where nothing fatal is found, have all processes sum a tensor.

    `training` is None for other commands. `environment` has the variables that reach the job's processes.
    """
    probes = [RemoteProbe(host, question_of(training)) for host in slots]
    try:
        with ThreadPoolExecutor(max_workers=len(probes)) as pool:
            list(pool.map(RemoteProbe.ask_facts, probes))
            ports = {probe.host: probe.facts.port for probe in probes if probe.facts is not None}
            answered = [probe for probe in probes if probe.host in ports]
            list(pool.map(lambda probe: probe.ask_reach(_peers(probe.host, ports)), answered))
            found = _judge(probes, slots, training)
            if not found.fatal and sum(slots.values()) > 1:
                variables = {**found.interface_variables(), **environment}
                found = replace(found, faults=found.faults + _all_reduce(pool, probes, slots, variables))
            return found
    finally:
        for probe in probes:
            probe.close()


def question_of(training: Training | None) -> Question:
    if training is None:
        return Question([], None)
    config = training.config
    return Question([source.path for source in config.data.resolved_sources], config.run.output_dir)


def _judge(probes: Iterable[RemoteProbe], slots: Mapping[str, int], training: Training | None) -> Preflight:
    """What the hosts' answers say."""
    faults = [fault for probe in probes if (fault := probe.fault) is not None]
    facts = {probe.host: probe.facts for probe in probes if probe.facts is not None}
    faults += compare_hosts(facts)
    for host, its_facts in facts.items():
        faults += host_faults(host, its_facts, slots[host], training)
    if training is not None:
        faults += memory_faults(facts, slots, training)
    answered = [probe for probe in probes if probe.facts is not None]
    for probe in answered:
        faults += probe.reach_faults()
        if abs(probe.clock_skew_seconds) > LARGEST_CLOCK_SKEW_SECONDS:
            what = f"its clock differs by {probe.clock_skew_seconds:+.0f} s from this host's"
            faults.append(Fault(probe.host, what, "synchronise the clocks, for example with chrony", fatal=False))
    interfaces = {interface for probe in answered for interface in probe.interfaces()}
    first = next(iter(facts.values()), None)
    interface = interfaces.pop() if len(interfaces) == 1 else None
    return Preflight(faults, interface, first.free_ports[0] if first else None)


def _all_reduce(
    pool: Executor, probes: list[RemoteProbe], slots: Mapping[str, int], variables: Mapping[str, str]
) -> list[Fault]:
    first, world_size = probes[0], sum(slots.values())
    assert first.facts is not None
    meeting = Rendezvous(first.host, first.facts.free_ports[1])
    parts, first_rank = [], 0
    for count in slots.values():
        environment = {**variables, **meeting.variables()}
        parts.append(Part(first_rank, count, world_size, environment, SECONDS_TO_REDUCE + len(slots)))
        first_rank += count
    results = dict(zip(slots, pool.map(RemoteProbe.ask_all_reduce, probes, parts), strict=True))
    faults = all_reduce_faults(results, world_size)
    if not any(fault.fatal for fault in faults):
        logger.info(
            "all-reduce of %d MiB over %d processes: correct, %.0f ms, %.2f GB/s a link",
            *(NUM_BYTES // 2**20, world_size),
            1e3 * max(result.seconds for result in results.values()),
            bandwidth(results, world_size),
        )
    return faults


def _peers(host: str, ports: Mapping[str, int]) -> dict[str, int]:
    hosts = list(ports)
    position = hosts.index(host)
    following = [hosts[(position + step) % len(hosts)] for step in range(1, NUM_PEERS + 1)]
    return {peer: ports[peer] for peer in (hosts[0], *following) if peer != host}
