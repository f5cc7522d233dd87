"""`lex-pretrain doctor`: what this machine or these hosts can do, and each thing in the way."""

import shutil
import time
from pathlib import Path

from rich.table import Table

from launch.attempt import Attempt
from launch.commands import Rendezvous, program_path, torchrun_commands
from launch.host_links import HostLinks
from launch.preflight import Fault, Preflight, host_faults, preflight, question_of
from launch.probe import Facts, gather_facts
from launch.rank import RankTask
from launch.supervise import describe
from lex_pretrain.config import Config
from lex_pretrain.errors import JobError
from lex_pretrain.progress import console, logger

# Programs beside Python, and what is missing without them.
PROGRAMS = {
    "c++": "DeepSpeed's own operations (optimizer offload) cannot be compiled",
    "ssh": "launch cannot reach other hosts",
    "pdsh": "launch --launcher deepspeed cannot reach other hosts",
    "mpiexec": "launch --launcher mpich and prepare on many hosts cannot start",
}


def examine_hosts(slots: dict[str, int], config: Config | None, log_folder: Path) -> None:
    """Preflight of all hosts, then a timed all-reduce over them. Raises JobError when something is in the way."""
    started = time.monotonic()
    found = preflight(slots, config)
    found.show()
    if found.fatal:
        raise JobError(f"{sum(fault.fatal for fault in found.faults)} things are in the way; nothing can start")
    logger.info("%d hosts answer and agree%s", len(slots), "" if found.faults else "; nothing is in the way")
    _time_all_reduce(slots, found, log_folder)
    logger.info("done in %.0f s", time.monotonic() - started)


def _time_all_reduce(slots: dict[str, int], found: Preflight, log_folder: Path) -> None:
    name = f"doctor{time.time_ns()}"
    task = RankTask(
        job=f"{name}.0",
        folder=str(Path.cwd()),
        log_folder=str(log_folder / name),
        show="first",
        environment=found.interface_variables(),
        arguments=[],
        module="launch.all_reduce",
    )
    meeting = Rendezvous(next(iter(slots)), found.port or 0)
    links = HostLinks(slots, name, log_folder / name, timeout_seconds=30)
    outcome = Attempt(torchrun_commands(task, slots, meeting), links).run()
    if outcome.exit_code != 0:
        raise JobError(f"the all-reduce failed: {describe(outcome)}")


def examine_this_machine(config: Config | None) -> None:
    """Say what this machine has and chooses. Raises JobError when something keeps it from training."""
    from lex_pretrain.hardware import choose_num_processes, choose_precision

    facts = gather_facts(question_of(config))
    precision, precision_reason = choose_precision()
    num_processes, processes_reason = choose_num_processes()
    rows = {
        **facts.versions,
        "GPUs": ", ".join(f"{gpu.name} ({gpu.total_mib / 1024:.0f} GiB)" for gpu in facts.gpus) or "none",
        "CPU cores": str(facts.num_cores),
        "memory available": f"{facts.memory_available_bytes / 2**30:.1f} GiB",
        "shared memory free": f"{facts.shared_memory_free_bytes / 2**30:.1f} GiB",
        "open files": str(facts.max_open_files),
        "network": ", ".join(f"{name} {address}" for name, address in facts.addresses.items()) or "loopback only",
        "precision": f"{precision}: {precision_reason}",
        "processes": f"{num_processes}: {processes_reason}",
    }
    table = Table("this machine", "", title="doctor")
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    faults = _machine_faults(facts, num_processes, config)
    Preflight(faults, interface=None, port=None).show()
    if fatal := [fault for fault in faults if fault.fatal]:
        raise JobError(f"{len(fatal)} things are in the way")


def _machine_faults(facts: Facts, num_processes: int, config: Config | None) -> list[Fault]:
    faults = host_faults(facts.hostname, facts, num_processes, config)
    faults += [
        Fault(facts.hostname, f"{package} is not installed", "pip install --editable . in the project's folder")
        for package, version in facts.versions.items()
        if version == "not installed"
    ]
    faults += [
        Fault(facts.hostname, f"no {program}: {lacking}", f"install {program} if you need it", fatal=False)
        for program, lacking in PROGRAMS.items()
        if shutil.which(program, path=program_path()) is None
    ]
    return faults
