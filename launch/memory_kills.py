"""Whether the kernel ended a process for want of memory: SIGKILL itself does not say why it came."""

import subprocess
from pathlib import Path

_CONTROL_GROUPS = Path("/sys/fs/cgroup")
# Version 2 of control groups and version 1: the mark of a line in /proc/self/cgroup, where its groups are, and the file
# that counts, in a line `oom_kill N` (Linux's Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst).
_COUNTERS = (
    ("", _CONTROL_GROUPS, "memory.events"),
    ("memory", _CONTROL_GROUPS / "memory", "memory.oom_control"),
)


def count_memory_kills() -> int | None:
    """Processes of this process's control group that the kernel has ended so; None where nothing counts them."""
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, group = line.split(":", 2)
        for controller, folder, name in _COUNTERS:
            if controllers != controller:
                continue
            # A container may see its own group as the root of all.
            for file in (folder / group.lstrip("/") / name, folder / name):
                if file.is_file():
                    counts = dict(line.split() for line in file.read_text(encoding="utf-8").splitlines())
                    return int(counts["oom_kill"])
    return None


def kernel_message(pid: int, kills_before: int | None) -> str:
    """What the kernel says about a process that SIGKILL ended; empty where it did not end it for want of memory.

    `kills_before` is what `count_memory_kills` gave before the process started.
    """
    kills = count_memory_kills()
    counted = kills is not None and kills_before is not None
    if counted and kills == kills_before:
        return ""
    try:
        log = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        log = ""
    # Not found in a container, which knows its processes by other numbers and may not read the log.
    message = next((line for line in reversed(log.splitlines()) if f"Killed process {pid} " in line), "")
    return message or ("its control group counts one more process ended so (oom_kill)" if counted else "")
