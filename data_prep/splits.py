"""Which side a document falls on, by its content alone, so that it keeps it when files come, go or move."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data_prep.options import PrepareOptions
from lex_pretrain.data.manifest import SPLITS, ShardRecord, Split
from lex_pretrain.data.origins import DocumentTable, kept_rows, table_file
from lex_pretrain.progress import logger


def place_of(digest: bytes) -> float:
    """A document's place in [0, 1), uniform over texts."""
    return int.from_bytes(digest[:8], "little") / 2**64


def split_of(digest: bytes, options: PrepareOptions) -> Split:
    """The lowest places are for testing, the next for validation, the rest for training."""
    place = place_of(digest)
    if place < options.test_fraction:
        return "test"
    return "validation" if place < options.test_fraction + options.validation_fraction else "train"


def fill_splits(
    output: Path, shards: Sequence[ShardRecord], num_units: int, options: PrepareOptions, packed: PrepareOptions
) -> PrepareOptions:
    """The options with the fractions moved as little as fills every split that was asked for, where one is empty.

    `packed` are those that the shards were made with; they are given back where all is well. Says which fractions were
    moved, and which splits stay empty for want of documents.
    """
    wanted = {"train": 1.0, "validation": options.validation_fraction, "test": options.test_fraction}
    if {shard.split for shard in shards} >= {split for split, fraction in wanted.items() if fraction}:
        return packed
    places = _places(output, num_units)
    validation, test = filling_fractions(places, options.validation_fraction, options.test_fraction)
    for split, before, after in (
        ("validation", options.validation_fraction, validation),
        ("test", options.test_fraction, test),
    ):
        if before and not after:
            logger.warning(
                "%d document%s cannot fill %d splits, so the %s split stays empty; give more documents, or "
                "--%s-fraction 0 to ask for none",
                len(places),
                "" if len(places) == 1 else "s",
                sum(map(bool, wanted.values())),
                split,
                split,
            )
        elif before != after:
            logger.warning(
                "with --%s-fraction %s one of the splits would be empty, as there are %d documents, so the fraction "
                "is %s. Give --%s-fraction %s yourself when the corpus grows, and no document changes sides",
                *(split, before, len(places), after, split, after),
            )
    return options.model_copy(update={"validation_fraction": validation, "test_fraction": test})


def filling_fractions(
    places: NDArray[np.float64], validation_fraction: float, test_fraction: float
) -> tuple[float, float]:
    """Fractions for validation and testing that leave no split empty, as near to these as the documents allow.

    `places` are those of the distinct documents, ascending. Where there are too few, testing goes first, then
    validation, and their fraction is 0.
    """
    count = len(places)
    if validation_fraction and test_fraction and count < 3:
        test_fraction = 0.0
    if count < 2:
        validation_fraction = test_fraction = 0.0
    least_validation, least_test = int(validation_fraction > 0), int(test_fraction > 0)
    border = test_fraction + validation_fraction
    num_test, num_held_out = (int(np.searchsorted(places, limit)) for limit in (test_fraction, border))
    test_end = min(max(num_test, least_test), count - 1 - least_validation) if least_test else 0
    held_out_end = min(max(num_held_out, test_end + least_validation), count - 1) if least_validation else test_end
    if test_end != num_test:
        test_fraction = _between(places[test_end - 1], places[test_end])
    if held_out_end != num_held_out and least_validation:
        border = _between(places[held_out_end - 1], places[held_out_end])
    return (round(border - test_fraction, 16) if least_validation else 0.0), test_fraction


def _between(low: float, high: float) -> float:
    """The shortest decimal x with low < x <= high."""
    candidates = ((math.floor(low * 10**digits) + 1) / 10**digits for digits in range(1, 17))
    return next((candidate for candidate in candidates if low < candidate <= high), float(high))


def _places(output: Path, num_units: int) -> NDArray[np.float64]:
    """Places of the distinct documents that were packed and not dropped, ascending."""
    found = [np.empty(0)]
    for number in range(num_units):
        table = DocumentTable.load(table_file(output, number))
        rows = np.concatenate([kept_rows(output, number, table, split) for split in SPLITS])
        found.append(np.array([place_of(digest.tobytes()) for digest in table.digest[rows]]))
    places: NDArray[np.float64] = np.unique(np.concatenate(found))
    return places
