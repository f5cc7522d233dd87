"""Start a launcher's command, pass signals to the training processes, and end with their exit code."""

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil
import typer

from launch.commands import Command, Launcher, deepspeed_command, forwarded_variables, local_command
from launch.hostfile import read_hostfile
from lex_pretrain.errors import RequestError
from lex_pretrain.progress import logger

_FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def launch(launcher: Launcher, subcommand: list[str], hostfile: Path | None, num_processes: int, dry_run: bool) -> int:
    """Run `lex-pretrain SUBCOMMAND ...` under `launcher`; returns the job's exit code.

    Raises RequestError when the launcher cannot be used as asked.
    """
    num_cores = len(os.sched_getaffinity(0))
    if launcher == "local":
        if hostfile is not None:
            raise RequestError(
                "--launcher local starts processes on this host only; use --launcher deepspeed for --hostfile"
            )
        command = local_command(subcommand, num_processes, num_cores, os.environ)
    else:
        if hostfile is not None:
            slots = read_hostfile(hostfile)
            num_processes = max(slots.values())
            if shutil.which("pdsh") is None and not dry_run:
                raise RequestError("the deepspeed launcher reaches other hosts with pdsh, which is not installed here")
        command = deepspeed_command(subcommand, hostfile, num_processes, num_cores, os.environ)
    if dry_run:
        settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in command.environment.items())
        typer.echo(f"{settings} {shlex.join(command.arguments)}".strip())
        return 0
    return _run(command)


def _run(command: Command) -> int:
    environment = {**os.environ, **command.environment}
    with tempfile.NamedTemporaryFile("w", suffix=".env") as forwarded:
        for name, value in forwarded_variables(environment).items():
            forwarded.write(f"{name}={shlex.quote(value)}\n")
        forwarded.flush()
        # A session of its own: Ctrl-C on the terminal reaches this process alone, which passes it on.
        process = subprocess.Popen(
            command.arguments, env={**environment, "DS_ENV_FILE": forwarded.name}, start_new_session=True
        )
        with _signals_passed_to(process):
            code = process.wait()
    _end_orphans(process.pid)
    return code if code >= 0 else 128 - code


@contextmanager
def _signals_passed_to(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Hand stop signals to the training processes, past the launcher, which would kill them before they have saved.

    A second Ctrl-C ends everything at once.
    """
    interrupted = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if number == signal.SIGINT and interrupted:
            logger.warning("interrupted twice: ending at once, without saving")
            os.killpg(process.pid, signal.SIGKILL)
            return
        interrupted = interrupted or number == signal.SIGINT
        trainers = _training_processes(process.pid)
        logger.info("%s: telling %d processes to save and stop", signal.Signals(number).name, len(trainers))
        for trainer in trainers:
            trainer.send_signal(number)

    before = {number: signal.signal(number, handle) for number in _FORWARDED_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _training_processes(launcher_pid: int) -> list[psutil.Process]:
    """The processes below the launcher that run this program itself."""
    found = []
    for process in psutil.Process(launcher_pid).children(recursive=True):
        try:
            arguments = process.cmdline()
        except psutil.Error:
            continue
        is_launcher = any("launcher" in argument or argument == "launch.torchrun" for argument in arguments[:4])
        if "lex_pretrain" in arguments and not is_launcher:
            found.append(process)
    return found


def _end_orphans(group: int) -> None:
    """Processes of the job's group that outlived their launcher are ended, so that none holds a GPU or a port."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
