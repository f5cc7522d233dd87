"""Duplicates over the whole corpus: the first document of a text stays, in the order of the units."""

import zlib
from collections.abc import Iterable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from data_prep.filters import EXACT_DUPLICATE, NEAR_DUPLICATE
from data_prep.word_runs import hash_runs

SIGNATURE_SIZE = 128
_WORDS_IN_A_RUN = 5
_SCHEME: Literal["affine32"] = "affine32"


def signature(text: str) -> NDArray[np.uint32]:
    """MinHash [SIGNATURE_SIZE] of the document's runs of words, of a shorter text as a whole, or of what is no word."""
    from datasketch import MinHash

    runs = hash_runs(text, _WORDS_IN_A_RUN) >> np.uint64(32)
    hashes = set(runs.tolist()) or {zlib.crc32(" ".join(text.lower().split()).encode())}
    minhash = MinHash(SIGNATURE_SIZE, hashfunc=int, scheme=_SCHEME)
    minhash.update_batch(hashes)
    values: NDArray[np.uint32] = minhash.hashvalues.astype(np.uint32)
    return values


def exact_duplicates(digests: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Places of all documents whose 128-bit digest, a row of [N, 2], stands earlier."""
    if not len(digests):
        return np.empty(0, dtype=np.int64)
    order = np.lexsort((digests[:, 1], digests[:, 0]))
    ordered = digests[order]
    repeats = np.concatenate([[False], (ordered[1:] == ordered[:-1]).all(axis=1)])
    # The sort is stable, so the first of equal digests is the earliest document.
    return np.sort(order[repeats])


def near_duplicates(signatures: NDArray[np.uint32], candidates: Iterable[int], similarity: float) -> NDArray[np.int64]:
    """Of the candidate places, in order, those whose signature is as similar as that to a kept one before it."""
    from datasketch import MinHash, MinHashLSH

    index = MinHashLSH(similarity, SIGNATURE_SIZE)
    found = []
    for place in candidates:
        minhash = MinHash(SIGNATURE_SIZE, hashvalues=signatures[place], scheme=_SCHEME)
        if any(np.mean(signatures[place] == signatures[other]) >= similarity for other in index.query(minhash)):
            found.append(place)
        else:
            index.insert(place, minhash, check_duplication=False)
    return np.array(found, dtype=np.int64)


def find_duplicates(
    digests: NDArray[np.uint64], signatures: NDArray[np.uint32], keep_exact: bool, similarity: float | None
) -> dict[int, str]:
    """Place of each document to drop, with the reason. Both arrays hold a row for every document, in order."""
    exact = [] if keep_exact else exact_duplicates(digests).tolist()
    dropped = dict.fromkeys(exact, EXACT_DUPLICATE)
    if similarity is not None:
        others = (place for place in range(len(signatures)) if place not in dropped)
        near = near_duplicates(signatures, others, similarity).tolist()
        dropped |= dict.fromkeys(near, NEAR_DUPLICATE)
    return dropped
