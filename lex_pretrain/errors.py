"""The errors that end a command, each with the exit code that the command line promises."""


class LexError(Exception):
    """One readable message for the user: what is wrong, where, and the way out."""

    exit_code = 1
    # Whether every rank of a job meets it alike, so that one of them need say it.
    on_every_rank = False


class JobError(LexError):
    """The job was right to start and failed."""

    exit_code = 1


class SharedJobError(JobError):
    """The job failed, and all its ranks know it alike."""

    on_every_rank = True


class RequestError(LexError):
    """What was asked for is wrong: a flag, a config key, a missing file. Nothing was started."""

    exit_code = 2
    on_every_rank = True


class StoppedError(LexError):
    """Stopped on a signal after saving; the same command goes on."""

    exit_code = 75
    on_every_rank = True
