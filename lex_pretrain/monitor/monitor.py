"""Where a run's metrics go: `metrics.jsonl`, the console and wandb. Only rank 0 reports."""

import dataclasses
import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lex_pretrain.config import Config
from lex_pretrain.monitor.metrics import METRICS_FILE, MetricsFile, StepMetrics, read_steps
from lex_pretrain.monitor.wandb_sink import WandbSink
from lex_pretrain.progress import console, progress

logger = logging.getLogger("lex_pretrain")

_SHOWN_ITEMS = 5


class Monitor:
    """Takes each step's metrics and each event; on ranks where `enabled` is false it does nothing."""

    def __init__(
        self, config: Config, output_dir: Path, enabled: bool, first_step: int, wandb_run_id: str | None = None
    ) -> None:
        self.wandb_run_id = wandb_run_id
        self._enabled = enabled
        self._stack = ExitStack()
        if not enabled:
            return
        self._log_every_steps = config.monitor.log_every_steps
        self._num_steps = config.num_steps
        self._file = MetricsFile(output_dir / METRICS_FILE)
        self._stack.callback(self._file.close)
        recorded = read_steps(output_dir / METRICS_FILE)
        last_step = recorded[-1]["step"] if recorded else 0
        self._wandb = WandbSink(config, output_dir, wandb_run_id, last_step)
        self._stack.callback(self._wandb.close)
        self.wandb_run_id = self._wandb.run_id
        self._tokens_before = config.tokens_before
        num_tokens = self._tokens_before(self._num_steps) - self._tokens_before(first_step)
        self._progress = self._stack.enter_context(progress("training", num_tokens, "tokens", console.is_terminal))
        self._seconds = 0.0
        self._num_reported_tokens = 0

    def step(self, metrics: StepMetrics) -> None:
        if not self._enabled:
            return
        record = dataclasses.asdict(metrics)
        self._file.append(record)
        self._wandb.log(record)
        self._seconds += metrics.step_seconds
        num_tokens = self._tokens_before(metrics.step) - self._tokens_before(metrics.step - 1)
        self._num_reported_tokens += num_tokens
        self._progress.advance(num_tokens, f"step {metrics.step}  loss {metrics.loss:.3f}")
        last = metrics.step == self._num_steps
        if not console.is_terminal and (metrics.step % self._log_every_steps == 0 or last):
            num_tokens_left = self._tokens_before(self._num_steps) - self._tokens_before(metrics.step)
            logger.info(
                "step %d of %d  loss %.4f  lr %.2e  grad norm %.2f  %s tokens/s  MFU %.0f %%  %.0f s left",
                metrics.step,
                self._num_steps,
                metrics.loss,
                metrics.lr,
                metrics.grad_norm,
                f"{metrics.tokens_per_second:,.0f}",
                100 * metrics.mfu,
                self._seconds / self._num_reported_tokens * num_tokens_left,
            )

    def event(self, name: str, **fields: Any) -> None:
        """Record something that happened between steps, such as `saved` or `validation`."""
        if not self._enabled:
            return
        self._file.append({"event": name, **fields})
        values = {key: value for key, value in fields.items() if isinstance(value, int | float)}
        if name == "validation":
            self._wandb.log({f"validation/{key}" if key != "step" else key: value for key, value in values.items()})
        shown = "  ".join(f"{key} {_shown(value)}" for key, value in fields.items())
        logger.info("%s: %s", name.replace("_", " "), shown)

    def close(self) -> None:
        self._stack.close()


def _shown(value: Any) -> str:
    """A field of an event for people; metrics.jsonl has all of a long list."""
    if isinstance(value, list):
        more = len(value) - _SHOWN_ITEMS
        return "; ".join(map(str, value[:_SHOWN_ITEMS])) + (f"; and {more} more" if more > 0 else "")
    return f"{value:.4f}" if isinstance(value, float) else str(value)
