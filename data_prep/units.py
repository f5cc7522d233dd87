"""Work units: what is done as a whole or not at all. They come from the inputs alone, never from who does them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data_prep.megatron import INDEX_SUFFIX, document_ranges
from data_prep.sources import REMOTE_PREFIX
from data_prep.tables import parquet_row_groups, plan_dataset
from lex_pretrain.errors import RequestError

# Guesses for planning only: compressed text unpacks to so many times its size, and a token stands for so much text.
_COMPRESSION_RATIO = 4
_TEXT_BYTES_PER_TOKEN = 4


@dataclass(frozen=True)
class Segment:
    """A part of a source: bytes of a .jsonl, row groups of a .parquet, documents of an .idx, rows or shards of others.

    `end` None means all of it. `num_bytes` is the text's size where it is known, for planning and progress.
    """

    source: str
    start: int
    end: int | None
    num_bytes: int


@dataclass(frozen=True)
class Unit:
    """Segments that become one shard of each split."""

    number: int
    segments: tuple[Segment, ...]

    @property
    def num_bytes(self) -> int:
        return sum(segment.num_bytes for segment in self.segments)


def make_units(sources: list[str], unit_bytes: int) -> list[Unit]:
    """Group the segments of sorted sources, in order, into units of at least `unit_bytes`, or as much as there is."""
    units: list[Unit] = []
    group: list[Segment] = []
    for source in sources:
        for segment in _segments(source, unit_bytes):
            group.append(segment)
            if sum(part.num_bytes for part in group) >= unit_bytes or source.startswith(REMOTE_PREFIX):
                units.append(Unit(len(units), tuple(group)))
                group = []
    if group:
        units.append(Unit(len(units), tuple(group)))
    return units


def _segments(source: str, unit_bytes: int) -> Iterator[Segment]:
    """One segment for most sources, several for a large one that can be read from the middle."""
    if source.startswith(REMOTE_PREFIX):
        for start, end, num_bytes in plan_dataset(source, unit_bytes):
            yield Segment(source, start, end, num_bytes)
        return
    path = Path(source)
    size = path.stat().st_size
    if path.suffix == ".jsonl" and size > unit_bytes:
        for start in range(0, size, unit_bytes):
            end = min(start + unit_bytes, size)
            yield Segment(source, start, end, end - start)
    elif path.suffix == INDEX_SUFFIX:
        for start, end, num_bytes in document_ranges(path, unit_bytes, _TEXT_BYTES_PER_TOKEN):
            yield Segment(source, start, end, num_bytes)
    elif path.suffix == ".parquet" and size > unit_bytes:
        yield from _parquet_segments(path, unit_bytes)
    else:
        ratio = _COMPRESSION_RATIO if path.suffix in (".gz", ".zst") else 1
        yield Segment(source, 0, None, size * ratio)


def _parquet_segments(path: Path, unit_bytes: int) -> Iterator[Segment]:
    """Runs of row groups of at least `unit_bytes`; one segment where the file's own list of them cannot be read."""
    try:
        sizes = parquet_row_groups(path)
    except RequestError:
        # Reading will meet the same fault, where --skip-bad-files decides about it.
        sizes = []
    if not sizes:
        yield Segment(str(path), 0, None, path.stat().st_size)
        return
    start = num_bytes = 0
    for index, size in enumerate(sizes):
        num_bytes += size
        if num_bytes >= unit_bytes or index == len(sizes) - 1:
            yield Segment(str(path), start, index + 1, num_bytes)
            start, num_bytes = index + 1, 0
