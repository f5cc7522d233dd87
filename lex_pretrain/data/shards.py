"""Token shards: plain `.npy` files, read as one stream a split.

`<stem>.tokens.npy`     uint16 where every id fits, else uint32; each document ends with EOD.
`<stem>.documents.npy`  int64, where each document starts in the shard.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lex_pretrain.data.manifest import SPLITS, Manifest, ShardRecord, Split
from lex_pretrain.errors import RequestError
from lex_pretrain.files import atomic_write, sha256_of_file
from lex_pretrain.tokenizer import Tokenizer

Tokens = NDArray[np.uint16] | NDArray[np.uint32]

TOKENIZER_FILE = "tokenizer.model"
# Opened memory maps that a dataset keeps; each costs a file descriptor.
_MAX_OPEN_SHARDS = 256


def tokens_file(folder: Path, stem: str) -> Path:
    return folder / f"{stem}.tokens.npy"


def documents_file(folder: Path, stem: str) -> Path:
    return folder / f"{stem}.documents.npy"


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """uint16 as long as the largest id, vocab_size - 1, fits."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def write_array(file: Path, values: NDArray[Any]) -> None:
    """Write one `.npy` file by atomic rename."""
    with atomic_write(file) as opened:
        np.lib.format.write_array_header_1_0(opened, np.lib.format.header_data_from_array_1_0(values))
        # Not np.save: it does not say so when the disk is full.
        opened.write(np.ascontiguousarray(values).data)


def write_shard(
    folder: Path,
    stem: str,
    split: Split,
    tokens: Tokens,
    starts: NDArray[np.int64],
    num_source_bytes: int,
) -> ShardRecord:
    """Write both files of a shard, each by atomic rename."""
    files = tokens_file(folder, stem), documents_file(folder, stem)
    files[0].parent.mkdir(parents=True, exist_ok=True)
    write_array(files[0], tokens)
    write_array(files[1], starts)
    return ShardRecord(
        stem=stem,
        split=split,
        num_tokens=len(tokens),
        num_documents=len(starts),
        num_source_bytes=num_source_bytes,
        tokens_sha256=sha256_of_file(files[0]),
        documents_sha256=sha256_of_file(files[1]),
    )


@dataclass(frozen=True)
class DocumentPlace:
    """A document: the `number`-th of its shard, counted from 0, and tokens `start` .. `end` - 1 of the stream."""

    shard: ShardRecord
    number: int
    start: int
    end: int


class TokenDataset:
    """One split of a dataset folder as a single stream of tokens; files are mapped when first read."""

    def __init__(self, folder: Path, split: Split, manifest: Manifest) -> None:
        self.folder = folder
        self.split = split
        self.manifest = manifest
        self.shards = [shard for shard in manifest.shards if shard.split == split]
        self._starts = np.cumsum([0] + [shard.num_tokens for shard in self.shards], dtype=np.int64)
        self._maps: dict[int, Tokens] = {}

    @staticmethod
    def open(folder: Path, split: str = "train") -> "TokenDataset":
        """Raises RequestError when the folder is not a dataset or has nothing in that split."""
        manifest = Manifest.load(folder)
        splits = sorted({shard.split for shard in manifest.shards})
        for known in splits:
            if known == split:
                return TokenDataset(folder, known, manifest)
        way_out = f"; prepare more documents or with a larger --{split}-fraction" if split in SPLITS else ""
        held = ", ".join(splits) or "no documents at all"
        raise RequestError(f"{folder} has no {split} split; it has: {held}{way_out}")

    @property
    def num_tokens(self) -> int:
        return int(self._starts[-1])

    @property
    def num_documents(self) -> int:
        return sum(shard.num_documents for shard in self.shards)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.folder / TOKENIZER_FILE)

    def read(self, start: int, num_tokens: int) -> Tokens:
        """Tokens start .. start + num_tokens - 1 of the stream, across shard borders.

        IndexError beyond its ends, RequestError where a shard holds an id that is no piece of the tokenizer.
        """
        if start < 0 or start + num_tokens > self.num_tokens:
            raise IndexError(f"tokens {start} to {start + num_tokens} of {self.num_tokens}")
        tokens: Tokens = np.empty(num_tokens, dtype=self.manifest.dtype)
        index = int(np.searchsorted(self._starts, start, side="right")) - 1
        done = 0
        while done < num_tokens:
            offset = start + done - int(self._starts[index])
            part = self._map(index)[offset : offset + num_tokens - done]
            tokens[done : done + len(part)] = part
            done, index = done + len(part), index + 1
        self._check_ids(tokens[None], [start])
        return tokens

    def read_windows(self, starts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Windows [B, length] of the stream; errors as of `read`."""
        if len(starts) and (starts.min() < 0 or starts.max() + length > self.num_tokens):
            raise IndexError(f"windows of {length} tokens at {starts.min()} to {starts.max()} of {self.num_tokens}")
        windows = np.empty((len(starts), length), dtype=np.int64)
        shards = np.searchsorted(self._starts, starts, side="right") - 1
        offsets = starts - self._starts[shards]
        inside = starts + length <= self._starts[shards + 1]
        for row, shard, offset in zip(range(len(starts)), shards.tolist(), offsets.tolist(), strict=True):
            if inside[row]:
                windows[row] = self._map(shard)[offset : offset + length]
            else:
                windows[row] = self.read(int(starts[row]), length)
        self._check_ids(windows, starts)
        return windows

    def _check_ids(self, tokens_BT: NDArray[np.integer], starts: Sequence[int] | NDArray[np.int64]) -> None:
        """Here, because a GPU that looks up a row which its table lacks ends the process with no word of the cause."""
        if tokens_BT.size == 0 or tokens_BT.max() < self.manifest.tokenizer.vocab_size:
            return
        row, column = np.argwhere(tokens_BT >= self.manifest.tokenizer.vocab_size)[0]
        token = int(starts[row]) + int(column)
        index = int(np.searchsorted(self._starts, token, side="right")) - 1
        raise RequestError(
            f"shard {tokens_file(self.folder, self.shards[index].stem)} holds id {tokens_BT[row, column]} as its token "
            f"{token - self.shard_start(index)}, and the tokenizer has {self.manifest.tokenizer.vocab_size} pieces: "
            "`lex-pretrain verify-data` says what is damaged"
        )

    def shard_start(self, index: int) -> int:
        """Place of a shard's first token in the stream; that of the shard after the last is the stream's end."""
        return int(self._starts[index])

    def document_starts(self, index: int) -> NDArray[np.int64]:
        """Place in the stream of the first token of each document of a shard."""
        return self._map_starts(index) + self.shard_start(index)

    def document_at(self, token: int) -> DocumentPlace:
        """The document that holds a token of the stream, by binary search; IndexError beyond its ends."""
        if not 0 <= token < self.num_tokens:
            raise IndexError(f"token {token} of {self.num_tokens}")
        index = int(np.searchsorted(self._starts, token, side="right")) - 1
        shard, base, starts = self.shards[index], self.shard_start(index), self._map_starts(index)
        number = int(np.searchsorted(starts, token - base, side="right")) - 1
        end = int(starts[number + 1]) if number + 1 < len(starts) else shard.num_tokens
        return DocumentPlace(shard, number, base + int(starts[number]), base + end)

    def document_bounds(self) -> Iterator[tuple[int, int]]:
        """First token and the place past the EOD of each document, in the order of the stream."""
        for index in range(len(self.shards)):
            starts = self.document_starts(index)
            ends = np.append(starts[1:], self.shard_start(index + 1))
            yield from zip(starts.tolist(), ends.tolist(), strict=True)

    def _map_starts(self, index: int) -> NDArray[np.int64]:
        file = documents_file(self.folder, self.shards[index].stem)
        try:
            starts: NDArray[np.int64] = np.load(file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise RequestError(f"{file} cannot be read: {error}") from error
        return starts

    def _map(self, index: int) -> Tokens:
        if index not in self._maps:
            if len(self._maps) >= _MAX_OPEN_SHARDS:
                self._maps.pop(next(iter(self._maps)))
            shard = self.shards[index]
            file = tokens_file(self.folder, shard.stem)
            try:
                mapped = np.load(file, mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError) as error:
                raise RequestError(f"shard {file} cannot be read: {error}") from error
            if len(mapped) != shard.num_tokens:
                raise RequestError(f"shard {file} holds {len(mapped)} tokens, and the manifest says {shard.num_tokens}")
            # A plain view: slicing a memmap costs more than copying a short window.
            self._maps[index] = np.asarray(mapped)
        return self._maps[index]
