"""Work units: what is done as a whole or not at all. They come from the inputs alone, never from who does them."""

from dataclasses import dataclass
from pathlib import Path

from data_prep.readers import REMOTE_PREFIX, source_size_bytes

# A guess for planning only: compressed text unpacks to about this many times its size.
_COMPRESSION_RATIO = 4


@dataclass(frozen=True)
class Unit:
    """Sources that become one shard of each split."""

    number: int
    sources: tuple[str, ...]
    num_bytes: int


def make_units(sources: list[str], unit_bytes: int) -> list[Unit]:
    """Group sorted sources, in order, into units of at least `unit_bytes`, or as much as there is."""
    units: list[Unit] = []
    group: list[str] = []
    size = 0
    for source in sources:
        group.append(source)
        size += text_size_bytes(source)
        if size >= unit_bytes or source.startswith(REMOTE_PREFIX):
            units.append(Unit(len(units), tuple(group), size))
            group, size = [], 0
    if group:
        units.append(Unit(len(units), tuple(group), size))
    return units


def text_size_bytes(source: str) -> int:
    """Size of a source's text, guessed where it is compressed."""
    return source_size_bytes(source) * (_COMPRESSION_RATIO if source.endswith((".gz", ".zst")) else 1)


def stamp(source: str) -> dict[str, str | int]:
    """What tells whether a source has changed since."""
    if source.startswith(REMOTE_PREFIX):
        return {"path": source}
    status = Path(source).stat()
    return {"path": source, "num_bytes": status.st_size, "modified_nanoseconds": status.st_mtime_ns}
