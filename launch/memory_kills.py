"""Whether the kernel ended a process for want of memory: SIGKILL itself does not say why it came."""

import subprocess

from launch.control_group import count_memory_kills


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
