"""A mirror of the metrics in Weights & Biases. It never stops a run: its first error is logged and ends the mirror."""

import logging
from pathlib import Path
from typing import Any

from lex_pretrain.config import Config

logger = logging.getLogger("lex_pretrain")


class WandbSink:
    """Sends each record under its own `step` axis, so that a resumed run continues the same curves.

    A run that resumes as `run_id` repeats the steps since its last checkpoint; those up to `last_sent_step` are there
    already and are not sent again.
    """

    def __init__(self, config: Config, output_dir: Path, run_id: str | None, last_sent_step: int) -> None:
        self.run_id = run_id
        self._last_sent_step = last_sent_step if run_id else 0
        self._run: Any = None
        mode = config.monitor.wandb_mode
        if mode == "disabled":
            return
        try:
            import wandb

            if mode == "online" and not wandb.login(prompt=False):
                logger.warning(
                    "wandb has no login: writing offline files to %s; send them with `wandb sync`", output_dir
                )
                mode = "offline"
            self._run = wandb.init(
                project=config.monitor.wandb_project,
                mode=mode,
                dir=output_dir,
                id=run_id,
                resume="allow" if run_id else None,
                config=config.model_dump(mode="json"),
                settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
            )
            self._run.define_metric("*", step_metric="step")
            self.run_id = self._run.id
        except Exception as error:
            self._give_up(error)

    def log(self, record: dict[str, Any]) -> None:
        if self._run is None or record["step"] <= self._last_sent_step:
            return
        try:
            self._run.log(record)
        except Exception as error:
            self._give_up(error)

    def close(self) -> None:
        if self._run is None:
            return
        try:
            self._run.finish()
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        logger.warning("wandb failed and is left out from here on; metrics.jsonl has everything: %s", error)
        self._run = None
