"""Learning rate of each step."""

import math

from lex_pretrain.config import Config


def learning_rate(step: int, config: Config) -> float:
    """Rate of the update that ends step `step`, counted from 0.

    The warm-up rises in equal parts and reaches the peak with its last step, so the very first update already uses
    the schedule: peak / warmup_steps. The decay reaches its final value with the last step. Warm-up, stable, decay
    (`wsd`, arXiv 2404.06395) stays at the peak in between, so that a run can be lengthened before its decay begins.
    """
    peak, schedule = config.optimizer.learning_rate, config.schedule
    num_steps, warmup_steps = config.num_steps, config.warmup_steps
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    decay_start = warmup_steps
    if schedule.decay == "wsd":
        decay_start = num_steps - max(1, round(schedule.decay_fraction * num_steps))
    progress = min(1.0, max(0, step + 1 - decay_start) / max(1, num_steps - decay_start))
    match schedule.decay:
        case "polynomial" | "wsd":
            share = math.pow(1 - progress, schedule.power)
        case "cosine":
            share = (1 + math.cos(math.pi * progress)) / 2
        case "constant":
            share = 1.0
    return peak * (schedule.final_fraction + (1 - schedule.final_fraction) * share)
