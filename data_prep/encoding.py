"""Tokenizing documents for shards: each distinct word once where that is provably the same, else plainly.

Byte-pair merges join neighbours into a longer piece only. So where no piece of the model holds a certain border, what
stands left and right of it is cut the same with or without the other side, and the ids of a text are those of its
words, joined. Words repeat, and looking one up is far cheaper than merging it anew.
"""

import re
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lex_pretrain.data.shards import Tokens, token_dtype
from lex_pretrain.progress import logger
from lex_pretrain.tokenizer import SPACE_SYMBOL, Tokenizer

# Ways to cut a text into words, the one with the fewest distinct words first. Where each cuts depends on two
# neighbouring characters alone: before a space that follows something else, and around line ends.
_WORD_PATTERNS = (r"\n| *[^ \n]+| +", r" *[^ ]+| +")
# Bounds the cache near 200 MB: a word costs about this many bytes beside its own characters and ids.
_CACHE_BYTES = 200_000_000
_BYTES_PER_WORD = 170
# Long documents are cut into words by parts of this size, so that their words never all stand in memory.
_PART_CHARACTERS = 1_000_000
# The plain way is compared on the head of the first document and of each so many.
_DOCUMENTS_BETWEEN_CHECKS = 100
_CHECKED_CHARACTERS = 16_384
_BPE = 2
_NORMAL, _USER_DEFINED, _UNUSED = 1, 4, 5


class UnequalIdsError(Exception):
    """The ids of joined words are not those of the text: the words of this model cannot be trusted."""


class Encoder:
    """Documents to ids of the shard's type, each followed by the end-of-document id."""

    def __init__(self, tokenizer: Tokenizer, word_cache: bool) -> None:
        self._tokenizer = tokenizer
        self._dtype = np.dtype(token_dtype(tokenizer.vocab_size))
        self._end = np.array([tokenizer.eod_id], self._dtype).tobytes()
        pattern = word_pattern(tokenizer) if word_cache else None
        self._words = _WordCache(tokenizer, self._dtype, pattern) if pattern else None
        self._num_documents = 0

    def encode(self, texts: list[str]) -> list[Tokens]:
        """Raises UnequalIdsError when a compared document shows that the cache is wrong for this model."""
        if self._words is None:
            plain = self._tokenizer.encode_arrays(texts) if texts else []
            return [self.end(ids) for ids in plain]
        return [np.frombuffer(self._join(text, self._words), self._dtype) for text in texts]

    def end(self, ids: NDArray[np.int32] | NDArray[np.int64]) -> Tokens:
        """A document's ids in the shard's type, with the end-of-document id after them."""
        ended: Tokens = np.append(ids, self._tokenizer.eod_id).astype(self._dtype)
        return ended

    def _join(self, text: str, words: "_WordCache") -> bytes:
        if self._num_documents % _DOCUMENTS_BETWEEN_CHECKS == 0:
            head = next(parts_of(text, _CHECKED_CHARACTERS), "")
            if words.ids(head) != self._tokenizer.encode_arrays([head])[0].astype(self._dtype).tobytes():
                raise UnequalIdsError
        self._num_documents += 1
        return b"".join([*map(words.ids, parts_of(text, _PART_CHARACTERS)), self._end])


class _WordCache(dict[str, bytes]):
    """Ids of each word met so far; emptied when it is full, since words soon come back."""

    def __init__(self, tokenizer: Tokenizer, dtype: np.dtype[Any], pattern: str) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._dtype = dtype
        self._find_words = re.compile(pattern).findall
        self._num_bytes = 0

    def ids(self, text: str) -> bytes:
        if self._num_bytes > _CACHE_BYTES:
            self.clear()
            self._num_bytes = 0
        return b"".join(map(self.__getitem__, self._find_words(text)))

    def __missing__(self, word: str) -> bytes:
        ids = array(self._dtype.char, self._tokenizer.encode(word)).tobytes()
        self[word] = ids
        self._num_bytes += len(word) + len(ids) + _BYTES_PER_WORD
        return ids


def word_pattern(tokenizer: Tokenizer) -> str | None:
    """The pattern of words whose joined ids are provably those of the text; None where the model allows no such proof.

    It needs byte-pair merges, no normalisation that reaches across a border, spaces written before what follows them,
    byte fallback (runs of unknown characters would be one unknown piece), and no piece that a border cuts.
    """
    model = tokenizer.settings()
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    independent = (
        trainer.model_type == _BPE
        and trainer.byte_fallback
        and not trainer.treat_whitespace_as_suffix
        and normalizer.escape_whitespaces
        and not normalizer.add_dummy_prefix
        and not normalizer.remove_extra_whitespaces
        and not normalizer.precompiled_charsmap
    )
    if not independent:
        return None
    kinds = (_NORMAL, _USER_DEFINED, _UNUSED)
    pieces = [piece.piece.replace(SPACE_SYMBOL, " ") for piece in model.pieces if piece.type in kinds]
    for pattern in _WORD_PATTERNS:
        find = re.compile(pattern).findall
        if all(len(find(piece)) == 1 for piece in pieces):
            return pattern
    return None


def log_way(tokenizer: Tokenizer, word_cache: bool) -> None:
    """Say once, where people read it, how documents are tokenized and why."""
    if not word_cache:
        logger.info("tokenizing plainly: joined words were found to differ from whole texts")
    elif word_pattern(tokenizer) is None:
        logger.info("tokenizing plainly: this tokenizer's pieces or settings reach across words")
    else:
        logger.info("tokenizing each distinct word once: no piece of this tokenizer reaches across words")


def parts_of(text: str, size: int) -> Iterator[str]:
    """The text in parts of about `size` characters, cut before a run of spaces alone; longer where there is none."""
    start = 0
    while start < len(text):
        end, reach = start, size
        while end == start:
            # A window that holds no border is doubled until it reaches the end of the text.
            end = len(text) if start + reach >= len(text) else _last_border(text, start, start + reach)
            reach *= 2
        yield text[start:end]
        start = end


def _last_border(text: str, start: int, end: int) -> int:
    """The last place in (start, end) where a space follows something else; `start` where there is none."""
    space = text.rfind(" ", start, end)
    return start + len(text[start:space].rstrip(" ")) if space >= 0 else start


def has_unbroken_run(text: str, limit: int) -> bool:
    """Whether `limit` characters stand together with neither a space nor a line's end: no text, and slow to merge."""
    start = 0
    while len(text) - start > limit:
        end = max(text.rfind(" ", start, start + limit), text.rfind("\n", start, start + limit))
        if end < 0:
            return True
        start = end + 1
    return False
