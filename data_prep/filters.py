"""Which documents are kept: what a document alone decides, in this order; duplicates are found over all afterwards."""

import re
from pathlib import Path

import numpy as np

from data_prep.encoding import has_unbroken_run
from data_prep.options import PrepareOptions
from data_prep.records import TOO_LONG, Document
from data_prep.word_runs import shares_a_run

EMPTY = "empty"
TOO_SHORT = "too short"
UNBROKEN = "unbroken text"
MATCHES_PATTERN = "matches pattern"
CONTAMINATED = "contaminated"
EXACT_DUPLICATE = "exact duplicate"
NEAR_DUPLICATE = "near duplicate"
# In the order in which they are asked. Any other reason is a fault of the input, which --max-rejected counts.
FILTER_REASONS = (
    EMPTY,
    TOO_SHORT,
    TOO_LONG,
    UNBROKEN,
    MATCHES_PATTERN,
    CONTAMINATED,
    EXACT_DUPLICATE,
    NEAR_DUPLICATE,
)
# A longer run without a space or a line's end is data, not text, and takes SentencePiece gigabytes to merge.
_MAX_UNBROKEN_CHARACTERS = 4_000_000


class Filters:
    """The filters that a document passes on its own."""

    def __init__(self, options: PrepareOptions, contamination_file: Path) -> None:
        self._options = options
        self._pattern = re.compile(options.reject_pattern) if options.reject_pattern is not None else None
        self._contamination = (
            np.load(contamination_file, mmap_mode="r", allow_pickle=False) if options.decontaminate else None
        )

    def reason(self, document: Document) -> str | None:
        """Why the document is rejected, None where it is kept."""
        options, text, num_bytes = self._options, document.text, len(document.data)
        if not text or text.isspace():
            return EMPTY
        if num_bytes < options.min_document_bytes:
            return TOO_SHORT
        if num_bytes > options.max_document_bytes:
            return TOO_LONG
        if has_unbroken_run(text, _MAX_UNBROKEN_CHARACTERS):
            return UNBROKEN
        if self._pattern is not None and self._pattern.search(text):
            return MATCHES_PATTERN
        words = options.decontaminate_words
        if self._contamination is not None and shares_a_run(text, words, self._contamination):
            return CONTAMINATED
        return None
