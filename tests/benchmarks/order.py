"""How fast samples are located in the order of a run, on one core, and how soon the first batch of a large run is."""

import itertools

import numpy as np

from lex_pretrain.data.order import SampleOrder
from tests.benchmarks.timing import median_seconds

WINDOWS_PER_SOURCE = 10**9
SAMPLES_PER_CALL = 1 << 20
BATCH_SIZE = 512
START_SOURCES = 100
START_TOKENS = 10**12
START_SEQUENCE_LENGTH = 1024


def run() -> list[str]:
    """Lines of the result: locations a second where long calls follow one another, and the seconds of a start."""
    readings = {
        "1 source": Reading(1).go_on,
        "2 sources": Reading(2).go_on,
        "100 sources": Reading(100).go_on,
    }
    seconds = median_seconds({**readings, "start": start}, num_rounds=9)
    return [
        *(
            f"order: {SAMPLES_PER_CALL / seconds[name] / 1e6:,.0f} M locations/s of {name} of "
            f"{WINDOWS_PER_SOURCE:,} windows"
            for name in readings
        ),
        f"order: {seconds['start']:.3f} s to the first {BATCH_SIZE} locations of {START_SOURCES} sources of "
        f"{START_TOKENS:,} tokens in all",
    ]


class Reading:
    """A run that reads ever further, so that nothing it asks for was dealt before."""

    def __init__(self, num_sources: int) -> None:
        self._order = SampleOrder([WINDOWS_PER_SOURCE] * num_sources, weights(num_sources), seed=1)
        self._firsts = itertools.count(step=SAMPLES_PER_CALL)

    def go_on(self) -> None:
        first = next(self._firsts)
        self._order.locate(np.arange(first, first + SAMPLES_PER_CALL))


def start() -> None:
    """Make an order and locate its first batch."""
    num_windows = START_TOKENS // START_SEQUENCE_LENGTH // START_SOURCES
    SampleOrder([num_windows] * START_SOURCES, weights(START_SOURCES), seed=1).locate(np.arange(BATCH_SIZE))


def weights(num_sources: int) -> list[float]:
    """Unlike weights, as in real mixtures."""
    return [1.0 + source for source in range(num_sources)]
