"""Learning rate of each step."""

import math

from lex_pretrain.config import Config


def learning_rate(step: int, config: Config) -> float:
    """Rate of the update that ends step `step`, counted from 0.

    The warm-up rises in equal parts and reaches the peak with its last step, so the very first update already uses
    the schedule: peak / warmup_steps. The decay reaches its final value with the last step.
    """
    peak, schedule = config.optimizer.learning_rate, config.schedule
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    num_decay_steps = max(1, config.train.num_steps - schedule.warmup_steps)
    progress = min(1.0, (step + 1 - schedule.warmup_steps) / num_decay_steps)
    match schedule.decay:
        case "polynomial":
            share = math.pow(1 - progress, schedule.power)
        case "cosine":
            share = (1 + math.cos(math.pi * progress)) / 2
        case "constant":
            share = 1.0
    return peak * (schedule.final_fraction + (1 - schedule.final_fraction) * share)
