"""What is in the way of a job, judged from the facts of its hosts: each fault with the way out."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from launch.all_reduce import NUM_BYTES, Result
from launch.probe import Facts
from launch.training import Training
from lex_pretrain.config import Config
from lex_pretrain.errors import RequestError

EVERY_HOST = "every host"
LEAST_SHARED_MEMORY_BYTES = 2**30
LEAST_OPEN_FILES = 1024
# Memory that a driver and a display take; more than this belongs to another job.
IDLE_GPU_SHARE = 0.05
# GB/s that the slowest cables of today still carry: a quarter of gigabit Ethernet between CPUs, and between hosts with
# GPUs most of 10 gigabits.
LEAST_BANDWIDTH = {"gloo": 0.03, "nccl": 1.0}


@dataclass(frozen=True)
class Fault:
    """One thing in the way on one host. Only a fatal one keeps a job from starting."""

    host: str
    what: str
    way_out: str
    fatal: bool = True


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


def host_faults(host: str, facts: Facts, slots: int, training: Training | None) -> list[Fault]:
    """What is in the way on one host, whatever the others are; its memory is another matter."""
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
    elif training is not None and facts.output_free_bytes < (needed := training.checkpoint_bytes):
        what = f"{_size(facts.output_free_bytes)} free for checkpoints that need about {_size(needed)}"
        faults.append(Fault(host, what, "make room, or lower checkpoint.keep_last"))
    if facts.gpus and facts.shared_memory_free_bytes < LEAST_SHARED_MEMORY_BYTES:
        what = f"{_size(facts.shared_memory_free_bytes)} free in /dev/shm, which NCCL uses between GPUs"
        faults.append(Fault(host, what, "enlarge it (containers: --shm-size)", fatal=False))
    if facts.max_open_files < LEAST_OPEN_FILES:
        faults.append(Fault(host, f"at most {facts.max_open_files} open files", "ulimit -n 65536", fatal=False))
    return faults


def memory_faults(facts: Mapping[str, Facts], slots: Mapping[str, int], training: Training) -> list[Fault]:
    """Where the free memory does not hold what processes take by `plan`'s formulas; `slots` are those of all hosts.

    What is there throughout must fit. Activations, buffers and copies for saves are estimates or not there for long:
    where only they do not fit, it is a warning. The first of `slots` is the host of rank 0.
    """
    world_size = sum(slots.values())
    try:
        memory = training.memory(world_size)
    except RequestError as error:
        return [Fault(EVERY_HOST, str(error), "start another number of processes, or change the config")]
    faults = []
    first_host = next(iter(slots))
    for host, its_facts in facts.items():
        count, available = slots[host], its_facts.memory_available_bytes
        there = f"{'its control group' if its_facts.memory_is_limited else 'the host'} has {_size(available)} left"
        those = f"{count} of {world_size} processes" if count < world_size else f"all processes ({count})"
        if its_facts.gpus:
            number, gpu = min(enumerate(its_facts.gpus[:count]), key=lambda item: item[1].free_bytes)
            taken = _Taken(f"each of {world_size} processes", 1, memory.states, memory.gpu_peak)
            room = f"GPU {number} has {_size(gpu.free_bytes)} left"
            faults += _lack(host, taken, gpu.free_bytes, room, training.config, on_gpu=True)
            if (offloaded := count * memory.offloaded) > available:
                what = f"what {those} offload takes {_size(offloaded)}; {there}"
                faults.append(Fault(host, what, "offload less, or use more hosts"))
            used = offloaded
        else:
            states, peak = (count * (part + memory.offloaded) for part in (memory.states, memory.cpu_peak))
            taken = _Taken(those, count, states, peak)
            faults += _lack(host, taken, available, there, training.config, on_gpu=False)
            used = peak
        copied = count * memory.copied + (memory.first_copied - memory.copied if host == first_host else 0)
        if used <= available < used + copied:
            beside = f" beside {_size(used)} in use" if used else ""
            what = f"the copies that {those} save from take {_size(copied)}{beside}; {there}"
            way_out = "checkpoint.in_background=false" if training.config.checkpoint.in_background else "more hosts"
            faults.append(Fault(host, what, way_out, fatal=False))
    return faults


@dataclass(frozen=True)
class _Taken:
    """Bytes that some processes take together."""

    by: str
    num_processes: int
    states: int
    peak: int


def _lack(host: str, taken: _Taken, free_bytes: int, room: str, config: Config, on_gpu: bool) -> list[Fault]:
    states = f"weights, gradients and optimizer state of {taken.by}"
    ways_out = _ways_out(config, taken.num_processes, on_gpu)
    if taken.states > free_bytes:
        return [Fault(host, f"{states} take {_size(taken.states)}; {room}", ", ".join(ways_out))]
    if taken.peak > free_bytes:
        and_more = "activations, buffers and what CUDA needs" if on_gpu else "activations and buffers"
        what = f"{states} fit, but take about {_size(taken.peak)} with {and_more}; {room}"
        ways = [] if config.train.micro_batch_size == 1 else ["a smaller train.micro_batch_size"]
        ways += [] if config.train.activation_checkpointing else ["train.activation_checkpointing=1"]
        return [Fault(host, what, ", ".join(ways + ways_out), fatal=False)]
    return []


def _ways_out(config: Config, num_processes: int, on_gpu: bool) -> list[str]:
    """What makes states smaller on a process or a host, as far as the config does not do it yet."""
    ways = [] if config.zero.stage == 3 else ["a higher zero.stage"]
    if not on_gpu:
        return [*ways, *(["fewer slots"] if num_processes > 1 else []), "more hosts"]
    if not config.zero.offload_optimizer:
        ways.append("zero.offload_optimizer=true")
    return [*ways, "more GPUs"]


def all_reduce_faults(results: Mapping[str, Result], world_size: int) -> list[Fault]:
    """Processes that did not get through it, sums that were wrong, and a network that is slower than any should be."""
    faults = []
    for host, result in results.items():
        way_out = "open the network between the hosts; NCCL_DEBUG=INFO says more, NCCL_SOCKET_IFNAME and "
        way_out += "GLOO_SOCKET_IFNAME choose the interface"
        faults += [Fault(host, f"the all-reduce failed: {fault}", way_out) for fault in result.faults]
        if result.wrong_ranks:
            ranks = ", ".join(map(str, result.wrong_ranks))
            what = f"the all-reduce gave a wrong sum on rank {ranks}"
            faults.append(Fault(host, what, "train nothing there: leave hosts out to find the one that spoils it"))
    if any(result.faults for result in results.values()):
        return faults
    rate, backend = bandwidth(results, world_size), next(iter(results.values())).backend
    if rate < LEAST_BANDWIDTH[backend]:
        what = (
            f"the all-reduce moved {rate:.3f} GB/s a link; {backend} should move {LEAST_BANDWIDTH[backend]:g} anywhere"
        )
        way_out = (
            "see whether it takes the right interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME) and who else uses it"
        )
        faults.append(Fault(EVERY_HOST, what, way_out, fatal=False))
    return faults


def bandwidth(results: Mapping[str, Result], world_size: int) -> float:
    """GB/s on the link of each process in a ring: twice the tensor but for one part of it, in the best time."""
    link_bytes = 2 * NUM_BYTES * (world_size - 1) / world_size
    return link_bytes / max(result.seconds for result in results.values()) / 1e9


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
