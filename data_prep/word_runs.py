"""Hashes of runs of words: what two texts have in common, whatever their spacing, case and punctuation."""

import re
import zlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

_find_words = re.compile(r"\w+").findall
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def hash_runs(text: str, num_words: int) -> NDArray[np.uint64]:
    """A 64-bit hash of every run of `num_words` words, [words - num_words + 1] or nothing for a shorter text."""
    words = [zlib.crc32(word.encode(errors="replace")) for word in _find_words(text.lower())]
    num_runs = len(words) - num_words + 1
    if num_runs < 1:
        return np.empty(0, dtype=np.uint64)
    codes = _mix(np.array(words, dtype=np.uint64))
    runs = np.zeros(num_runs, dtype=np.uint64)
    for offset in range(num_words):
        runs = runs * _MULTIPLIER + codes[offset : offset + num_runs]
    return _mix(runs)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(31))) * _MULTIPLIER
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(29))
    return mixed


def index_of_runs(texts: Iterable[str], num_words: int) -> NDArray[np.uint64]:
    """Sorted hashes of all runs in `texts`, each once."""
    parts = [hash_runs(text, num_words) for text in texts]
    return np.unique(np.concatenate([np.empty(0, dtype=np.uint64), *parts]))


def shares_a_run(text: str, num_words: int, index: NDArray[np.uint64]) -> bool:
    """Whether any run of the text is in the index."""
    runs = hash_runs(text, num_words)
    if not len(runs) or not len(index):
        return False
    places = np.searchsorted(index, runs).clip(max=len(index) - 1)
    return bool((index[places] == runs).any())
