"""One ssh connection to each host of a job while it runs: signals, signs of life, and clean ends. See `host_agent`."""

import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from launch.rank import Failure
from launch.ssh import remote_python, ssh_command
from lex_pretrain.errors import JobError

SECONDS_BETWEEN_BEATS = 2.0
SECONDS_TO_START = 60.0
SECONDS_TO_END = 30.0


class HostLink:
    """The connection to the agent on one host."""

    def __init__(self, host: str, launch_id: str, log_folder: Path, timeout_seconds: float) -> None:
        self.host = host
        self.failures: list[Failure] = []
        self.ready = threading.Event()
        self.closed = threading.Event()
        self._heard_seconds = time.monotonic()
        words = remote_python("launch.host_agent", launch_id, str(log_folder), str(timeout_seconds))
        self._process = subprocess.Popen(
            ssh_command(host, words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Ctrl-C on the terminal must not cut the connection that carries the signal.
            start_new_session=True,
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._heard_seconds = time.monotonic()
            if line.startswith("{"):
                self.failures.append(Failure(**json.loads(line)))
            self.ready.set()
        self.closed.set()

    def send(self, word: str) -> None:
        assert self._process.stdin is not None
        # A broken connection shows in `silent_seconds` and `closed`.
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(word + "\n")
            self._process.stdin.flush()

    @property
    def silent_seconds(self) -> float:
        return time.monotonic() - self._heard_seconds

    def error_text(self) -> str:
        """What ssh said, once the connection is closed."""
        assert self._process.stderr is not None
        return self._process.stderr.read().strip() if self.closed.is_set() else "no answer"

    def close(self, patient: bool) -> None:
        if patient:
            self.closed.wait(SECONDS_TO_END)
        self._process.kill()
        self._process.wait()


class HostLinks:
    """The connections of one attempt of a job. Raises JobError at the start when a host cannot be used."""

    def __init__(self, hosts: Iterable[str], launch_id: str, log_folder: Path, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self._beat_seconds = 0.0
        self.links = [HostLink(host, launch_id, log_folder, timeout_seconds) for host in hosts]
        deadline = time.monotonic() + SECONDS_TO_START
        faults = []
        for link in self.links:
            while not link.ready.wait(0.05) and not link.closed.is_set() and time.monotonic() < deadline:
                pass
            if not link.ready.is_set():
                faults.append(f"host {link.host} cannot be used: {link.error_text()}")
        if faults:
            self._close(patient=False)
            raise JobError("\n".join(faults))

    def beat(self) -> None:
        """Give each host a sign of life, every so often."""
        if time.monotonic() - self._beat_seconds >= SECONDS_BETWEEN_BEATS:
            self._beat_seconds = time.monotonic()
            self._tell_all("beat")

    def lost_hosts(self) -> list[str]:
        """Hosts whose connection is gone or that were silent for the time-out."""
        return [link.host for link in self.links if link.closed.is_set() or link.silent_seconds > self.timeout_seconds]

    def signal(self, number: int) -> None:
        """Send a signal to the processes of the job on every host."""
        self._tell_all(f"signal {number}")

    def end(self) -> list[Failure]:
        """End what is left of the job on every host that answers; the failures of all of them, the first one first."""
        self._tell_all("end")
        self._close(patient=True)
        # Hosts with a common file system report the same notes.
        by_rank = {failure.rank: failure for link in self.links for failure in link.failures}
        return sorted(by_rank.values(), key=lambda failure: failure.seconds_since_epoch)

    def _tell_all(self, word: str) -> None:
        for link in self.links:
            link.send(word)

    def _close(self, patient: bool) -> None:
        lost = set(self.lost_hosts())
        for link in self.links:
            link.close(patient and link.host not in lost)
