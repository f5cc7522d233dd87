"""Work units: what is done as a whole or not at all. They come from the inputs alone, never from who does them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from data_prep.formats import Format, format_of
from data_prep.megatron import document_ranges
from data_prep.sources import REMOTE_PREFIX, FileState, States, states_of
from data_prep.tables import parquet_row_groups, plan_dataset
from lex_pretrain.errors import RequestError

# Opening a file costs more than reading a short one, so units of many small files are bounded by their number too.
MAX_UNIT_SEGMENTS = 4096
# Guesses for planning only: compressed text unpacks to so many times its size, and a token stands for so much text.
_COMPRESSION_RATIO = 4
_TEXT_BYTES_PER_TOKEN = 4
# Of a file, at most this share is read to find where its units may begin.
_LARGEST_SHARE_SCANNED = 0.08
_SCANNED_AT_ONCE_BYTES = 2**16


class Segment(NamedTuple):
    """A part of a source: whole lines of a .jsonl by their bytes, row groups of a .parquet, documents of an .idx, rows
    or shards of a dataset.

    `end` None means all of it. `num_bytes` is the text's size where it is known, for planning and progress; `states`
    what the source's files were when this was planned, None where nobody asks whether they have changed since.
    """

    source: str
    start: int
    end: int | None
    num_bytes: int
    states: tuple[FileState, ...] | None = None


@dataclass(frozen=True)
class Unit:
    """Segments that become one shard of each split."""

    number: int
    segments: tuple[Segment, ...]

    @property
    def num_bytes(self) -> int:
        return sum(segment.num_bytes for segment in self.segments)


def make_units(sources: list[str], unit_bytes: int, states: States | None = None) -> list[Unit]:
    """Group the segments of sorted sources, in order, into units of at least `unit_bytes` or `MAX_UNIT_SEGMENTS`, or
    as much as there is. `states` are what the sources were when the work was described, now if not given."""
    units: list[Unit] = []
    group: list[Segment] = []
    num_bytes = 0
    for source in sources:
        for segment in _segments(source, states_of(source) if states is None else states[source], unit_bytes):
            group.append(segment)
            num_bytes += segment.num_bytes
            if num_bytes >= unit_bytes or len(group) >= MAX_UNIT_SEGMENTS or source.startswith(REMOTE_PREFIX):
                units.append(Unit(len(units), tuple(group)))
                group, num_bytes = [], 0
    if group:
        units.append(Unit(len(units), tuple(group)))
    return units


def _segments(source: str, states: tuple[FileState, ...], unit_bytes: int) -> Iterator[Segment]:
    """One segment for most sources, several for a large one that can be read from the middle."""
    for start, end, num_bytes in _parts(source, states, unit_bytes):
        yield Segment(source, start, end, num_bytes, states)


def _parts(
    source: str, states: tuple[FileState, ...], unit_bytes: int
) -> Iterator[tuple[int, int | None, int]] | list[tuple[int, int | None, int]]:
    if source.startswith(REMOTE_PREFIX):
        return plan_dataset(source, unit_bytes)
    form, size = format_of(source), states[0].num_bytes
    if form == Format("indexed"):
        return document_ranges(Path(source), unit_bytes, _TEXT_BYTES_PER_TOKEN)
    if form == Format("json lines") and size > unit_bytes:
        return _line_parts(source, size, unit_bytes)
    if form == Format("parquet") and size > unit_bytes:
        return _row_group_parts(source, size, unit_bytes)
    ratio = _COMPRESSION_RATIO if form is not None and form.compression else 1
    return [(0, None, size * ratio)]


def _line_parts(path: str, size: int, unit_bytes: int) -> Iterator[tuple[int, int | None, int]]:
    """Runs of whole lines of at least `unit_bytes`; longer, to the file's end if need be, where lines are so long that
    finding their ends would mean reading much of the file twice."""
    start = num_scanned = 0
    while start < size:
        end = max(start + unit_bytes, int(num_scanned / _LARGEST_SHARE_SCANNED))
        if end < size:
            most = int(size * _LARGEST_SHARE_SCANNED) + 1 - num_scanned
            num_bytes = _bytes_to_line_end(path, end - 1, most, buffer_bytes=max(128, min(4096, unit_bytes // 32)))
            num_scanned += num_bytes
            end = end - 1 + num_bytes if num_bytes < most else size
        yield start, min(end, size), min(end, size) - start
        start = end


def _bytes_to_line_end(path: str, start: int, most: int, buffer_bytes: int) -> int:
    """From `start` to the end of its line, that included; `most` where it lies no nearer."""
    num_bytes = 0
    with open(path, "rb", buffering=buffer_bytes) as file:
        file.seek(start)
        while num_bytes < most and (part := file.readline(min(most - num_bytes, _SCANNED_AT_ONCE_BYTES))):
            num_bytes += len(part)
            if part.endswith(b"\n"):
                break
    return num_bytes


def _row_group_parts(path: str, size: int, unit_bytes: int) -> Iterator[tuple[int, int | None, int]]:
    """Runs of row groups of at least `unit_bytes`; one segment where the file's own list of them cannot be read."""
    try:
        sizes = parquet_row_groups(path)
    except RequestError:
        # Left to the reader, which knows whether such a file may be skipped.
        sizes = []
    if not sizes:
        yield 0, None, size
        return
    start = num_bytes = 0
    for index, group_bytes in enumerate(sizes):
        num_bytes += group_bytes
        if num_bytes >= unit_bytes or index == len(sizes) - 1:
            yield start, index + 1, num_bytes
            start, num_bytes = index + 1, 0
