"""Batches of training windows, cut from token streams at load time, so one dataset serves every length."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lex_pretrain.config import DataSection
from lex_pretrain.data.order import SampleOrder
from lex_pretrain.data.origins import origin_of
from lex_pretrain.data.shards import TokenDataset
from lex_pretrain.data.windows import DocumentWindows, StreamWindows, Windows
from lex_pretrain.errors import RequestError


class Loader:
    """Windows of `sequence_length` tokens and the token after each, of one or several datasets."""

    def __init__(
        self,
        datasets: Sequence[TokenDataset],
        weights: Sequence[float],
        sequence_length: int,
        seed: int,
        within_documents: bool = False,
    ) -> None:
        self.datasets = tuple(datasets)
        self.sequence_length = sequence_length
        kind = DocumentWindows if within_documents else StreamWindows
        self._windows: list[Windows] = [kind(dataset, sequence_length) for dataset in self.datasets]
        for dataset, windows in zip(self.datasets, self._windows, strict=True):
            if windows.num_windows < 1:
                held = "no document" if within_documents else f"{dataset.num_tokens} tokens, too few"
                raise RequestError(
                    f"{dataset.folder}: its {dataset.split} split holds {held} for one "
                    f"window of model.sequence_length {sequence_length} and the token after it"
                )
        self.order = SampleOrder([windows.num_windows for windows in self._windows], weights, seed)

    def windows(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens [B, sequence_length + 1] of the given global sample indices."""
        sources, windows = self.order.locate(samples)
        tokens = np.empty((len(samples), self.sequence_length + 1), dtype=np.int64)
        for source, dataset in enumerate(self.datasets):
            of_source = sources == source
            if of_source.any():
                starts = self._windows[source].starts(windows[of_source])
                tokens[of_source] = dataset.read_windows(starts, self.sequence_length + 1)
        return tokens

    def share_passed_over(self, source: int) -> float:
        """Share of a source's tokens that lie in no window."""
        covered = self._windows[source].num_windows * self.sequence_length
        return 1 - covered / max(1, self.datasets[source].num_tokens)

    def documents(self, samples: NDArray[np.int64]) -> list[str]:
        """The origins of all documents in the windows of the given global sample indices, each once, in order."""
        found: dict[str, None] = {}
        sources, windows = self.order.locate(samples)
        for source, window in zip(sources.tolist(), windows, strict=True):
            dataset = self.datasets[source]
            token = int(self._windows[source].starts(np.array([window]))[0])
            end = token + self.sequence_length + 1
            while token < end:
                place = dataset.document_at(token)
                found[origin_of(dataset.folder, place.shard.stem, dataset.split, place.number)] = None
                token = place.end
        return list(found)

    def micro_batch(self, samples: NDArray[np.int64], device: torch.device) -> tuple[Tensor, Tensor]:
        """Input tokens and their next tokens, both [B, sequence_length], on `device`."""
        tokens = torch.from_numpy(self.windows(samples))
        if device.type == "cuda":
            tokens = tokens.pin_memory().to(device, non_blocking=True)
        return tokens[:, :-1], tokens[:, 1:]


def open_sources(data: DataSection, split: str) -> list[TokenDataset]:
    """Open every source of a run. RequestError when two were made with different tokenizers."""
    datasets = [TokenDataset.open(Path(source.path), split) for source in data.resolved_sources]
    fingerprints = {dataset.manifest.tokenizer.fingerprint for dataset in datasets}
    if len(fingerprints) > 1:
        listed = ", ".join(f"{dataset.folder} ({dataset.manifest.tokenizer.fingerprint[:12]})" for dataset in datasets)
        raise RequestError(
            f"the sources were prepared with different tokenizers: {listed}; prepare them again with one --tokenizer"
        )
    return datasets


def mixture_weights(data: DataSection, datasets: Sequence[TokenDataset]) -> list[float]:
    """Share of the samples of each source, before they are scaled to add up to one.

    With a temperature T, a source of n tokens counts n^(1/T) times its weight: at 1 by size, and the higher the more
    alike (as for languages of unequal size, arXiv 1901.07291, whose α is 1/T).
    """
    weights = [source.weight for source in data.resolved_sources]
    if data.temperature is None:
        return weights
    return [
        weight * dataset.num_tokens ** (1 / data.temperature) for weight, dataset in zip(weights, datasets, strict=True)
    ]
