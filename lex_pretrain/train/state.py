"""Where a run stands: what a checkpoint's `state.json` holds."""

import dataclasses
from typing import Any

from lex_pretrain.train.health import SampleRange


@dataclasses.dataclass(frozen=True)
class TrainState:
    """Where a run stands. `samples` alone fixes the data order from here on, with what is to be passed over.

    `samples` is the next global sample index; `passed_over` the ranges that were left out where the run went back.
    `recent_losses` and `num_bad_steps` let a resumed run judge the next loss as the uninterrupted one would.
    """

    step: int
    samples: int
    tokens: int
    world_size: int
    zero_stage: int
    data_fingerprint: str
    wandb_run_id: str | None = None
    passed_over: tuple[SampleRange, ...] = ()
    recent_losses: tuple[float, ...] = ()
    num_bad_steps: int = 0

    @staticmethod
    def from_json(values: dict[str, Any]) -> "TrainState":
        """From what `dataclasses.asdict` and JSON made of it; what an older version did not save is as at a start."""
        ranges = sample_ranges(values.get("passed_over", []))
        losses = tuple(values.get("recent_losses", ()))
        return TrainState(**{**values, "passed_over": ranges, "recent_losses": losses})


def sample_ranges(values: list[list[int]]) -> tuple[SampleRange, ...]:
    return tuple((first, end) for first, end in values)
