"""How a command ends: its errors as one message, and its exit code."""

import logging
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from lex_pretrain.errors import LexError, StoppedError
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
    except Exception as error:
        _say(error, debug)
        return 1
    return 0


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


def _say(error: Exception, debug: bool) -> None:
    if not logger.handlers:
        configure_logging(debug)
    if debug:
        traceback.print_exception(error)
    expected = isinstance(error, LexError)
    message = str(error) if expected else f"{type(error).__name__}: {error} (run with --debug for the traceback)"
    rank = os.environ.get("RANK")
    where = f" on rank {rank}" if rank not in (None, "0") else ""
    label = "" if isinstance(error, StoppedError) else f"error{where}: "
    logger.log(logging.INFO if isinstance(error, StoppedError) else logging.ERROR, "%s%s", label, message)
