"""One process of a job on many hosts: runs the command, keeps its log, and notes how it failed.

Every launcher starts this in place of the command, with one encoded argument: remote shells, pdsh and DeepSpeed each
change spaces, quotes and percent signs of what they pass on, but not letters and digits.
"""

import base64
import contextlib
import dataclasses
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import IO, Literal

from launch.control_group import count_memory_kills
from launch.memory_kills import kernel_message
from lex_pretrain.files import write_json
from lex_pretrain.ranks import die_with_parent, find_ranks

JOB_VARIABLE = "LEX_JOB"
PASSED_ON_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
LAST_LINES = 20
SECONDS_TO_DRAIN = 5.0

Show = Literal["first", "all"]


@dataclasses.dataclass(frozen=True)
class RankTask:
    """What each process of a job is to do: a module and its arguments, run in `folder` on its host."""

    job: str
    folder: str
    log_folder: str
    show: Show
    environment: dict[str, str]
    arguments: list[str]
    module: str = "lex_pretrain"

    def encode(self) -> str:
        return base64.urlsafe_b64encode(json.dumps(dataclasses.asdict(self)).encode()).decode()

    @classmethod
    def decode(cls, text: str) -> "RankTask":
        return cls(**json.loads(base64.urlsafe_b64decode(text)))


@dataclasses.dataclass(frozen=True)
class Failure:
    """How one process of a job ended; `exit_code` is minus the signal's number where a signal ended it."""

    rank: int
    host: str
    exit_code: int
    seconds_since_epoch: float
    last_lines: list[str]
    kernel_message: str
    log_file: str

    @property
    def job_exit_code(self) -> int:
        return self.exit_code if self.exit_code >= 0 else 128 - self.exit_code


def run(task: RankTask) -> int:
    """Run the task's command; its output goes to a log and, for the ranks that are shown, on to the launcher."""
    os.chdir(task.folder)
    os.environ.update(task.environment)
    os.environ[JOB_VARIABLE] = task.job
    ranks = find_ranks(os.environ)
    for name, value in vars(ranks).items():
        os.environ[name.upper()] = str(value)
    log_file = Path(task.log_folder) / f"rank-{ranks.rank:05d}.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    last_lines: deque[str] = deque(maxlen=LAST_LINES)
    tag = f"[{ranks.rank} {socket.gethostname()}] ".encode() if task.show == "all" else b""
    shown = task.show == "all" or ranks.rank == 0
    kills_before = count_memory_kills()
    with log_file.open("ab", buffering=0) as log:
        log.write(f"$ {task.module} {shlex.join(task.arguments)}  # on {socket.gethostname()}\n".encode())
        process = subprocess.Popen(
            [sys.executable, "-m", task.module, *task.arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # MPI hands its processes an open descriptor.
            close_fds=False,
            preexec_fn=die_with_parent,
        )
        for number in PASSED_ON_SIGNALS:
            signal.signal(number, lambda number, frame: process.send_signal(number))
        assert process.stdout is not None
        assert process.stderr is not None
        copiers = [
            threading.Thread(target=_copy, args=(source, target if shown else None, tag, log, lines), daemon=True)
            for source, target, lines in (
                (process.stdout, sys.stdout.buffer, None),
                (process.stderr, sys.stderr.buffer, last_lines),
            )
        ]
        for copier in copiers:
            copier.start()
        code = process.wait()
        for copier in copiers:
            # A helper process that the command left behind may hold its output open for longer.
            copier.join(SECONDS_TO_DRAIN)
    failure = Failure(
        rank=ranks.rank,
        host=socket.gethostname(),
        exit_code=code,
        seconds_since_epoch=time.time(),
        last_lines=list(last_lines),
        kernel_message=kernel_message(process.pid, kills_before) if code == -signal.SIGKILL else "",
        log_file=str(log_file),
    )
    if code != 0:
        write_json(log_file.with_suffix(".failed.json"), dataclasses.asdict(failure))
    return failure.job_exit_code


def read_failures(log_folder: Path) -> list[Failure]:
    """The failures noted in a log folder of one job, the first to happen first."""
    files = log_folder.glob("rank-*.failed.json")
    failures = [Failure(**json.loads(file.read_text(encoding="utf-8"))) for file in files]
    return sorted(failures, key=lambda failure: failure.seconds_since_epoch)


def _copy(
    source: IO[bytes], shown: IO[bytes] | None, tag: bytes, log: IO[bytes], last_lines: deque[str] | None
) -> None:
    for line in source:
        # The log is closed when the command has ended and its helpers go on talking.
        with contextlib.suppress(ValueError):
            log.write(line)
        if last_lines is not None:
            last_lines.append(line.decode(errors="replace").rstrip())
        if shown is not None:
            # The launcher may be gone; the log goes on.
            with contextlib.suppress(OSError, ValueError):
                shown.write(tag + line)
                shown.flush()


if __name__ == "__main__":
    sys.exit(run(RankTask.decode(sys.argv[1])))
