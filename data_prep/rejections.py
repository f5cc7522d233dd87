"""`rejected.jsonl`: every record that was not packed, with its file, its place and the reason."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep.unit_files import UnitRecord, json_lines, rejected_file
from data_prep.units import Unit
from lex_pretrain.files import atomic_write

REJECTED_FILE = "rejected.jsonl"


def join_rejections(output: Path, units: list[Unit], done: dict[int, UnitRecord]) -> None:
    """Write `rejected.jsonl` from the units that are done; they need not be all, where a preparation stops early."""
    with atomic_write(output / REJECTED_FILE) as joined:
        for lines in _lines(output, units, done):
            joined.write(json_lines(lines))


def _lines(output: Path, units: list[Unit], done: dict[int, UnitRecord]) -> Iterator[list[dict[str, Any]]]:
    source = ""
    # Records of the source before the present segment; None after a part of it that is not done.
    before: int | None = 0
    for unit in units:
        record = done.get(unit.number)
        bases: list[int | None] = []
        for index, segment in enumerate(unit.segments):
            if segment.source != source:
                source, before = segment.source, 0
            bases.append(before)
            before = before + record.num_records[index] if record and before is not None else None
        if record is None:
            continue
        with rejected_file(output, unit.number).open("rb") as part:
            yield [_placed(unit, bases, json.loads(line)) for line in part]


def _placed(unit: Unit, bases: list[int | None], line: dict[str, Any]) -> dict[str, Any]:
    """A unit's own line with the file and the record's number in it, or its number from where the segment starts."""
    index, number = line.pop("segment"), line.pop("record")
    segment, base = unit.segments[index], bases[index]
    place: dict[str, Any] = {"source": segment.source}
    if base is not None:
        place["record"] = base + number
    else:
        place |= {"segment_start": segment.start, "record_of_segment": number}
    return place | line
