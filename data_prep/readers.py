"""Reading documents out of a part of a source, one at a time, with what went wrong in between.

Reading yields a `Document` or a `Rejection` for every record, so that nothing is lost without a trace; a file that
cannot be read at all raises RequestError.
"""

import functools
import gzip
import io
import json
import zlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from data_prep.megatron import INDEX_SUFFIX, IndexedDataset
from data_prep.options import PrepareOptions
from data_prep.sources import JSONL_SUFFIXES, REMOTE_PREFIX
from data_prep.tables import Row, csv_rows, dataset_rows, parquet_rows
from data_prep.units import Segment
from lex_pretrain.errors import RequestError
from lex_pretrain.tokenizer import Tokenizer

NOT_UTF8 = "not UTF-8"
TOO_LONG = "too long"
SURROGATE = "lone surrogate"
_SKIPPED_AT_ONCE_BYTES = 2**20


@dataclass(frozen=True)
class Document:
    """A document's text and its UTF-8; `record` counts the records of its segment from 1.

    `ids` are those that the source itself holds, without EOD; None where the source holds text.
    """

    text: str
    data: bytes
    record: int
    ids: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class Rejection:
    """A record that gives no document; `num_bytes` is its size as stored, 0 where that is not known."""

    reason: str
    record: int
    num_bytes: int
    detail: str = ""


Item = Document | Rejection
# Yields the records and returns how many there were: lines of .jsonl, blank ones too, else documents or rows.
Items = Generator[Item, None, int]


class SegmentReader:
    """Iterates over the records of a segment; then `num_records` says how many it held. RequestError as above."""

    def __init__(self, segment: Segment, options: PrepareOptions) -> None:
        self._segment = segment
        self._options = options
        self.num_records = 0

    def __iter__(self) -> Iterator[Item]:
        source = self._segment.source
        try:
            self.num_records = yield from self._items(source)
        except (OSError, EOFError, zlib.error) as error:
            raise RequestError(f"{source} cannot be read: {error}") from error

    def _items(self, source: str) -> Items:
        segment, options = self._segment, self._options
        key, path = options.text_key, Path(source)
        if source.startswith(REMOTE_PREFIX):
            return _read_rows(dataset_rows(source, segment.start, segment.end), key)
        if path.name.endswith(JSONL_SUFFIXES):
            return _read_json_lines(path, segment, key, options.max_document_bytes)
        if path.suffix == INDEX_SUFFIX:
            return _read_indexed(path, segment, options.tokenizer)
        if path.suffix == ".parquet":
            return _read_rows(parquet_rows(path, segment.start, segment.end, key.partition(".")[0]), key)
        if path.suffix == ".csv":
            return _read_rows(csv_rows(path, options.max_document_bytes), key, surrogate_reason=NOT_UTF8)
        if path.suffix == ".txt" and options.separator is not None:
            return _read_separated(path, options.separator.encode(), options.max_document_bytes)
        return _read_whole(path, options.max_document_bytes)


def _document(text: str, record: int, surrogate_reason: str = SURROGATE) -> Item:
    """The document, or the rejection of a text that UTF-8 cannot hold."""
    try:
        return Document(text, text.encode(), record)
    except UnicodeEncodeError as error:
        num_bytes = len(text.encode(errors="replace"))
        return Rejection(surrogate_reason, record, num_bytes, f"character {error.start}")


def _decode(data: bytes, record: int) -> Item:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return Rejection(NOT_UTF8, record, len(data), f"byte {error.start}")
    return _document(text, record)


def _read_whole(path: Path, limit_bytes: int) -> Items:
    size = path.stat().st_size
    yield Rejection(TOO_LONG, 1, size) if size > limit_bytes else _decode(path.read_bytes(), 1)
    return 1


def _read_separated(path: Path, separator: bytes, limit_bytes: int) -> Items:
    """Documents between lines that are `separator`; none before the first line or after the last one."""
    number = 0
    lines: list[bytes] = []
    num_bytes = 0
    with path.open("rb") as file:
        while True:
            line, line_bytes = _read_line(file, limit_bytes)
            ends = line_bytes == 0 or (line_bytes <= limit_bytes and line.rstrip(b"\r\n") == separator)
            if ends and num_bytes:
                number += 1
                too_long = num_bytes > limit_bytes
                yield Rejection(TOO_LONG, number, num_bytes) if too_long else _decode(b"".join(lines), number)
            if line_bytes == 0:
                return number
            lines, num_bytes = ([], 0) if ends else (lines, num_bytes + line_bytes)
            if not ends and num_bytes <= limit_bytes:
                lines.append(line)


def _read_line(file: IO[bytes], limit_bytes: int) -> tuple[bytes, int]:
    """The next line and its size; of a line beyond the limit its head alone, and nothing (b"", 0) at the end."""
    line = file.readline(limit_bytes + 1)
    num_bytes = len(line)
    if num_bytes > limit_bytes:
        while not line.endswith(b"\n") and (line := file.readline(_SKIPPED_AT_ONCE_BYTES)):
            num_bytes += len(line)
    return line, num_bytes


def _read_json_lines(path: Path, segment: Segment, text_key: str, limit_bytes: int) -> Items:
    """A line belongs to the segment that its first byte lies in."""
    number = 0
    with _open_binary(path) as file:
        position = 0
        if segment.start:
            file.seek(segment.start - 1)
            position = segment.start - 1 + _read_line(file, _SKIPPED_AT_ONCE_BYTES)[1]
        while segment.end is None or position < segment.end:
            line, num_bytes = _read_line(file, limit_bytes)
            if num_bytes == 0:
                break
            position += num_bytes
            number += 1
            if num_bytes > limit_bytes:
                yield Rejection(TOO_LONG, number, num_bytes)
            elif not line.isspace():
                yield _document_of_line(line, number, text_key)
    return number


def _open_binary(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.suffix == ".zst":
        # Unlike the zstandard package's reader, Arrow's raises on a file that was cut short.
        import pyarrow as arrow

        stream = arrow.CompressedInputStream(arrow.OSFile(str(path)), "zstd")
        return io.BufferedReader(stream, buffer_size=_SKIPPED_AT_ONCE_BYTES)
    return path.open("rb", buffering=_SKIPPED_AT_ONCE_BYTES)


def _document_of_line(line: bytes, number: int, text_key: str) -> Item:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return Rejection(NOT_UTF8, number, len(line), f"byte {error.start} of the line")
    except (ValueError, RecursionError) as error:
        return Rejection("not JSON", number, len(line), str(error))
    return _document_of_row(value, number, text_key, len(line))


def _document_of_row(value: Any, number: int, text_key: str, num_bytes: int, surrogate_reason: str = SURROGATE) -> Item:
    for part in text_key.split("."):
        if not isinstance(value, dict) or part not in value:
            return Rejection(f"no key {text_key}", number, num_bytes)
        value = value[part]
    if not isinstance(value, str):
        return Rejection(f"{text_key} is not text", number, num_bytes)
    return _document(value, number, surrogate_reason)


def _read_rows(rows: Iterator[Row], text_key: str, surrogate_reason: str = SURROGATE) -> Items:
    number = 0
    for row in rows:
        number += 1
        yield _document_of_row(row, number, text_key, 0, surrogate_reason)
    return number


def _read_indexed(path: Path, segment: Segment, tokenizer_file: Path | None) -> Items:
    """Documents of a Megatron dataset: their ids as they are, and the text that they stand for."""
    if tokenizer_file is None:
        raise RequestError(f"{path} holds ids; name the tokenizer that made them by --tokenizer FILE.model")
    dataset, tokenizer = IndexedDataset(path), _tokenizer(tokenizer_file)
    end = len(dataset) if segment.end is None else segment.end
    for number, place in enumerate(range(segment.start, end), start=1):
        ids = dataset.document(place)
        if len(ids) and ids[-1] == tokenizer.eod_id:
            ids = ids[:-1]
        if len(ids) and (ids.min() < 0 or ids.max() >= tokenizer.vocab_size):
            detail = f"ids {ids.min()} to {ids.max()}, vocabulary of {tokenizer.vocab_size}"
            yield Rejection("ids of another tokenizer", number, 0, detail)
        elif (ids == tokenizer.eod_id).any():
            yield Rejection("end of document inside", number, 0, f"token {int(np.argmax(ids == tokenizer.eod_id))}")
        else:
            text = tokenizer.decode(ids.tolist())
            yield Document(text, text.encode(), number, ids)
    return end - segment.start


@functools.lru_cache(maxsize=1)
def _tokenizer(file: Path) -> Tokenizer:
    return Tokenizer(file)
