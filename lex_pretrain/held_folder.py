"""One job at a time in an output folder: two would write over each other's files."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from lex_pretrain.errors import LexError, RequestError, SharedJobError
from lex_pretrain.files import remove_temporaries
from lex_pretrain.folder_lock import folder_lock
from lex_pretrain.ranks import Ranks, gather_lists
from lex_pretrain.run_folder import CHECKPOINTS_FOLDER

# How long the end of another job is waited for: ranks of a job that was killed may outlive it by seconds.
PATIENCE_SECONDS = 15.0


@contextlib.contextmanager
def held_folder(folder: Path, ranks: Ranks, what: str, setting: str) -> Iterator[None]:
    """Hold `folder`, named by `setting` and made if it is missing, for this job, which is a `what`; collective.

    On every rank: SharedJobError when another has not left it after PATIENCE_SECONDS, so that a supervised job is
    tried again, and RequestError when it cannot be written.
    """
    with contextlib.ExitStack() as held:
        faults: list[LexError] = []
        if ranks.rank == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                held.enter_context(folder_lock(folder, what, PATIENCE_SECONDS))
                remove_temporaries(folder, folder / CHECKPOINTS_FOLDER)
            except RequestError as error:
                faults = [SharedJobError(str(error))]
            except OSError as error:
                faults = [RequestError(f"{setting} {folder} cannot be written: {error}")]
        if faults := gather_lists(faults, ranks):
            raise faults[0]
        yield
