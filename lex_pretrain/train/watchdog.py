"""Ending a job that gets no further, with the stacks of all its ranks and the name of the one that is behind."""

import contextlib
import faulthandler
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta

from lex_pretrain.ranks import Ranks

# How long the ranks wait to hear of each other: those that waited meet their time limits at about the same time.
SECONDS_TO_HEAR = 10.0
_LOOKS_A_TIMEOUT = 10

logger = logging.getLogger("lex_pretrain")


@dataclass(frozen=True)
class Place:
    """How far a rank has come: all ranks count the same stages in the same order."""

    count: int
    doing: str


class Watchdog:
    """Watches over this rank's progress from a thread of its own, and ends the process after a time without any.

    The stacks of all threads go to stderr first. A rank that cannot run even this, for example inside a C function that
    never returns, has its stacks written by `faulthandler`, and is named by the others as the one that does not answer.
    """

    def __init__(self, ranks: Ranks, timeout_seconds: float | None) -> None:
        self._ranks = ranks
        self._timeout_seconds = timeout_seconds
        self._place = Place(0, "starting")
        self._since = time.monotonic()
        self._watching = False

    def progress(self, doing: str) -> None:
        """Note that the next stage begins, such as "reading the samples of step 5"."""
        self._place = Place(self._place.count + 1, doing)
        self._since = time.monotonic()
        if self._watching and self._timeout_seconds is not None:
            faulthandler.dump_traceback_later(self._timeout_seconds + SECONDS_TO_HEAR / 2)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch until the block ends; nothing happens where there is no time limit."""
        if self._timeout_seconds is None:
            yield
            return
        ended = threading.Event()
        self._watching = True
        self.progress("beginning")
        thread = threading.Thread(target=self._watch, args=(self._timeout_seconds, ended), daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._watching = False
            ended.set()
            faulthandler.cancel_dump_traceback_later()

    def _watch(self, timeout_seconds: float, ended: threading.Event) -> None:
        while not ended.wait(timeout_seconds / _LOOKS_A_TIMEOUT):
            if time.monotonic() - self._since > timeout_seconds:
                self._end_job(timeout_seconds)

    def _end_job(self, timeout_seconds: float) -> None:
        faulthandler.cancel_dump_traceback_later()
        place, rank = self._place, self._ranks.rank
        print(f"stacks of rank {rank}, {place.doing}:", file=sys.stderr, flush=True)  # noqa: T201
        faulthandler.dump_traceback(all_threads=True)
        places = self._hear(place)
        speaks = rank == min(places)
        if speaks:
            reason = describe(places, self._ranks.world_size)
            logger.error("error: no progress for %.0f s: %s", timeout_seconds, reason)
        # The speaker may keep the store that others still read; without the others its own wait for them would fail
        # before it has spoken.
        time.sleep(1.0 if speaks else 3.0)
        sys.stderr.flush()
        os._exit(1)

    def _hear(self, place: Place) -> dict[int, Place]:
        """The places of all ranks that answer in time, this one's included."""
        places = {self._ranks.rank: place}
        if self._ranks.world_size == 1:
            return places
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        deadline = time.monotonic() + SECONDS_TO_HEAR
        try:
            store = TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                timeout=timedelta(seconds=SECONDS_TO_HEAR),
                wait_for_workers=False,
            )
            store.set(self._key(self._ranks.rank), json.dumps([place.count, place.doing]))
            while len(places) < self._ranks.world_size and time.monotonic() < deadline:
                for rank in range(self._ranks.world_size):
                    if rank not in places and store.check([self._key(rank)]):
                        places[rank] = Place(*json.loads(store.get(self._key(rank))))
                time.sleep(0.1)
        # The store dies with the rank that keeps it, which is then one that does not answer.
        except RuntimeError as error:
            logger.warning("the ranks' meeting point does not answer: %s", error)
        return places

    @staticmethod
    def _key(rank: int) -> str:
        return f"lex_pretrain/no_progress/{rank}"


def describe(places: Mapping[int, Place], world_size: int) -> str:
    """Which rank keeps the others waiting, as far as can be told."""
    silent = [rank for rank in range(world_size) if rank not in places]
    if silent:
        plural = len(silent) > 1
        listed = ", ".join(map(str, silent))
        return f"rank{'s' if plural else ''} {listed} {'do' if plural else 'does'} not answer; {_where(places)}"
    least = min(place.count for place in places.values())
    behind = {rank: place for rank, place in places.items() if place.count == least}
    if len(behind) == len(places) and len(places) > 1:
        return f"no rank is behind the others; {_where(places)}"
    return _where(behind)


def _where(places: Mapping[int, Place]) -> str:
    """Ranks by what they are doing."""
    by_stage: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        by_stage.setdefault(place.doing, []).append(rank)
    return "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {doing}"
        for doing, ranks in by_stage.items()
    )
