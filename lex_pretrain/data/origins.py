"""Where a packed document came from, by what a preparation keeps beside its shards in `.units/`.

`unit-00000.json`           the unit's record: the source of each segment, and how many records each held
`unit-00000.documents.npz`  a table with a row for each document that was packed
`unit-00000.dropped.npy`    rows of the table that were taken out again as duplicates

The number of a shard is that of its unit. None of these files is needed to train.
"""

import io
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lex_pretrain.data.manifest import SPLITS, Split
from lex_pretrain.errors import JobError, LexError
from lex_pretrain.files import atomic_write, read_json

UNITS_FOLDER = ".units"


def record_file(output: Path, number: int) -> Path:
    return output / UNITS_FOLDER / f"unit-{number:05d}.json"


def table_file(output: Path, number: int) -> Path:
    return output / UNITS_FOLDER / f"unit-{number:05d}.documents.npz"


def dropped_file(output: Path, number: int) -> Path:
    return output / UNITS_FOLDER / f"unit-{number:05d}.dropped.npy"


@dataclass(frozen=True)
class DocumentTable:
    """One row a packed document, in the order of reading; a split's documents keep that order in its shard."""

    split: NDArray[np.uint8]  # [N] place in SPLITS
    segment: NDArray[np.int64]  # [N] segment of the unit
    record: NDArray[np.int64]  # [N] record of the segment, from 1
    num_bytes: NDArray[np.int64]  # [N] size of the text as UTF-8
    digest: NDArray[np.uint64]  # [N, 2] 128 bits of the text's hash
    signature: NDArray[np.uint32]  # [N, S] MinHash; S = 0 where near duplicates are not looked for

    def __len__(self) -> int:
        return len(self.split)

    def places_of(self, split: Split) -> NDArray[np.int64]:
        """Rows of a split, in order."""
        return np.flatnonzero(self.split == SPLITS.index(split))

    def save(self, file: Path) -> None:
        with atomic_write(file) as opened:
            np.savez(opened, **vars(self))

    @staticmethod
    def load(file: Path) -> "DocumentTable":
        try:
            # Read at once: a lazily read archive would keep its file open.
            with np.load(io.BytesIO(file.read_bytes()), allow_pickle=False) as arrays:
                return DocumentTable(**arrays)
        except (OSError, ValueError, TypeError) as error:
            raise JobError(f"{file} cannot be read: {error}; delete the folder it lies in and run again") from error


def kept_rows(folder: Path, number: int, table: DocumentTable, split: Split) -> NDArray[np.int64]:
    """Rows of a unit's table by the place of their document in the split's shard: those that were not dropped."""
    rows = table.places_of(split)
    if read_json(record_file(folder, number))["num_dropped"]:
        rows = np.setdiff1d(rows, np.load(dropped_file(folder, number), allow_pickle=False))
    return rows


def origin_of(folder: Path, stem: str, split: Split, place: int) -> str:
    """The source and the record of it that the document at `place` of a shard was read from.

    Records count from 1: lines of a .jsonl, rows of a table. Where a preparation's own files are gone or are too old to
    tell, this names the document by its shard instead.
    """
    number = int(stem.rpartition("shard-")[2])
    try:
        table = DocumentTable.load(table_file(folder, number))
        row = int(kept_rows(folder, number, table, split)[place])
        source, base = _segment(folder, number, int(table.segment[row]))
    except (LexError, KeyError, IndexError, ValueError):
        return f"{folder / stem}, document {place}"
    return f"{source}, record {base + int(table.record[row])}"


def _segment(folder: Path, number: int, segment: int) -> tuple[str, int]:
    """The source of a segment, and how many records of that source come before the segment, in earlier units too."""
    parts = _parts(folder, number)
    source, earlier = parts[segment][0], parts[:segment]
    base = 0
    while True:
        counts = [count for _, count in takewhile(lambda part: part[0] == source, reversed(earlier))]
        base += sum(counts)
        if len(counts) < len(earlier) or number == 0:
            return source, base
        number -= 1
        earlier = _parts(folder, number)


def _parts(folder: Path, number: int) -> list[tuple[str, int]]:
    """Source and number of records of each segment of a unit. Raises ValueError when an old one does not tell."""
    unit: dict[str, Any] = read_json(record_file(folder, number))
    return list(zip(unit.get("sources", ()), unit["num_records"], strict=True))
