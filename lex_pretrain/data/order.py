"""The order of training samples: (seed, sample index) -> (source, window), a pure function with no stored shuffle.

The k-th draw of a source, counted in sample order, is its k-th number, and each epoch of a source is its own keyed
permutation of its windows: wherever a run stops, none was read a second time before all were read once. A mixture deals
out sources by their exact shares. So one counter, the samples consumed, resumes the order anywhere, and raising the
number of steps never moves it.
"""

import functools
import hashlib
import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from lex_pretrain.errors import RequestError

# Counts up whenever the same seed deals other samples than before: a run cannot go on in another order than it began.
ORDER_VERSION = 2

QUOTA_PERIOD = 65_536

# Odd numbers of no meaning, a round each: round constants of SHA-256 (FIPS 180-4). Six rounds mix well beyond what a
# shuffle needs; four are the least that make a Feistel network pseudo-random (Luby and Rackoff, 1988).
_ROUND_MULTIPLIERS = (0x71374491, 0xB5C0FBCF, 0xE9B5DBA5, 0x3956C25B, 0x59F111F1, 0xAB1C5ED5)
_LAST_MULTIPLIER = 0x846CA68B
# The step between the states of splitmix64.
_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def derive_key(*parts: int | str) -> int:
    """A 64-bit key that depends on every part."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def permute(index: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """Image of each index in [0, size) under the permutation of that range which `key` names; `size` up to 2^48."""
    return _permute_runs(index, np.array([len(index)]), np.array([size]), np.array([key], dtype=np.uint64))


def _permute_runs(
    index: NDArray[np.int64], lengths: NDArray[np.int64], sizes: NDArray[np.int64], keys: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """Images of indices [N] in runs: `lengths[r]` of them under the permutation of [0, sizes[r]) that `keys[r]` names.

    A Feistel network over the pairs of a left part and some right bits, of which there are hardly more than indices;
    where an image is none of theirs, it is walked along its cycle until it is.
    """
    bits = np.array([(size - 1).bit_length() for size in sizes.tolist()])
    if bits.max() > 48:
        raise ValueError(f"permutations reach to 2^48, not to {sizes.max()}")
    right_bits = np.maximum(bits // 2, bits - 16)
    keys = _mix(keys)
    per_run = (
        sizes,
        right_bits,
        (32 - right_bits).astype(np.uint32),
        -(-sizes >> right_bits).astype(np.uint32),
        (keys >> np.uint64(32)).astype(np.uint32),
        keys.astype(np.uint32),
    )
    # What all indices share stays one number: numpy goes faster over an array with a number than over two arrays.
    size, *network = per_run if len(lengths) == 1 else (np.repeat(values, lengths) for values in per_run)
    images = _feistel(index, *network)
    outside = np.flatnonzero(images >= size)
    while len(outside):
        walked = _feistel(images[outside], *(values if len(values) == 1 else values[outside] for values in network))
        images[outside] = walked
        outside = outside[walked >= (size if len(size) == 1 else size[outside])]
    return images


def _feistel(
    index: NDArray[np.int64],
    right_bits: NDArray[np.int64],
    right_shift: NDArray[np.uint32],
    left_size: NDArray[np.uint32],
    left_key: NDArray[np.uint32],
    right_key: NDArray[np.uint32],
) -> NDArray[np.int64]:
    """Images of indices [N] below `left_size` * 2^`right_bits`, where `left_size` is up to 2^16.

    Parameters are of each index [N] or of all [1]; `right_shift` is 32 - `right_bits` (numpy shifts by 32 to zero).
    In turn a hash of the right part is added to the left one, modulo its size, and one of the left part to the bits of
    the right one. The hash is two multiplications, by which every bit reaches the highest, so its highest are used.
    """
    left = (index >> right_bits).astype(np.uint32)
    right = index.astype(np.uint32)
    right <<= right_shift
    right >>= right_shift
    mixed, other = np.empty_like(left), np.empty_like(left)
    for number, multiplier in enumerate(_ROUND_MULTIPLIERS):
        to_left = number % 2 == 0
        np.bitwise_xor(right if to_left else left, left_key if to_left else right_key, out=mixed)
        mixed *= np.uint32(multiplier)
        np.right_shift(mixed, np.uint32(15), out=other)
        mixed ^= other
        mixed *= np.uint32(_LAST_MULTIPLIER)
        if not to_left:
            mixed >>= right_shift
            right ^= mixed
            continue
        # mixed * left_size / 2^32, in halves whose products fit 32 bits.
        np.bitwise_and(mixed, np.uint32(0xFFFF), out=other)
        other *= left_size
        other >>= np.uint32(16)
        mixed >>= np.uint32(16)
        mixed *= left_size
        mixed += other
        mixed >>= np.uint32(16)
        left += mixed
        # Where left is below its size, the difference is beyond 2^31.
        np.subtract(left, left_size, out=other)
        np.minimum(left, other, out=left)
    image = left.astype(np.int64)
    image <<= right_bits
    image |= right
    return image


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64: every bit of the input reaches every bit of the output."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = value ^ (value >> np.uint64(31))
    return mixed


def _count_up(firsts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """`firsts[r]`, `firsts[r]` + 1, ... in each of the runs of these lengths, end to end."""
    ends = np.cumsum(lengths)
    counted: NDArray[np.int64] = np.arange(ends[-1]) + np.repeat(firsts - ends + lengths, lengths)
    return counted


class Mixture:
    """Which source each sample is of, from weights that say how often, one of each of S sources.

    Source i of weight w_i (all add up to 1) is drawn C_i(p) = floor(W_i p P) - floor(W_(i-1) p P) times in the first p
    periods of P samples, where W_i = w_1 + ... + w_i, in exact arithmetic. So these counts add up to p P, and
    e_i(p) = C_i(p) - w_i p P lies between -1 and 1: shares never drift.

    Within a period, draws are in the order of their times: draw j of source i has the time (j + u) / (w_i P), where u
    between 0 and 1 comes from the key, for all j below the period's quota C_i(p + 1) - C_i(p). That is between
    w_i P - 2 and w_i P + 2, so every period is the same sequence of floor(w_i P) + 2 draws of each source, less the
    last few of some.

    After any n samples, the count of source i is less than 2 + 2 w_i (S - 2) from w_i n; with one source it is n.
    Proof: let p periods be done and some draws of the next, c_i of source i. Let t be a time that no draw done exceeds
    and no draw left falls below, or 1 if that is less. Let d_i = C_i(p) + c_i - w_i (p + t) P.
    -2 < d_i: if source i has draws left, draw c_i is not before t, so c_i > w_i t P - 1, and d_i > e_i(p) - 1; if it
    has none, d_i = e_i(p + 1) + w_i (1 - t) P > -1.
    d_i < 2: if no draw done is after t, draw c_i - 1 is not, so c_i < w_i t P + 1, and d_i < e_i(p) + 1; if one is,
    t is 1, and d_i <= e_i(p + 1) < 1.
    All counts add up to n, so n = (p + t) P + d_1 + ... + d_S, and the count of source i is
    w_i n + (1 - w_i) d_i - w_i (the sum of all other d).
    """

    def __init__(self, weights: Sequence[float], key: int) -> None:
        """RequestError when a weight is too small for a sample in each period."""
        shares = _exact_shares(weights)
        self.shares = [float(share) for share in shares]
        self._denominator = math.lcm(*(share.denominator for share in shares))
        self._bounds = [int(bound * self._denominator) for bound in accumulate(shares, initial=Fraction(0))]
        # Draws that a period may have are numbered source by source: those of source i end before _ends[i].
        self.num_draws = np.array([math.floor(share * QUOTA_PERIOD) + 2 for share in shares])
        self._ends = np.cumsum(self.num_draws)
        ranks = _count_up(np.zeros_like(self.num_draws), self.num_draws)
        # An odd number of 2^-33, which no rounding of times takes to 0 or 1.
        jitter = (permute(np.arange(len(ranks)), 2**32, key) + 0.5) / 2**32
        draws_a_period = np.array([float(share * QUOTA_PERIOD) for share in shares])
        self._sequence = np.argsort((ranks + jitter) / np.repeat(draws_a_period, self.num_draws), kind="stable")
        self._sources = np.repeat(np.arange(len(shares)), self.num_draws)[self._sequence]
        self._turns = np.argsort(self._sequence)

    def count(self, num_periods: int) -> NDArray[np.int64]:
        """How many samples of the first periods are of each source, [S]."""
        num_samples = num_periods * QUOTA_PERIOD
        return np.diff([bound * num_samples // self._denominator for bound in self._bounds])

    def deal(self, quotas: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Source and draw of each sample of a period with these quotas [S], both [P]."""
        num_left_out = self.num_draws - quotas
        left_out = _count_up(self._ends - num_left_out, num_left_out)
        is_drawn = np.ones(len(self._sequence), dtype=bool)
        is_drawn[self._turns[left_out]] = False
        return self._sources[is_drawn], self._sequence[is_drawn]


def _exact_shares(weights: Sequence[float]) -> list[Fraction]:
    """Each weight's part of their sum."""
    for source, weight in enumerate(weights):
        if not math.isfinite(weight):
            raise RequestError(f"data.sources[{source}].weight {weight} is no share of the samples; give a number")
    total = sum(map(Fraction, weights))
    shares = [Fraction(weight) / total for weight in weights]
    for source, share in enumerate(shares):
        if share * QUOTA_PERIOD < 1:
            raise RequestError(
                f"data.sources[{source}].weight {weights[source]} is less than one sample in {QUOTA_PERIOD}; "
                "raise it or leave the source out"
            )
    return shares


class SampleOrder:
    """The order over sources of `num_windows` windows each, mixed by `weights`."""

    def __init__(self, num_windows: Sequence[int], weights: Sequence[float], seed: int) -> None:
        self.num_windows = tuple(num_windows)
        self.seed = seed
        self._mixture = Mixture(weights, derive_key(seed, "mixture"))
        self._sizes = np.array(num_windows, dtype=np.int64)
        keys = [derive_key(seed, "epochs", source) for source in range(len(num_windows))]
        self._keys = np.array(keys, dtype=np.uint64)
        # Training reads period after period, and a batch may reach from one into the next.
        self._deal = functools.lru_cache(maxsize=2)(self._deal_period)

    def locate(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Source and window of each global sample index, all [N].

        Of a mixture, whole periods are dealt, a millisecond or two each, and the last ones kept for the next call.
        """
        sources, windows = np.zeros_like(samples), np.empty_like(samples)
        if (samples[1:] < samples[:-1]).any():
            ascending = np.argsort(samples, kind="stable")
            sources[ascending], windows[ascending] = self.locate(samples[ascending])
            return sources, windows
        # In parts that fit a core's cache.
        for begin in range(0, len(samples), QUOTA_PERIOD):
            part = slice(begin, begin + QUOTA_PERIOD)
            if len(self.num_windows) == 1:
                windows[part] = self._windows_of_only_source(samples[part])
            else:
                self._look_up(samples[part], sources[part], windows[part])
        return sources, windows

    def epochs(self, num_samples: int) -> list[float]:
        """How many times each source is read through by the first `num_samples` samples."""
        return [num_samples * share / size for share, size in zip(self._mixture.shares, self.num_windows, strict=True)]

    def _look_up(self, samples: NDArray[np.int64], sources: NDArray[np.int64], windows: NDArray[np.int64]) -> None:
        """Fill in source and window of each of these samples of a mixture, all [N]; the samples ascend."""
        periods = samples // QUOTA_PERIOD
        bounds = [0, *(np.flatnonzero(np.diff(periods)) + 1).tolist(), len(samples)]
        for begin, end in pairwise(bounds):
            dealt_sources, dealt_windows = self._deal(int(periods[begin]))
            offsets = samples[begin:end] - periods[begin] * QUOTA_PERIOD
            # Another mode than "raise" writes without a copy; there is nothing to clip.
            dealt_sources.take(offsets, out=sources[begin:end], mode="clip")
            dealt_windows.take(offsets, out=windows[begin:end], mode="clip")

    def _deal_period(self, period: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Source and window of each sample of a period, both [P]."""
        before, after = self._mixture.count(period), self._mixture.count(period + 1)
        sources, draws = self._mixture.deal(after - before)
        windows = self._windows(np.arange(len(before)), before, self._mixture.num_draws)
        return sources, windows[draws]

    def _windows_of_only_source(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Window of each sample, both [N], where the n-th sample is the n-th draw of the only source."""
        begins = np.flatnonzero(np.diff(samples, prepend=samples[0] - 2) != 1)
        lengths = np.diff(begins, append=len(samples))
        return self._windows(np.zeros_like(begins), samples[begins], lengths)

    def _windows(
        self, sources: NDArray[np.int64], firsts: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Windows [N] of runs of draws, end to end: run r is `lengths[r]` of `sources[r]`, from `firsts[r]` on."""
        sizes = self._sizes[sources]
        first_epochs = firsts // sizes
        num_epochs = (firsts + lengths - 1) // sizes - first_epochs + 1
        # From here on a run is what one of those has in one epoch.
        epochs = _count_up(first_epochs, num_epochs)
        sources, sizes, firsts, ends = (
            np.repeat(values, num_epochs) for values in (sources, sizes, firsts, firsts + lengths)
        )
        offsets = np.maximum(firsts - epochs * sizes, 0)
        lengths = np.minimum(ends - epochs * sizes, sizes) - offsets
        keys = self._keys[sources] + epochs.astype(np.uint64) * _GOLDEN_GAMMA
        return _permute_runs(_count_up(offsets, lengths), lengths, sizes, keys)
