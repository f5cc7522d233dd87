"""Progress of long work: a live bar on a terminal, a line every so often in a log file."""

import contextlib
import logging
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

SECONDS_BETWEEN_LOG_LINES = 15.0

# Everything meant for people goes to stderr, so that `--json` owns stdout.
console = Console(stderr=True)
logger = logging.getLogger("lex_pretrain")


def configure_logging(debug: bool) -> None:
    """Send the log to stderr: bare messages on a terminal, time-stamped ones in a file."""
    handler = logging.StreamHandler()
    if not console.is_terminal:
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.DEBUG if debug else logging.INFO)
    logger.propagate = False


class ProgressReporter:
    """Counts work done, with a rate in `unit` a second and the time left."""

    def __init__(self, description: str, total: float, unit: str, bar: Progress | None) -> None:
        self.description = description
        self.total = total
        self.unit = unit
        self.completed = 0.0
        self._bar = bar
        self._task: TaskID | None = bar.add_task(description, total=total, note="") if bar else None
        self._started = time.monotonic()
        self._last_line = self._started

    def advance(self, amount: float, note: str = "") -> None:
        """Add `amount` to the work done; `note` is shown beside the rate, for example the loss."""
        self.reach(self.completed + amount, note)

    def reach(self, completed: float, note: str = "") -> None:
        """Set the work done so far, for work that is looked at from outside."""
        self.completed = completed
        now = time.monotonic()
        elapsed = max(now - self._started, 1e-9)
        rate = self.completed / elapsed
        speed = f"{rate / 1e6:,.1f} MB/s" if self.unit == "bytes" else f"{rate:,.0f} {self.unit}/s"
        text = f"{speed}{'  ' + note if note else ''}"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self.completed, note=text)
        elif now - self._last_line >= SECONDS_BETWEEN_LOG_LINES:
            self._last_line = now
            seconds_left = (self.total - self.completed) / rate if rate else float("inf")
            share = 100 * self.completed / self.total if self.total else 100.0
            logger.info("%s: %.0f %%, %s, %.0f s left", self.description, share, text, seconds_left)


@contextlib.contextmanager
def progress(description: str, total: float, unit: str, enabled: bool = True) -> Iterator[ProgressReporter]:
    """Report progress of `total` units of work; `enabled` is false on the ranks that stay silent."""
    if not (enabled and console.is_terminal):
        reporter = ProgressReporter(description, total, unit, bar=None)
        if not enabled:
            reporter._last_line = float("inf")
        yield reporter
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn() if unit == "bytes" else MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, transient=False) as bar:
        yield ProgressReporter(description, total, unit, bar)
