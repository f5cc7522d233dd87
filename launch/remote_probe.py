"""`launch.probe` on one host, through ssh: the questions to it, and the answers or why there are none."""

import contextlib
import dataclasses
import json
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import Any

from launch.all_reduce import Part, Result
from launch.faults import Fault
from launch.probe import Facts, Question
from launch.ssh import remote_python, ssh_command

SECONDS_TO_ANSWER = 30.0


class RemoteProbe:
    """One host's probe. `facts` are None, and `fault` says why, where it does not answer."""

    def __init__(self, host: str, question: Question) -> None:
        self.host = host
        self.facts: Facts | None = None
        self.clock_skew_seconds = 0.0
        self.fault: Fault | None = None
        self._reached: dict[str, dict[str, str]] = {}
        # Not a pipe, which would be full some day while nobody reads it.
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        words = remote_python("launch.probe", json.dumps(dataclasses.asdict(question)))
        self._process = subprocess.Popen(
            ssh_command(host, words), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True
        )

    def ask_facts(self) -> None:
        answer = self._read(SECONDS_TO_ANSWER)
        if answer is not None:
            self.facts = Facts.from_json(answer)
            self.clock_skew_seconds = self.facts.seconds_since_epoch - time.time()

    def ask_reach(self, peers: Mapping[str, int]) -> None:
        self._write(peers)
        self._reached = self._read(SECONDS_TO_ANSWER) or {}

    def ask_all_reduce(self, part: Part) -> Result:
        """The result of the host's part in it; a host that is gone by now has a fault in place of one."""
        self._write(dataclasses.asdict(part))
        answer = self._read(part.timeout_seconds + SECONDS_TO_ANSWER)
        return Result(**answer) if answer else Result(faults=[self.fault.what if self.fault else "no answer"])

    def reach_faults(self) -> list[Fault]:
        way_out = "check /etc/hosts or DNS, and the firewall between the hosts"
        return [
            Fault(self.host, f"does not reach {peer}: {answer['fault']}", way_out)
            for peer, answer in self._reached.items()
            if answer["fault"]
        ]

    def interfaces(self) -> set[str]:
        """This host's interfaces that lead to the others."""
        used = {answer["address"] for answer in self._reached.values()}
        by_interface = self.facts.addresses.items() if self.facts else ()
        return {interface for interface, address in by_interface if address in used}

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._said.close()

    def _write(self, values: Any) -> None:
        assert self._process.stdin is not None
        # A host that is gone by now shows in what comes back.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(values) + "\n")
            self._process.stdin.flush()

    def _read(self, timeout_seconds: float) -> Any:
        assert self._process.stdout is not None
        timer = threading.Timer(timeout_seconds, self._process.kill)
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        if line:
            return json.loads(line)
        self._process.kill()
        self._process.wait()
        self._said.seek(0)
        said = self._said.read().strip().splitlines()
        self.fault = Fault(self.host, f"no answer over ssh: {said[-1] if said else 'timed out'}", _ssh_way_out(said))
        return None


def _ssh_way_out(said: list[str]) -> str:
    text = "\n".join(said)
    if "Permission denied" in text:
        return "put this host's public key into authorized_keys there (ssh-copy-id)"
    if "resolve" in text:
        return "correct the name in the hostfile, or add it to /etc/hosts or DNS"
    if "No module named" in text or "No such file" in text:
        return "install the project at the same path as here"
    return "check that the host is up and that `ssh HOST true` works without a password"
