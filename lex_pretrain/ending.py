"""How a command ends: its errors as one message, and its exit code."""

import errno
import logging
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from lex_pretrain import __version__
from lex_pretrain.errors import JobError, LexError, StoppedError
from lex_pretrain.progress import configure_logging, logger


def run_command(command: Callable[[], object], debug: bool) -> int:
    """Run it and return its exit code; what went wrong is said on stderr, by one rank where all met it alike."""
    try:
        command()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except LexError as error:
        if os.environ.get("RANK", "0") == "0" or not error.on_every_rank:
            _say(error, debug)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read the output wants no more of it, as `head` does; what is left must not fail once more at the end.
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
        return 128 + signal.SIGPIPE
    except Exception as error:
        message = _as_message(error)
        message.__cause__ = error
        _say(message, debug)
        return message.exit_code
    return 0


def _as_message(error: Exception) -> LexError:
    """What was not foreseen: the system's own refusals by the file, anything else as the bug that it is."""
    if isinstance(error, OSError) and error.filename is not None:
        file = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else error.filename
        message = f"{file}: {error.strerror or error}"
        way_out = {
            errno.ENOSPC: "free some space and run the same command again",
            errno.EDQUOT: "free some space and run the same command again",
            errno.EACCES: "allow it to this user, or name another place",
            errno.EROFS: "name a place that can be written",
        }.get(error.errno or 0)
        return JobError(f"{message}; {way_out}" if way_out else message)
    if isinstance(error, MemoryError):
        return JobError("no memory is left for this; give it less to do at once, or more memory")
    log = _write_traceback(error)
    return JobError(
        f"this is a bug of lex-pretrain {__version__}: {type(error).__name__}: {error}. Its traceback is in {log}; "
        "please report it with the command that you gave"
    )


def _write_traceback(error: Exception) -> str:
    """Keep the traceback in a file of its own; what was given on the command line is not in it."""
    descriptor, name = tempfile.mkstemp(prefix="lex-pretrain-", suffix=".log")
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as log:
        log.write(f"lex-pretrain {__version__}, Python {sys.version}, {sys.platform}\n")
        traceback.print_exception(error, file=log)
    return name


def leave(code: int) -> NoReturn:
    """Leave the process with this code; one of several ranks leaves without taking Python apart.

    A rank of a job that was done has once been ended by SIGABRT on its way out, most likely for threads of torch that
    still needed Python, and the job counted as failed. Under MPI its own way out is kept.
    """
    one_of_several = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "torch" in sys.modules
    if one_of_several and "mpi4py.MPI" not in sys.modules:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _say(error: LexError, debug: bool) -> None:
    if not logger.handlers:
        configure_logging(debug)
    if debug:
        traceback.print_exception(error)
    rank = os.environ.get("RANK")
    where = f" on rank {rank}" if rank not in (None, "0") else ""
    label = "" if isinstance(error, StoppedError) else f"error{where}: "
    logger.log(logging.INFO if isinstance(error, StoppedError) else logging.ERROR, "%s%s", label, error)
