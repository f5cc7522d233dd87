"""Ending on a signal: the step under way is finished, a checkpoint saved, and the process exits with 75."""

import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """Notes the first stop signal. A second Ctrl-C ends at once, as without this class."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        for number in STOP_SIGNALS:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
