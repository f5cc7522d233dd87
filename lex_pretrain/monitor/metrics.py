"""`metrics.jsonl`: the record of a run, one JSON object a line, only ever appended to."""

import dataclasses
import errno
import json
import os
from pathlib import Path
from typing import Any

from lex_pretrain.errors import JobError, RequestError

METRICS_FILE = "metrics.jsonl"


@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """What one optimizer step reports; `loss` in nats a token, `mfu` against the measured matrix-product rate."""

    step: int
    samples: int
    tokens: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_second: float
    mfu: float
    step_seconds: float
    skipped: bool


class MetricsFile:
    """Appends records; a line that a killed process left unfinished is cut off when the file is opened again."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        whole = file.read_bytes().rfind(b"\n") + 1
        os.ftruncate(self._descriptor, whole)

    def append(self, record: dict[str, Any]) -> None:
        """One write a line, so that a reader or a kill never meets half of one that was reported.

        Raises JobError when the disk is full.
        """
        line = (json.dumps(record, ensure_ascii=False) + "\n").encode()
        try:
            if os.write(self._descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise JobError(
                f"{self._file} cannot be written: {error}; make room and run the same command again"
            ) from error

    def close(self) -> None:
        os.close(self._descriptor)


def read_records(file: Path) -> list[dict[str, Any]]:
    """All whole records in the order of writing; an unfinished last line is left out."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        raise RequestError(f"{file} does not exist: not the folder of a run") from None
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            continue
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise RequestError(f"{file}, line {number} is not JSON: {error}") from error
    return records


def read_steps(file: Path) -> list[dict[str, Any]]:
    """The true record of each step, by step: the last line of a step is the true one (cli contract).

    Steps that a resumption or a rewind took back and that were not done again are none of the run's.
    """
    by_step: dict[int, dict[str, Any]] = {}
    for record in read_records(file):
        match record.get("event"):
            case None:
                by_step[record["step"]] = record
            case "resumed" | "rewound" as event:
                last = record["to_step" if event == "rewound" else "step"]
                by_step = {step: kept for step, kept in by_step.items() if step <= last}
    return [by_step[step] for step in sorted(by_step)]
