"""Megatron's indexed datasets: a `.bin` of token ids and the `.idx` that says where each document lies in it.

All numbers are little-endian. The `.idx` holds: 9 bytes `MMIDIDX\\0\\0`, uint64 version 1, uint8 code of the ids' type,
uint64 number of sequences S, uint64 number of document borders B, int32[S] lengths of the sequences in tokens,
int64[S] their places in the `.bin` in bytes, int64[B] the sequence at which each document starts and, at the end, S.
(Format: `megatron/core/datasets/indexed_dataset.py` of NVIDIA/Megatron-LM.)
"""

import itertools
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lex_pretrain.data.manifest import SPLITS, Manifest
from lex_pretrain.data.shards import TokenDataset
from lex_pretrain.errors import RequestError
from lex_pretrain.files import atomic_write
from lex_pretrain.progress import progress

INDEX_SUFFIX = ".idx"
_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_VERSION = 1
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_CODE_OF_INT32, _CODE_OF_UINT16 = 4, 8
_COPIED_AT_ONCE_TOKENS = 2**22


def tokens_file_of(index_file: Path) -> Path:
    return index_file.with_suffix(".bin")


class IndexedDataset:
    """An indexed dataset, mapped into memory.

    Raises RequestError when either file is missing, of another format, or does not fit the other.
    """

    def __init__(self, index_file: Path) -> None:
        file = tokens_file_of(index_file)
        try:
            index = np.memmap(index_file, mode="r", dtype=np.uint8)
            num_bytes = file.stat().st_size
        except (OSError, ValueError) as error:
            raise RequestError(f"{index_file} cannot be read: {error}") from error
        magic, version, code, num_sequences, num_borders = _HEADER.unpack(
            bytes(index[: _HEADER.size]).ljust(_HEADER.size, b"\0")
        )
        if magic != _MAGIC or version != _VERSION:
            raise RequestError(f"{index_file} is not a Megatron index of version {_VERSION}")
        if not _TYPES.get(code, "f").lstrip("<").startswith(("u", "i")):
            raise RequestError(f"{index_file}: type {code} of the ids is not a whole number's")
        if len(index) < _HEADER.size + 12 * num_sequences + 8 * num_borders or num_borders < 1:
            raise RequestError(f"{index_file} is cut short: {num_sequences} sequences and {num_borders} borders in it")
        place = _HEADER.size
        self._lengths = _part(index, place, num_sequences, "<i4")
        self._places = _part(index, place := place + 4 * num_sequences, num_sequences, "<i8")
        self._borders = _part(index, place + 8 * num_sequences, num_borders, "<i8")
        self._dtype = np.dtype(_TYPES[code])
        ends = self._places + self._lengths.astype(np.int64) * self._dtype.itemsize
        wrong_sequences = num_sequences and (
            self._lengths.min() < 0
            or self._places.min() < 0
            or ends.max() > num_bytes
            or (self._places % self._dtype.itemsize).any()
        )
        wrong_borders = (
            self._borders[0] != 0 or self._borders[-1] != num_sequences or (np.diff(self._borders) < 0).any()
        )
        if wrong_sequences or wrong_borders:
            raise RequestError(f"{index_file} does not fit {file.name} ({num_bytes} bytes)")
        self._tokens: NDArray[Any] = np.empty(0, self._dtype)
        if num_bytes >= self._dtype.itemsize:
            self._tokens = np.memmap(file, mode="r", dtype=self._dtype)

    def __len__(self) -> int:
        """Number of documents."""
        return len(self._borders) - 1

    def document(self, number: int) -> NDArray[np.int64]:
        """Ids of a document: those of its sequences, joined."""
        sequences = range(int(self._borders[number]), int(self._borders[number + 1]))
        parts = [np.empty(0, np.int64)]
        for sequence in sequences:
            start = int(self._places[sequence]) // self._dtype.itemsize
            parts.append(self._tokens[start : start + int(self._lengths[sequence])].astype(np.int64))
        return np.concatenate(parts)

    def document_lengths(self) -> NDArray[np.int64]:
        """Tokens of each document, [N]."""
        ends = np.concatenate([[0], np.cumsum(self._lengths, dtype=np.int64)])
        lengths: NDArray[np.int64] = np.diff(ends[self._borders])
        return lengths


def _part(index: NDArray[np.uint8], place: int, count: int, dtype: str) -> NDArray[Any]:
    return index[place : place + count * np.dtype(dtype).itemsize].view(dtype)


def write_indexed_datasets(folder: Path, output: Path) -> list[Path]:
    """Write every split of a dataset folder as `output/<split>.bin` and `.idx`, one sequence a document, EODs kept.

    Ids are uint16 where the dataset's are, else int32. Returns the index files. Raises RequestError when the folder is
    no dataset, `output` already has one of the files, or a document is longer than int32 counts.
    """
    held = {shard.split for shard in Manifest.load(folder).shards}
    splits = [split for split in SPLITS if split in held]
    index_files = [output / f"{split}{INDEX_SUFFIX}" for split in splits]
    if there := [file for index in index_files for file in (index, tokens_file_of(index)) if file.exists()]:
        raise RequestError(f"{there[0]} already exists; choose another --output")
    output.mkdir(parents=True, exist_ok=True)
    for split, index_file in zip(splits, index_files, strict=True):
        _write_split(TokenDataset.open(folder, split), index_file)
    return index_files


def _write_split(dataset: TokenDataset, index_file: Path) -> None:
    code = _CODE_OF_UINT16 if dataset.manifest.dtype == "uint16" else _CODE_OF_INT32
    dtype = np.dtype(_TYPES[code])
    starts = np.fromiter((start for start, _ in dataset.document_bounds()), np.int64, dataset.num_documents)
    lengths = np.diff(np.append(starts, dataset.num_tokens))
    if lengths.max(initial=0) > np.iinfo(np.int32).max:
        raise RequestError(f"a document of {lengths.max():,} tokens is longer than Megatron's index can say")
    with (
        atomic_write(tokens_file_of(index_file)) as file,
        progress(index_file.name, dataset.num_tokens, "tokens") as reporter,
    ):
        for start in range(0, dataset.num_tokens, _COPIED_AT_ONCE_TOKENS):
            tokens = dataset.read(start, min(_COPIED_AT_ONCE_TOKENS, dataset.num_tokens - start))
            file.write(tokens.astype(dtype).data)
            reporter.advance(len(tokens))
    with atomic_write(index_file) as file:
        file.write(_HEADER.pack(_MAGIC, _VERSION, code, len(lengths), len(lengths) + 1))
        file.write(lengths.astype("<i4").data)
        file.write((starts * dtype.itemsize).astype("<i8").data)
        file.write(np.arange(len(lengths) + 1, dtype="<i8").data)


def document_ranges(index_file: Path, unit_bytes: int, bytes_per_token: int) -> Iterator[tuple[int, int, int]]:
    """Runs of documents (start, end, bytes) of at least `unit_bytes`, where a token stands for `bytes_per_token`."""
    num_bytes = IndexedDataset(index_file).document_lengths() * bytes_per_token
    parts = np.cumsum(num_bytes) // unit_bytes
    # A run ends with the document that reaches the next multiple of `unit_bytes`.
    ends = np.flatnonzero(np.diff(parts, prepend=0)) + 1
    borders = [0, *ends.tolist(), *([len(num_bytes)] if not len(ends) or ends[-1] != len(num_bytes) else [])]
    for start, end in itertools.pairwise(borders):
        yield start, end, int(num_bytes[start:end].sum())
