"""The global batch of each step, which may grow at the start of a run."""

import bisect
import functools
import itertools
from dataclasses import dataclass


@dataclass(frozen=True)
class Batches:
    """Sequences of every step: `first` at the start, in equal rises to `last` from step `ramp_steps` on.

    Steps count from 0. The sizes are multiples of `first`, which divides `last`, so that what divides the first batch
    among processes and micro batches divides all. Small batches at the start serve training as well as large ones
    (arXiv 1711.00489), and large ones later keep more devices busy.
    """

    first: int
    last: int
    ramp_steps: int

    def size(self, step: int) -> int:
        """Sequences of one step."""
        if step >= self.ramp_steps:
            return self.last
        return self.first * (1 + step * (self.last // self.first - 1) // self.ramp_steps)

    def before(self, step: int) -> int:
        """Sequences of all steps before `step`."""
        ramp = _sums(self)
        if step < len(ramp):
            return ramp[step]
        return ramp[-1] + (step - self.ramp_steps) * self.last

    def num_steps(self, num_sequences: int) -> int:
        """The least number of steps that take as many sequences."""
        ramp = _sums(self)
        if num_sequences <= ramp[-1]:
            return bisect.bisect_left(ramp, num_sequences)
        return self.ramp_steps - (ramp[-1] - num_sequences) // self.last


@functools.lru_cache
def _sums(batches: Batches) -> list[int]:
    """Sequences before each step of the ramp and before the first step after it."""
    return list(itertools.accumulate(map(batches.size, range(batches.ramp_steps)), initial=0))
