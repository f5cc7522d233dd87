"""What the units that are being packed have done so far, told through small files: over processes and hosts alike."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from lex_pretrain.data.manifest import Account
from lex_pretrain.data.origins import UNITS_FOLDER

_SECONDS_BETWEEN_REPORTS = 1.0


def _running_folder(output: Path) -> Path:
    return output / UNITS_FOLDER / "running"


class RunningUnit:
    """Where a worker notes what it has done of one unit. The note stays until the leader has the unit's record."""

    def __init__(self, output: Path, number: int) -> None:
        self._file = _running_folder(output) / f"{number}.json"
        self._file.parent.mkdir(exist_ok=True)
        self._next_report = time.monotonic() + _SECONDS_BETWEEN_REPORTS

    def report(self, account: Callable[[], Account]) -> None:
        """Note the account so far, at most once a second."""
        if time.monotonic() < self._next_report:
            return
        self._next_report = time.monotonic() + _SECONDS_BETWEEN_REPORTS
        # Renamed, so that no half note is ever read; not flushed, since nobody needs it after a crash.
        written = self._file.with_suffix(".new")
        written.write_text(account().model_dump_json(), encoding="utf-8")
        written.replace(self._file)


def running_units(output: Path) -> dict[int, Account]:
    """What each unit in work has done so far, as last noted."""
    found = {}
    for file in _running_folder(output).glob("*.json"):
        try:
            found[int(file.stem)] = Account.model_validate_json(file.read_bytes())
        except FileNotFoundError:
            continue
    return found


def forget_running_unit(output: Path, number: int) -> None:
    """Remove the note of a unit whose record is there."""
    (_running_folder(output) / f"{number}.json").unlink(missing_ok=True)


def forget_running_units(output: Path) -> None:
    """Remove what notes there are, such as those of workers that were killed."""
    shutil.rmtree(_running_folder(output), ignore_errors=True)
