"""95 % bootstrap intervals over documents."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_NUM_DRAWS = 2000


def perplexity_interval(sums: NDArray[np.float64], counts: NDArray[np.int64]) -> tuple[float, float]:
    """Interval of the perplexity of documents with these sums of nats and numbers of tokens."""
    draws = _draws(len(sums))
    low, high = np.percentile(np.exp(sums[draws].sum(axis=1) / counts[draws].sum(axis=1)), [2.5, 97.5])
    return float(low), float(high)


def paired_change(before: Sequence[float], after: Sequence[float]) -> tuple[float, float, float]:
    """Relative change of the perplexity and its interval, from the mean nats a token of the very same documents.

    Each document is paired with itself: documents differ far more from each other than lengths, attentions or models
    do on the same document. Documents have equal numbers of tokens.
    """
    differences = np.array(after) - np.array(before)
    low, high = np.percentile(differences[_draws(len(differences))].mean(axis=1), [2.5, 97.5])
    return float(np.expm1(differences.mean())), float(np.expm1(low)), float(np.expm1(high))


def _draws(num_documents: int) -> NDArray[np.int64]:
    """Places of documents drawn with replacement, the same at every call."""
    return np.random.default_rng(0).integers(0, num_documents, size=(_NUM_DRAWS, num_documents))
