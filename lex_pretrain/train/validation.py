"""Loss on held-out windows while training: at the training length, and at four times it with blockwise attention."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed

from lex_pretrain.config import Config
from lex_pretrain.data.shards import TokenDataset
from lex_pretrain.errors import RequestError
from lex_pretrain.model_config import AttentionMode
from lex_pretrain.ranks import Ranks

LONG_FACTOR = 4


class Validation:
    """The first windows of each source's validation split, spread over the ranks."""

    def __init__(self, config: Config, ranks: Ranks, device: torch.device) -> None:
        self.ranks = ranks
        self.device = device
        self.every_steps = config.train.validate_every_steps
        self.sequence_length = config.model.sequence_length
        self.num_tokens = config.train.validation_num_sequences * self.sequence_length
        self.datasets: list[TokenDataset] = []
        if self.enabled:
            split = config.data.validation_split
            self.datasets = [_open(Path(source.path), split) for source in config.data.resolved_sources]
            least = LONG_FACTOR * self.sequence_length * ranks.world_size + 1
            for dataset in self.datasets:
                if dataset.num_tokens < least:
                    raise RequestError(
                        f"{dataset.folder}: its {split} split holds {dataset.num_tokens} tokens; validation at "
                        f"{LONG_FACTOR} times the training length on {ranks.world_size} processes needs {least}. "
                        "Prepare a larger split or set train.validate_every_steps=null"
                    )

    @property
    def enabled(self) -> bool:
        return self.every_steps is not None

    def due(self, step: int) -> bool:
        return self.every_steps is not None and step % self.every_steps == 0

    def run(self, engine: Any) -> dict[str, float]:
        """Mean loss in nats a token by name, equal on all ranks."""
        engine.eval()
        long_length = LONG_FACTOR * self.sequence_length
        with torch.no_grad():
            return {
                "loss": self._loss(engine, self.sequence_length, "causal"),
                f"loss_{long_length}_blockwise": self._loss(engine, long_length, "blockwise"),
            }

    def _loss(self, engine: Any, length: int, attention: AttentionMode) -> float:
        """Every rank runs as many forward passes as any other, as partitioned parameters demand."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for dataset in self.datasets:
            available = min(self.num_tokens, dataset.num_tokens - 1) // length
            per_rank = max(1, available // self.ranks.world_size)
            for index in range(per_rank):
                start = (index * self.ranks.world_size + self.ranks.rank) * length
                window = torch.from_numpy(dataset.read_windows(np.array([start]), length + 1)).to(self.device)
                sums += torch.stack([engine(window[:, :-1], window[:, 1:], attention).double(), sums.new_tensor(1.0)])
        torch.distributed.all_reduce(sums)
        return float(sums[0] / sums[1])


def _open(folder: Path, split: str) -> TokenDataset:
    try:
        return TokenDataset.open(folder, split)
    except RequestError as error:
        raise RequestError(f"{error}; or train without validation by train.validate_every_steps=null") from error
