"""Commands on other hosts, through ssh."""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# Without these, a host that went away keeps ssh waiting for hours.
ALIVE_OPTIONS = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", *ALIVE_OPTIONS)
CONNECTION_FAILED = 255


def ssh_command(host: str, words: Sequence[str], environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The command that runs `words` on `host`, in this process's folder, with more variables set there."""
    settings = [f"{name}={value}" for name, value in (environment or {}).items()]
    remote = f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(['env', *settings, *words])}"
    return ("ssh", *OPTIONS, host, remote)


def remote_python(module: str, *arguments: str) -> list[str]:
    """The words that run a module of this project under this very interpreter, which every host has at this path."""
    path = os.environ.get("PYTHONPATH")
    return [*(["env", f"PYTHONPATH={path}"] if path else []), sys.executable, "-m", module, *arguments]


def answers(host: str) -> bool:
    """Whether a host can be reached and runs commands."""
    try:
        done = subprocess.run(
            ["ssh", *OPTIONS, host, "true"], stdin=subprocess.DEVNULL, capture_output=True, timeout=20, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
