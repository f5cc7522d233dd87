"""When a run has gone wrong enough to go back: steps that are not finite in a row, or a loss that jumps.

Going back means the last good checkpoint with all samples since then passed over. Whether a sample or the weights that
it met were at fault cannot be told, and from the same weights the same samples would lead to the same end.
"""

import math
import statistics
from collections.abc import Sequence

from lex_pretrain.config import TrainSection

# The standard deviation of a normal distribution in median absolute deviations.
_DEVIATIONS = 1.4826
_LEAST_DEVIATION = 1e-6

# Global sample indices first .. end - 1.
SampleRange = tuple[int, int]


def robust_z_score(value: float, others: Sequence[float]) -> float:
    """How many standard deviations `value` lies above the median of others, by their median absolute deviation."""
    median = statistics.median(others)
    deviation = statistics.median(abs(other - median) for other in others)
    return (value - median) / max(_DEVIATIONS * deviation, _LEAST_DEVIATION)


def trouble(loss: float, recent_losses: Sequence[float], num_bad_steps: int, settings: TrainSection) -> str | None:
    """Why to go back after a step, None to go on.

    `recent_losses` are those before the step, `num_bad_steps` the steps in a row up to this one that were not finite.
    """
    if num_bad_steps >= settings.max_bad_steps:
        return f"{num_bad_steps} steps in a row were not finite"
    if settings.spike_threshold is None or num_bad_steps or len(recent_losses) < settings.spike_window_steps:
        return None
    score = robust_z_score(loss, recent_losses)
    if score <= settings.spike_threshold:
        return None
    return f"loss {loss:.4f} is {score:.1f} robust standard deviations above the {len(recent_losses)} before"


def remember(recent_losses: tuple[float, ...], loss: float, settings: TrainSection) -> tuple[float, ...]:
    """The window of losses with one more; none where spikes are not looked for."""
    if settings.spike_threshold is None or not math.isfinite(loss):
        return recent_losses
    return (*recent_losses, loss)[-settings.spike_window_steps :]


def next_sample(sample: int, passed_over: Sequence[SampleRange]) -> int:
    """`sample`, or where to go on when passed-over samples begin there."""
    while ends := [end for first, end in passed_over if first == sample]:
        sample = max(ends)
    return sample
