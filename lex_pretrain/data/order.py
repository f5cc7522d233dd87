"""The order of training samples: (seed, sample index) -> (source, window), a pure function with no stored shuffle.

Every epoch of a source is its own keyed permutation of its windows. A mixture deals out sources by exact quotas: each
run of `QUOTA_PERIOD` samples holds each source's share to the last sample, in a permuted order. So one counter, the
samples consumed, resumes the order anywhere, and raising the number of steps never moves it.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lex_pretrain.errors import RequestError

QUOTA_PERIOD = 65_536

# Six rounds mix well beyond what a shuffle needs; four are the least that make a Feistel network pseudo-random.
_FEISTEL_ROUNDS = 6


def derive_key(*parts: int | str) -> int:
    """A 64-bit key that depends on every part."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def permute(index: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """Image of each index in [0, size) under the permutation of that range which `key` names.

    A balanced Feistel network over the next even power of two, walked along its cycle until the image is in range.
    """
    half_bits = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half_bits)) - 1)
    round_keys = [np.uint64(derive_key(key, number)) for number in range(_FEISTEL_ROUNDS)]

    def shuffle(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = value >> half_bits, value & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        return (left << half_bits) | right

    image = shuffle(index.astype(np.uint64))
    while (outside := image >= np.uint64(size)).any():
        image[outside] = shuffle(image[outside])
    return image.astype(np.int64)


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64: every bit of the input reaches every bit of the output."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = value ^ (value >> np.uint64(31))
    return mixed


def quotas(weights: Sequence[float]) -> NDArray[np.int64]:
    """Samples of each source in a period, by largest remainder. RequestError when a weight is too small for one."""
    share = np.asarray(weights, dtype=np.float64) / np.sum(weights) * QUOTA_PERIOD
    counts: NDArray[np.int64] = np.floor(share).astype(np.int64)
    by_remainder = np.argsort(counts - share, kind="stable")
    counts[by_remainder[: QUOTA_PERIOD - int(counts.sum())]] += 1
    if (counts == 0).any():
        source = int(np.argmin(counts))
        raise RequestError(
            f"data.sources[{source}].weight {weights[source]} is less than one sample in {QUOTA_PERIOD}; "
            "raise it or leave the source out"
        )
    return counts


class SampleOrder:
    """The order over sources of `num_windows` windows each, mixed by `weights`."""

    def __init__(self, num_windows: Sequence[int], weights: Sequence[float], seed: int) -> None:
        self.num_windows = tuple(num_windows)
        self.seed = seed
        self._quotas = quotas(weights)
        self._ends = np.cumsum(self._quotas)

    def locate(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Source and window of each global sample index."""
        sources, counts = self._deal(samples)
        windows = np.empty_like(samples)
        for source, size in enumerate(self.num_windows):
            of_source = sources == source
            epochs, offsets = np.divmod(counts[of_source], size)
            image = np.empty_like(offsets)
            for epoch in np.unique(epochs):
                in_epoch = epochs == epoch
                image[in_epoch] = permute(offsets[in_epoch], size, derive_key(self.seed, "epoch", source, int(epoch)))
            windows[of_source] = image
        return sources, windows

    def epochs(self, num_samples: int) -> list[float]:
        """How many times each source is read through by the first `num_samples` samples."""
        return [
            num_samples * quota / QUOTA_PERIOD / size
            for quota, size in zip(self._quotas.tolist(), self.num_windows, strict=True)
        ]

    def _deal(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Source of each sample, and how many samples of that source come before it."""
        if len(self.num_windows) == 1:
            return np.zeros_like(samples), samples
        periods, offsets = np.divmod(samples, QUOTA_PERIOD)
        places = np.empty_like(offsets)
        for period in np.unique(periods):
            in_period = periods == period
            key = derive_key(self.seed, "mixture", int(period))
            places[in_period] = permute(offsets[in_period], QUOTA_PERIOD, key)
        sources = np.searchsorted(self._ends, places, side="right")
        starts = self._ends - self._quotas
        return sources, periods * self._quotas[sources] + places - starts[sources]
