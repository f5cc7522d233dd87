"""What is kept about every document of a unit: where it came from, its digest, its split."""

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lex_pretrain.data.manifest import SPLITS, Split
from lex_pretrain.errors import JobError
from lex_pretrain.files import atomic_write


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


class DocumentTableBuilder:
    """Collects the rows of a table while a unit is read."""

    def __init__(self, signature_size: int) -> None:
        self._signature_size = signature_size
        self._rows: list[tuple[int, int, int, int]] = []
        self._digests: list[bytes] = []
        self._signatures: list[NDArray[np.uint32]] = []

    def add(
        self,
        split: Split,
        segment: int,
        record: int,
        num_bytes: int,
        digest: bytes,
        signature: NDArray[np.uint32] | None,
    ) -> None:
        self._rows.append((SPLITS.index(split), segment, record, num_bytes))
        self._digests.append(digest)
        if signature is not None:
            self._signatures.append(signature)

    def build(self) -> DocumentTable:
        rows = np.array(self._rows, dtype=np.int64).reshape(-1, 4)
        return DocumentTable(
            split=rows[:, 0].astype(np.uint8),
            segment=rows[:, 1],
            record=rows[:, 2],
            num_bytes=rows[:, 3],
            digest=np.frombuffer(b"".join(self._digests), dtype=np.uint64).reshape(-1, 2),
            signature=np.array(self._signatures, dtype=np.uint32).reshape(len(rows), self._signature_size),
        )
