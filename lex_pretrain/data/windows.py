"""Where training windows lie in a dataset's stream of tokens: end to end over all of it, or within documents alone."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lex_pretrain.data.shards import TokenDataset

# Shards whose documents' windows stay counted; each costs sixteen bytes a document.
_MAX_COUNTED_SHARDS = 64


class Windows(Protocol):
    """Windows of a fixed length, numbered from 0; the token after each is there too, to be predicted."""

    num_windows: int

    def starts(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """First token of each window, as a place in the stream."""
        ...


class StreamWindows:
    """Windows laid end to end over the stream, across the borders of documents, as in the paper."""

    def __init__(self, dataset: TokenDataset, sequence_length: int) -> None:
        self.num_windows = (dataset.num_tokens - 1) // sequence_length
        self._sequence_length = sequence_length

    def starts(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        return numbers * self._sequence_length


class DocumentWindows:
    """Windows laid end to end from each document's start, so that each holds one document only.

    What is left at a document's end, and documents that do not fill a window and the token after it, are passed over.
    Opening reads where every document starts, eight bytes each.
    """

    def __init__(self, dataset: TokenDataset, sequence_length: int) -> None:
        self._dataset = dataset
        self._sequence_length = sequence_length
        self._counted: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        totals = [int(self._count(dataset.document_starts(i), i).sum()) for i in range(len(dataset.shards))]
        self._shard_ends = np.cumsum([0, *totals], dtype=np.int64)
        self.num_windows = int(self._shard_ends[-1])

    def starts(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        starts = np.empty_like(numbers)
        shards = np.searchsorted(self._shard_ends, numbers, side="right") - 1
        for shard in np.unique(shards).tolist():
            in_shard = shards == shard
            first_tokens, ends = self._documents(shard)
            within = numbers[in_shard] - self._shard_ends[shard]
            documents = np.searchsorted(ends, within, side="right")
            before = np.where(documents > 0, ends[documents - 1], 0)
            starts[in_shard] = first_tokens[documents] + (within - before) * self._sequence_length
        return starts

    def _count(self, starts: NDArray[np.int64], shard: int) -> NDArray[np.int64]:
        """Windows of each document of a shard, whose first tokens are `starts`."""
        lengths = np.diff(np.append(starts, self._dataset.shard_start(shard + 1)))
        counts: NDArray[np.int64] = np.maximum(lengths - 1, 0) // self._sequence_length
        return counts

    def _documents(self, shard: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each document of a shard, its first token and the number of windows up to its end."""
        if shard not in self._counted:
            if len(self._counted) >= _MAX_COUNTED_SHARDS:
                self._counted.pop(next(iter(self._counted)))
            starts = self._dataset.document_starts(shard)
            self._counted[shard] = starts, np.cumsum(self._count(starts, shard))
        return self._counted[shard]
