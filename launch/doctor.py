"""`lex-pretrain doctor`: what this machine or these hosts can do, and each thing in the way."""

import os
import shutil
import time

from rich.table import Table

from launch.commands import forwarded_variables, program_path
from launch.faults import Fault, host_faults, memory_faults
from launch.preflight import Preflight, preflight, question_of
from launch.probe import Facts, gather_facts
from launch.training import Training
from lex_pretrain.errors import JobError
from lex_pretrain.progress import console, logger

# Programs beside Python, and what is missing without them.
PROGRAMS = {
    "c++": "DeepSpeed's own operations (optimizer offload) cannot be compiled",
    "ssh": "launch cannot reach other hosts",
    "pdsh": "launch --launcher deepspeed cannot reach other hosts",
    "mpiexec": "launch --launcher mpich and prepare on many hosts cannot start",
}


def examine_hosts(slots: dict[str, int], training: Training | None) -> None:
    """Preflight of all hosts, a timed all-reduce over them included. Raises JobError when something is in the way."""
    started = time.monotonic()
    found = preflight(slots, training, forwarded_variables(os.environ))
    found.show()
    if found.fatal:
        raise JobError(f"{sum(fault.fatal for fault in found.faults)} things are in the way; nothing can start")
    logger.info("%d hosts answer and agree%s", len(slots), "" if found.faults else "; nothing is in the way")
    logger.info("done in %.0f s", time.monotonic() - started)


def examine_this_machine(training: Training | None) -> None:
    """Say what this machine has and chooses. Raises JobError when something keeps it from training."""
    from lex_pretrain.hardware import choose_num_processes, choose_precision

    facts = gather_facts(question_of(training))
    precision, precision_reason = choose_precision()
    num_processes, processes_reason = choose_num_processes()
    rows = {
        **facts.versions,
        "GPUs": ", ".join(f"{gpu.name} ({gpu.total_mib / 1024:.0f} GiB)" for gpu in facts.gpus) or "none",
        "CPU cores": str(facts.num_cores),
        "memory available": f"{facts.memory_available_bytes / 2**30:.1f} GiB"
        + (", the rest of its control group's" if facts.memory_is_limited else ""),
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
    faults = _machine_faults(facts, num_processes, training)
    Preflight(faults, interface=None, port=None).show()
    if fatal := [fault for fault in faults if fault.fatal]:
        raise JobError(f"{len(fatal)} things are in the way")


def _machine_faults(facts: Facts, num_processes: int, training: Training | None) -> list[Fault]:
    host = facts.hostname
    faults = host_faults(host, facts, num_processes, training)
    if training is not None:
        faults += memory_faults({host: facts}, {host: num_processes}, training)
    faults += [
        Fault(host, f"{package} is not installed", "pip install --editable . in the project's folder")
        for package, version in facts.versions.items()
        if version == "not installed"
    ]
    faults += [
        Fault(host, f"no {program}: {lacking}", f"install {program} if you need it", fatal=False)
        for program, lacking in PROGRAMS.items()
        if shutil.which(program, path=program_path()) is None
    ]
    return faults
