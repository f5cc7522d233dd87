"""torchrun with the exit code of the first process that failed, where torchrun itself ends every failure with 1.

A stop signal is passed on to the processes, which save, where torchrun itself would end them after half a minute. In a
container, where this is the first process, the signal comes here alone.
"""

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
from types import FrameType
from typing import TYPE_CHECKING

import psutil

from launch.control_group import count_memory_kills
from launch.memory_kills import kernel_message
from launch.rank import PASSED_ON_SIGNALS
from lex_pretrain.errors import RequestError, StoppedError
from lex_pretrain.progress import configure_logging, logger

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure


def run() -> int:
    """Run torchrun on this process's arguments and return the job's exit code."""
    # Before the import of torch, which takes seconds in which a signal would be lost.
    for number in PASSED_ON_SIGNALS:
        signal.signal(number, _pass_on)
    threading.Thread(target=_end_where_nothing_runs, args=(_signals(),), daemon=True).start()
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    # Its own report of a failure would repeat, in 30 lines, what the failed process has said.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    kills_before = count_memory_kills()
    try:
        # Else it leaves a folder of empty logs behind in the system's temporary folder at every start.
        with tempfile.TemporaryDirectory(prefix="lex-pretrain-") as folder:
            # Those that are left to torchrun end the processes at once.
            main(["--log-dir", folder, "--signals-to-handle", "SIGHUP,SIGQUIT", *sys.argv[1:]])
    except ChildFailedError as error:
        rank, failure = first_failure(error)
        configure_logging(debug=False)
        if failure.exitcode < 0:
            logger.error("error: rank %d (process %d) was ended by %s", rank, failure.pid, failure.signal_name())
            if failure.exitcode == -signal.SIGKILL and (said := kernel_message(failure.pid, kills_before)):
                logger.error("the kernel killed it for want of memory: %s", said)
            return 128 - failure.exitcode
        if failure.exitcode not in (RequestError.exit_code, StoppedError.exit_code):
            logger.error("error: rank %d (process %d) ended with %d", rank, failure.pid, failure.exitcode)
        return failure.exitcode
    return 0


def first_failure(error: "ChildFailedError") -> tuple[int, "ProcessFailure"]:
    """Rank and end of the process that failed first.

    torchrun looks ten times a second, and by then those that lost their connection to a killed process may have ended
    too. So a process that a signal ended comes first, unless it is torchrun that ended it: by SIGTERM, or, where it did
    not heed that within half a minute, by SIGKILL.
    """
    rank, first = error.get_first_failure()
    for other, failure in error.failures.items():
        # Times are whole seconds.
        at_once = failure.timestamp <= first.timestamp + 1
        if at_once and failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
            return other, failure
    return rank, first


def _signals() -> int:
    """A descriptor that yields the number of each signal, as a byte, as soon as it arrives."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    return reading


def _end_where_nothing_runs(signals: int) -> None:
    """End at a stop signal before any process is started: while torch waits for the other hosts, no handler runs."""
    while arrived := os.read(signals, 1):
        if arrived[0] in PASSED_ON_SIGNALS and not psutil.Process().children():
            os._exit(StoppedError.exit_code)


def _pass_on(number: int, frame: FrameType | None) -> None:
    """Tell the processes to stop; where none has been started there is nothing to save."""
    processes = psutil.Process().children()
    if not processes:
        raise SystemExit(StoppedError.exit_code)
    for process in processes:
        # Not SIGINT, which a terminal gives them too, and the second of which ends them without saving.
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(run())
