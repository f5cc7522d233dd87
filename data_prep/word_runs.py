"""Hashes of runs of words: what two texts have in common, whatever their form, case, spacing and punctuation.

Texts are compared as in a search by base letters (UTS #10, primary strength): after compatibility decomposition
(UAX #15) and case folding, without what cannot be seen, and without accents, points and tone marks, which capitals,
keyboards and tools leave out. A word is a run of letters and digits, as in UAX #29, but cut at all punctuation: what
tools change most is that inside words (' to ’, 1,000 to 1 000). Where lines may break between any two letters (UAX #14)
the script has no spaces between words, and each letter, with the vowel signs that belong to it, is a part of one.
"""

import functools
import re
import unicodedata
from collections.abc import Iterable

import numpy as np
import regex
from numpy.typing import NDArray

_MULTIPLIER = 0x9E3779B97F4A7C15
_INVERSE = pow(_MULTIPLIER, -1, 2**64)
# Set in the hashes of whole short texts and in no hash of a run, so that neither is ever taken for the other.
_WHOLE = np.uint64(1 << 63)

_OTHER, _IGNORED, _MARK, _WORD, _HALF_WORD, _THIRD_OF_A_WORD = range(6)
# What a word of each kind counts for. Words of running text have 1.6 to 1.7 letters in Chinese and Japanese and about
# three in Thai; were each letter a word, every official name and many a turn of phrase would be a quotation.
_SIXTHS_OF_A_WORD = np.array([0, 0, 0, 6, 3, 2])
# In each line, what it names is of this kind and no longer of the one before.
_CHARACTERS = (
    (_MARK, r"\p{M}"),
    (_WORD, r"[\p{L}\p{N}]"),
    (_HALF_WORD, r"[[\p{L}\p{N}]&&[\p{Line_Break=ID}\p{Line_Break=CJ}\p{Line_Break=NS}]]"),
    (_THIRD_OF_A_WORD, r"[[\p{L}\p{N}]&&[\p{Line_Break=SA}\p{Line_Break=AK}\p{Line_Break=AS}]]"),
    (_IGNORED, r"\p{Default_Ignorable_Code_Point}"),
    # Accents and points of any script; all marks of Arabic and Hebrew are optional; tatweel only stretches a word.
    (_IGNORED, r"[\u0640[\p{Mn}&&[\p{Diacritic}\p{Script=Inherited}\p{Script=Arabic}\p{Script=Hebrew}]]]"),
)
# Texts are read by parts that end before white space, so that the arrays stay in the processor's cache.
_PART_CHARACTERS = 2**16
_PARTS = re.compile(rf"(?s).{{1,{_PART_CHARACTERS}}}\S*")


def hash_runs(text: str, num_words: int) -> NDArray[np.uint64]:
    """A 64-bit hash of each run of `num_words` words, [R], in order; none for a text without a word.

    A text of fewer words is hashed whole, [1], as no run is: it equals texts of the same words and no longer ones.
    Were it looked for inside of those as well, an answer such as "yes" would be found in almost all of them.
    """
    codes, sixths = _hash_words(text)
    num_codes, num_sixths, length = len(codes), int(sixths.sum()), 6 * num_words
    if not num_codes:
        return codes
    if num_sixths < length:
        return _hash_stretches(codes, slice(0, 1), slice(num_codes, None)) | _WHOLE
    if num_sixths == 6 * num_codes:
        runs = _hash_stretches(codes, slice(0, num_codes - num_words + 1), slice(num_words, None))
    else:
        before = np.cumsum(sixths) - sixths
        firsts = np.flatnonzero(before <= num_sixths - length)
        runs = _hash_stretches(codes, firsts, np.searchsorted(before, before[firsts] + length))
    return runs & ~_WHOLE


def index_of_runs(texts: Iterable[str], num_words: int) -> NDArray[np.uint64]:
    """Sorted hashes of all runs in `texts`, and of the texts that are shorter than one, each once."""
    parts = [hash_runs(text, num_words) for text in texts]
    return np.unique(np.concatenate([np.empty(0, dtype=np.uint64), *parts]))


def num_whole_texts(index: NDArray[np.uint64]) -> int:
    """How many of the hashes are of texts that are shorter than a run."""
    return int(np.count_nonzero(index & _WHOLE))


def shares_a_run(text: str, num_words: int, index: NDArray[np.uint64]) -> bool:
    """Whether any run of the text, or all of a shorter text, is in the index."""
    runs = hash_runs(text, num_words)
    if not len(runs) or not len(index):
        return False
    places = np.searchsorted(index, runs).clip(max=len(index) - 1)
    return bool((index[places] == runs).any())


def _hash_words(text: str) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Hashes of the text's words, [W], and the sixths of a word that each counts for, [W]."""
    parts = [_hash_words_of_part(part) for part in _PARTS.findall(text)]
    if len(parts) == 1:
        return parts[0]
    codes, sixths = zip((np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64)), *parts, strict=True)
    return np.concatenate(codes), np.concatenate(sixths)


def _hash_words_of_part(part: str) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    points, kinds = _read(part)
    before = np.zeros_like(kinds)
    before[1:] = kinds[:-1]
    is_first = (kinds > _WORD) | ((kinds == _WORD) & (before != _WORD))
    # A word ends where the next one begins or where something else stands.
    borders = np.flatnonzero(is_first | (kinds == _OTHER))
    is_word = is_first[borders]
    firsts = borders[is_word]
    ends = np.append(borders[1:], len(kinds))[is_word]
    return _hash_stretches(points.astype(np.uint64), firsts, ends), _SIXTHS_OF_A_WORD[kinds[firsts]]


def _read(part: str) -> tuple[NDArray[np.unsignedinteger], NDArray[np.uint8]]:
    """Code points that are compared, [C], and the kind of each, [C]; a mark is part of the word it stands in."""
    if part.isascii():
        points = np.frombuffer(part.lower().encode(), dtype=np.uint8)
        return points, _kinds()[points]
    # Compatibility caseless matching (Unicode Standard, D146), and I without a dot, the capital of which is also that
    # of i: who folds a Turkish text without knowing its language turns one into the other.
    folded = unicodedata.normalize("NFKD", part).casefold().replace("ı", "i")
    points = np.frombuffer(unicodedata.normalize("NFKD", folded).encode("utf-32-le", "replace"), dtype="<u4")
    kinds = _kinds()[points]
    is_kept = kinds != _IGNORED
    points, kinds = points[is_kept], kinds[is_kept]
    is_mark = kinds == _MARK
    if is_mark.any():
        letters = np.maximum.accumulate(np.where(is_mark, 0, np.arange(len(kinds))))
        kinds[kinds[letters] == _WORD] = _WORD
    return points, kinds


@functools.cache
def _kinds() -> NDArray[np.uint8]:
    """The kind of every code point."""
    kinds = np.zeros(0x110000, dtype=np.uint8)
    characters = "".join(map(chr, range(len(kinds))))
    for kind, pattern in _CHARACTERS:
        for found in regex.finditer(rf"(?V1){pattern}+", characters):
            kinds[found.start() : found.end()] = kind
    return kinds


def _hash_stretches(
    codes: NDArray[np.uint64], firsts: NDArray[np.int64] | slice, ends: NDArray[np.int64] | slice
) -> NDArray[np.uint64]:
    """Hash of codes[first:end] for each first and end: a polynomial of these codes in the multiplier, modulo 2**64.

    It is a difference of sums from the first code of all, divided by the power of the multiplier that it begins with.
    """
    sums = np.zeros(len(codes) + 1, dtype=np.uint64)
    np.cumsum(codes * _powers(_MULTIPLIER, len(codes)), out=sums[1:])
    hashes = (sums[ends] - sums[firsts]) * _powers(_INVERSE, len(codes))[firsts]
    hashes = (hashes ^ (hashes >> np.uint64(31))) * np.uint64(_MULTIPLIER)
    mixed: NDArray[np.uint64] = hashes ^ (hashes >> np.uint64(29))
    return mixed


def _powers(base: int, num: int) -> NDArray[np.uint64]:
    """The base to the power of 1 to `num`, modulo 2**64, [num]."""
    if num <= _PART_CHARACTERS:
        return _powers_for_a_part(base)[:num]
    return np.cumprod(np.full(num, base, dtype=np.uint64), dtype=np.uint64)


@functools.cache
def _powers_for_a_part(base: int) -> NDArray[np.uint64]:
    return np.cumprod(np.full(_PART_CHARACTERS, base, dtype=np.uint64), dtype=np.uint64)
