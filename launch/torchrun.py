"""torchrun with the exit code of the first process that failed, where torchrun itself ends every failure with 1."""

import logging
import sys
import tempfile

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

from lex_pretrain.errors import RequestError, StoppedError
from lex_pretrain.progress import configure_logging, logger


def run() -> int:
    """Run torchrun on this process's arguments and return the job's exit code."""
    # Its own report of a failure would repeat, in 30 lines, what the failed process has said.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        # Else it leaves a folder of empty logs behind in the system's temporary folder at every start.
        with tempfile.TemporaryDirectory(prefix="lex-pretrain-") as folder:
            main(["--log-dir", folder, *sys.argv[1:]])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        configure_logging(debug=False)
        if failure.exitcode < 0:
            logger.error("error: rank %d (process %d) was ended by %s", rank, failure.pid, failure.signal_name())
            return 128 - failure.exitcode
        if failure.exitcode not in (RequestError.exit_code, StoppedError.exit_code):
            logger.error("error: rank %d (process %d) ended with %d", rank, failure.pid, failure.exitcode)
        return failure.exitcode
    return 0


if __name__ == "__main__":
    sys.exit(run())
