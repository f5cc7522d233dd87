"""torchrun with the exit code of the first process that failed, where torchrun itself ends every failure with 1."""

import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

if __name__ == "__main__":
    try:
        main()
    except ChildFailedError as error:
        _, first_failure = error.get_first_failure()
        # A negative code is the signal that ended the process; shells report it as 128 + its number.
        code = first_failure.exitcode
        sys.exit(code if code >= 0 else 128 - code)
