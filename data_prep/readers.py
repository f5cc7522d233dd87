"""Reading documents out of a part of a source, one at a time, with what went wrong in between.

Reading yields a `Document` or a `Rejection` for every record, so that nothing is lost without a trace; a file that
cannot be read at all raises RequestError, and one that changed meanwhile raises ChangedFileError.
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from data_prep.formats import Compression, format_of
from data_prep.json_files import read_json, read_json_lines, read_line
from data_prep.megatron import IndexedDataset
from data_prep.opening import READ_ERRORS, open_bytes, read_bytes
from data_prep.options import PrepareOptions
from data_prep.records import TOO_LONG, Document, Item, Items, Rejection, bytes_item
from data_prep.sources import REMOTE_PREFIX, states_of
from data_prep.tables import read_csv, read_dataset, read_parquet
from data_prep.units import Segment
from lex_pretrain.errors import RequestError
from lex_pretrain.tokenizer import Tokenizer

UNREADABLE = "unreadable file"


class ChangedFileError(RequestError):
    """A file was written to, cut short or replaced after the work on it was planned."""


class SegmentReader:
    """Iterates over the records of a segment; then `num_records` says how many it held. Errors as above."""

    def __init__(self, segment: Segment, options: PrepareOptions) -> None:
        self._segment = segment
        self._options = options
        self.num_records = 0

    def __iter__(self) -> Iterator[Item]:
        segment = self._segment
        before = segment.states if segment.states is not None else states_of(segment.source)
        try:
            self.num_records = yield from self._items()
        except (RequestError, *READ_ERRORS) as error:
            # What reads oddly because it was being written is no damage.
            self._check_unchanged(before)
            if isinstance(error, RequestError):
                raise
            raise RequestError(f"{segment.source} cannot be read: {error}") from error
        self._check_unchanged(before)

    def _check_unchanged(self, before: tuple[object, ...]) -> None:
        source = self._segment.source
        try:
            now = states_of(source)
        except RequestError as error:
            raise ChangedFileError(f"{error}; it was there when the work began") from error
        if now != before:
            raise ChangedFileError(
                f"{source} was written to, cut short or replaced after the work on it began; "
                "run again when it is complete, into another --output"
            )

    def _items(self) -> Items:
        segment, options = self._segment, self._options
        key, limit = options.text_key, options.max_document_bytes
        path, start, end = segment.source, segment.start, segment.end
        if path.startswith(REMOTE_PREFIX):
            return read_dataset(path, start, end, key)
        form = format_of(path)
        if form is None:
            raise RequestError(f"{path} is not a format that can be read")
        packed = form.compression
        match form.kind:
            case "json lines":
                return read_json_lines(path, packed, start, end, key, limit)
            case "json":
                return read_json(path, packed, key, limit)
            case "indexed":
                return _read_indexed(Path(path), segment, options.tokenizer)
            case "parquet":
                return read_parquet(path, packed, start, end, key)
            case "csv":
                return read_csv(path, packed, ",", key, limit)
            case "tsv":
                return read_csv(path, packed, "\t", key, limit)
            case "text":
                return _read_text(path, packed, options.separator, limit)


def read_segment(reader: SegmentReader, skip_bad_files: bool) -> Iterator[Item]:
    """The segment's records; where reading fails, what came before stays, and the rest is one rejection if allowed."""
    number = 0
    try:
        for item in reader:
            number = item.record
            yield item
    except ChangedFileError:
        raise
    except RequestError as error:
        if not skip_bad_files:
            raise RequestError(
                f"{error}; mend or leave out the file, or go on without it by --skip-bad-files"
            ) from None
        yield Rejection(UNREADABLE, number + 1, 0, str(error))


def _read_text(path: str, compression: Compression | None, separator: str | None, limit_bytes: int) -> Items:
    if separator is not None:
        with open_bytes(path, compression) as file:
            return (yield from _read_separated(file, separator.encode(), limit_bytes))
    data, num_bytes = read_bytes(path, compression, limit_bytes)
    yield Rejection(TOO_LONG, 1, num_bytes) if num_bytes > limit_bytes else bytes_item(data, 1)
    return 1


def _read_separated(file: IO[bytes], separator: bytes, limit_bytes: int) -> Items:
    """Documents between lines that are `separator`; none before the first line or after the last one."""
    number = 0
    lines: list[bytes] = []
    num_bytes = 0
    while True:
        line, line_bytes = read_line(file, limit_bytes)
        ends = line_bytes == 0 or (line_bytes <= limit_bytes and line.rstrip(b"\r\n") == separator)
        if ends and num_bytes:
            number += 1
            too_long = num_bytes > limit_bytes
            yield Rejection(TOO_LONG, number, num_bytes) if too_long else bytes_item(b"".join(lines), number)
        if line_bytes == 0:
            return number
        lines, num_bytes = ([], 0) if ends else (lines, num_bytes + line_bytes)
        if not ends and num_bytes <= limit_bytes:
            lines.append(line)


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
