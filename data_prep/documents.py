"""What is kept about every document of a unit: where it came from, its digest, its split."""

import numpy as np
from numpy.typing import NDArray

from lex_pretrain.data.manifest import SPLITS, Split
from lex_pretrain.data.origins import DocumentTable


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
