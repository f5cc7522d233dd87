"""Where a run stands: what a checkpoint's `state.json` holds."""

import dataclasses
from typing import Any

from lex_pretrain.data.order import ORDER_VERSION
from lex_pretrain.train.health import SampleRange


@dataclasses.dataclass(frozen=True)
class TrainState:
    """Where a run stands. `samples` alone fixes the data order from here on, with what is to be passed over.

    `samples` is the next global sample index, in the order of `order_version`; `passed_over` the ranges that were left
    out where the run went back.
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
    order_version: int = ORDER_VERSION

    @staticmethod
    def from_json(values: dict[str, Any]) -> "TrainState":
        """From what `dataclasses.asdict` and JSON made of it; what an older version did not save is as at a start.

        Only the order's version is not: those that did not save it dealt the first.
        """
        ranges = sample_ranges(values.get("passed_over", []))
        losses = tuple(values.get("recent_losses", ()))
        version = values.get("order_version", 1)
        return TrainState(**{**values, "passed_over": ranges, "recent_losses": losses, "order_version": version})


def sample_ranges(values: list[list[int]]) -> tuple[SampleRange, ...]:
    return tuple((first, end) for first, end in values)
