"""Medians of repeated runs, taken in turns so that a noisy machine is unfair to none."""

import statistics
import time
from collections.abc import Callable, Mapping


def median_seconds(works: Mapping[str, Callable[[], object]], num_rounds: int = 5) -> dict[str, float]:
    """Median wall time of each piece of work, after one run of each to warm up."""
    for work in works.values():
        work()
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(num_rounds):
        for name, work in works.items():
            started = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(taken) for name, taken in seconds.items()}
