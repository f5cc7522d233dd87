"""One attempt of a job: start the launchers' commands, pass signals on, notice lost hosts, leave nothing behind."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType

import psutil

from launch.commands import Command
from launch.host_links import HostLinks
from launch.rank import Failure
from launch.ssh import CONNECTION_FAILED
from lex_pretrain.progress import logger

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
INTERRUPTED = 130
# After the first of several launchers has failed, the others get this long to notice and to say why.
SECONDS_FOR_OTHERS = 35.0


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended; `failures` has the first process to fail first. `told_to_stop`: by a signal to `launch`."""

    exit_code: int
    failures: list[Failure] = field(default_factory=list)
    lost_hosts: list[str] = field(default_factory=list)
    told_to_stop: bool = False


class Attempt:
    """The processes of one attempt. `links` are the connections to its hosts, None for this host alone."""

    def __init__(self, commands: Sequence[Command], links: HostLinks | None) -> None:
        self._links = links
        self._commands = commands
        self._received: list[signal.Signals] = []
        self._num_interrupts = 0
        self._told_to_stop = False
        self._processes: list[subprocess.Popen[bytes]] = []

    def run(self) -> Outcome:
        """Run to the end, whatever it is."""
        with self._signals_noted():
            try:
                # Sessions of their own: Ctrl-C on the terminal reaches this process alone, which passes it on.
                self._processes += [
                    subprocess.Popen(
                        command.arguments,
                        env={**os.environ, **command.environment},
                        cwd=command.folder,
                        start_new_session=True,
                    )
                    for command in self._commands
                ]
                lost_hosts = self._wait()
            finally:
                failures = self._links.end() if self._links else []
                self._end_processes()
        if self._num_interrupts > 1:
            return Outcome(INTERRUPTED, told_to_stop=True)
        failed = next((process.returncode for process in self._processes if process.returncode != 0), 0)
        code = 1 if lost_hosts else _shell_code(failed)
        if failures:
            code = failures[0].job_exit_code
        return Outcome(code, failures, lost_hosts, self._told_to_stop)

    def _wait(self) -> list[str]:
        """Until all launchers have ended, a host is lost, or the user has no more patience; returns the lost hosts."""
        others_until = float("inf")
        while any(process.poll() is None for process in self._processes):
            if self._links is not None:
                self._links.beat()
                if lost_hosts := self._links.lost_hosts():
                    return lost_hosts
            self._pass_signals_on()
            if self._num_interrupts > 1:
                logger.warning("interrupted twice: ending at once, without saving")
                return []
            if others_until == float("inf") and any(process.returncode for process in self._processes):
                others_until = time.monotonic() + SECONDS_FOR_OTHERS
            if time.monotonic() > others_until:
                return []
            time.sleep(0.1)
        return []

    @contextlib.contextmanager
    def _signals_noted(self) -> Iterator[None]:
        def note(number: int, frame: FrameType | None) -> None:
            self._received.append(signal.Signals(number))

        before = {number: signal.signal(number, note) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _pass_signals_on(self) -> None:
        """Hand stop signals to the processes themselves, past the launchers, which would kill them before they save."""
        while self._received:
            number = self._received.pop(0)
            self._told_to_stop = True
            self._num_interrupts += number == signal.SIGINT
            if self._num_interrupts > 1:
                return
            logger.info("%s: telling the processes to save and stop", number.name)
            if self._links is not None:
                self._links.signal(signal.SIGUSR1)
                continue
            for process in self._local_ranks():
                with contextlib.suppress(psutil.Error):
                    process.send_signal(number)

    def _local_ranks(self) -> list[psutil.Process]:
        """The processes below the launchers that run this program; srun in their place, which passes signals on."""
        found = []
        for launcher in self._processes:
            if launcher.args[0] == "srun":  # type: ignore[index]
                found.append(psutil.Process(launcher.pid))
                continue
            for process in psutil.Process(launcher.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    # The launchers themselves name it further on, as the module they are to start.
                    if "-m lex_pretrain" in " ".join(process.cmdline()[:4]):
                        found.append(process)
        return found

    def _end_processes(self) -> None:
        """What outlived its launcher on this host is ended, so that none holds a GPU or a port."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _shell_code(code: int) -> int:
    """A process's exit code as a shell shows it. DeepSpeed's launcher ends with the low byte of a negative one."""
    if code < 0:
        return 128 - code
    return 128 + 256 - code if 256 - signal.NSIG < code < CONNECTION_FAILED else code
